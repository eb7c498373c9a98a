// ---- attention
const attention = data.attention, side = attention.side;
const weightsOf = (() => {  // weights of a head, row by row, decoded at the first use
  const known = new Map();
  return (layer, head) => {
    const key = `${layer}.${head}`;
    if (!known.has(key)) known.set(key, decoded(attention.heads[layer][head]));
    return known.get(key);
  };
})();
const weightAt = (values, r, c) => values[r * (r + 1) / 2 + c];
const colorOfWeight = (values, r, c) => c > r ? null : mixed(theme(SEQUENTIAL), Math.sqrt(weightAt(values, r, c)));
const cellOf = position => Math.min(side - 1, Math.ceil((position + 1) * side / T) - 1);
function nameOfCell(index) {
  const [first, end] = areaOf(index, side, T);
  return end - first > 1 ? `tokens ${span(first, end)}` : `${quoted(tokens[first].text)} (${first})`;
}
function drawAttention() {
  byId("attention-layer").value = attending();
  const drawings = [];
  byId("heads").replaceChildren(...Array.from({length: model.n_head}, (_, head) => {
    const canvas = el("canvas", {"aria-hidden": "true"});
    drawings.push(() => paint(canvas, side, side, (r, c) => colorOfWeight(weightsOf(attending(), head), r, c)));
    return el("button", {type: "button", class: "pick", "data-head": head, "aria-pressed": head === state.head, onclick: () => { state.head = head; drawHead(); }}, canvas, `head ${head}`);
  }));
  const draw = () => drawings.forEach(each => each());
  painters.set("heads", draw);
  draw();
  drawHead();
}
function drawHead() {
  for (const button of byId("heads").children) button.setAttribute("aria-pressed", Number(button.dataset.head) === state.head);
  const values = weightsOf(attending(), state.head), readout = el("output", {class: "readout", id: "attention-readout", "aria-live": "polite"});
  const describe = (r, c) => c > r ? `${nameOfCell(r)} does not see ${nameOfCell(c)}, which comes later` : `${nameOfCell(r)} reads ${nameOfCell(c)} with weight ${percent(weightAt(values, r, c))}`;
  const map = heatmap({name: "attention", label: `Attention of block ${attending()}, head ${state.head}: rows read columns`, rows: side, columns: side, describe, readout,
    colorAt: (r, c) => colorOfWeight(values, r, c), start: [cellOf(state.position), 0], chosen: r => selectPosition(areaOf(r, side, T)[1] - 1)});
  const bar = el("span", {class: "ramp"}), paintBar = () => { bar.style.background = ramp(theme(SEQUENTIAL)); };
  painters.set("attention-ramp", paintBar);
  paintBar();
  const cut = side < T ? ` ${T} tokens are shown in ${side} rows and columns; each cell is the largest weight of its area.` : "";
  const labeled = side === T && T <= MAX_LABELS;
  byId("attention-map").replaceChildren(labeled ? el("div", {class: "labeled"}, tokenLabels("columns"), tokenLabels("rows"), map) : map, readout, el("div", {class: "legend"}, ...legend("0%", bar, "100%", "color by the square root of the weight")),
    el("p", {class: "note"}, `Click a row, or press Enter, to select its token.${cut}`));
  drawAttended();
}
function drawAttended() {
  const {position, head} = state, values = weightsOf(attending(), head), row = cellOf(position);
  byId("attended-title").textContent = `What ${quoted(tokens[position].text)} (${position}) reads`;
  byId("attended").replaceChildren(...tokens.slice(0, position + 1).map(({text}, n) => {
    const weight = weightAt(values, row, Math.min(cellOf(n), row));
    return el("span", {class: n === position ? "self" : null, title: `${quoted(text)} (${n}): ${percent(weight)}`, "--share": Math.sqrt(weight)}, readable(text));
  }));
  const order = Array.from({length: row + 1}, (_, c) => c).sort((a, b) => weightAt(values, row, b) - weightAt(values, row, a)).slice(0, 8);
  byId("strongest").replaceChildren(...order.map(c => {
    const weight = weightAt(values, row, c), bar = el("span", {class: "bar"});
    bar.style.width = `${100 * weight}%`;
    return el("tr", {}, el("th", {scope: "row"}, nameOfCell(c)), el("td", {class: "bars", "aria-hidden": "true"}, bar), el("td", {}, percent(weight)));
  }));
  drawOpened();
}
