// ---- the experts of the selected token in every block, next to the step routes
const expertValues = data.experts && decoded(data.experts);
function drawExperts() {
  const table = byId("experts");
  if (!table) return;
  const {layers, positions, used, numbers} = data.experts, at = state.position - T + positions;
  table.replaceChildren(el("caption", {class: "note"}, at < 0 ? `The page holds the last ${positions} positions.` : `The experts of ${readToken()} in each block, and their weights.`));
  if (at < 0) return;
  table.append(el("tbody", {}, ...layers.map((layer, row) => el("tr", {}, el("th", {scope: "row"}, `block ${layer}`), ...Array.from({length: used}, (_, k) => {
    const n = (row * positions + at) * used + k, weight = expertValues[n];
    return el("td", {"--share": Math.sqrt(weight)}, el("span", {class: "mono"}, `${numbers[n]}`), ` ${percent(weight)}`);
  })))));
}
