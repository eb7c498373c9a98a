// ---- logit lens
const lensValues = decoded(data.lens);
function drawLens() {
  const {positions, top, ids} = data.lens, first = T - positions, {position} = state;
  byId("lens-position").value = position;
  byId("lens-at").textContent = `${position}, after ${quoted(tokens[position].text)}`;
  const table = byId("lens-table");
  if (position < first) {
    table.replaceChildren(el("caption", {class: "note"}, `The page holds the last ${positions} positions.`));
    return;
  }
  const following = tokens[position + 1]?.id;
  const rows = Array.from({length: model.n_layer + 1}, (_, layer) => {
    const start = (layer * positions + position - first) * top;
    const cells = Array.from({length: top}, (_, n) => {
      const id = ids[start + n], p = lensValues[start + n];
      return el("td", {class: id === following ? "actual" : null, "--share": Math.sqrt(p)}, el("span", {class: "mono"}, visible(textOf(id))), percent(p || Number.MIN_VALUE));  // a probability of 0 was rounded to 0: show "<0.01%"
    });
    return el("tr", {}, el("th", {scope: "row"}, layer ? `block ${layer - 1}` : "embedding"), ...cells);
  });
  const head = el("tr", {}, el("th", {scope: "col"}, "after"), ...Array.from({length: top}, (_, n) => el("th", {scope: "col"}, n ? `${n + 1}` : "most likely")));
  table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}
