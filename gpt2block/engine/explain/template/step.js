// ---- one step
function drawDetail() {
  const {step} = state, {op} = steps[step], tensor = tensors[tensorName(step)];
  const at = plan.block.indexOf(step);
  const about = el("p", {}), formula = el("div", {class: "formula"});
  const {number: own} = steps[step];  // the model's scale or factor in this step, or null
  const fits = {  // whether a term applies to this step: attribute data-NAME of a template → its value
    input: count => tensor.inputs.length >= Number(count), number: stated => (stated === "yes") === (own !== null),
    gate: name => name === steps[step].gate, op: name => name === op, block: name => plan.blocks[state.layer].includes(name),
  };
  for (const [part, id] of [[about, `about-${step}`], [formula, `formula-${op}`]]) {
    part.append(byId(id)?.content.cloneNode(true) ?? "");
    for (const [name, fit] of Object.entries(fits)) {
      for (const term of part.querySelectorAll(`[data-${name}]`)) if (!fit(term.dataset[name])) term.remove();
    }
  }
  for (const term of formula.querySelectorAll('[data-number="yes"] mn')) term.textContent = String(Number(own.toPrecision(6)));
  about.append(step === "attn" && served > 1 ? ` ${GROUPED}` : "", step === "attn" ? windowOf(state.layer) : "", step === "rope" ? growth : "", step === "attn" ? el("a", {href: "#opened"}, " One row of it, step by step.") : "");
  const inputs = tensor.inputs.map(([name, sizes]) => `${name} ${shape(sizes)}`).join(", ");
  const left = el("div", {},
    el("header", {}, el("h3", {id: "step-title"}, inBlock(step) ? `${at + 1} · ${step}` : step), el("span", {class: "muted mono"}, `${op}${inBlock(step) ? ` · block ${state.layer}` : ""}`)),
    about, formula,
    el("p", {class: "shapes"}, `${inputs} → ${step} ${shape(tensor.shape)}`), numbers(tensor), el("p", {class: "note"}, fusion(step)));
  const experts = step === "routes" ? el("div", {class: "scroll"}, el("table", {class: "lens", id: "experts"})) : "";
  byId("detail").replaceChildren(neighbours(), left, el("div", {}, ...drawTensor(step, tensor), experts), drawProduct(step), drawCode(step));
  drawExperts();
}
function neighbours() {  // buttons for the previous and the next step, perhaps in another block
  const layers = Array.from({length: model.n_layer}, (_, layer) => plan.blocks[layer].map(step => ({step, layer})));
  const all = [...plan.before.map(step => ({step})), ...layers.flat(), ...plan.after.map(step => ({step}))];
  const at = all.findIndex(({step, layer}) => step === state.step && (layer ?? state.layer) === state.layer);
  const button = (move, shown) => {
    const to = all[at + move];
    if (!to) return el("span", {});
    const block = to.layer === undefined || to.layer === state.layer && inBlock(state.step) ? "" : ` of block ${to.layer}`;
    return el("button", {type: "button", "data-move": move, onclick: () => go(to, move)}, shown(`${to.step}${block}`));
  };
  return el("div", {class: "steps", role: "group", "aria-label": "Neighbouring steps"}, button(-1, name => `← ${name}`), button(1, name => `${name} →`));
}
function go({step, layer}, move) {
  state.step = step;
  if (layer === undefined || layer === state.layer) drawForward();
  else selectLayer(layer);
  const panel = byId("detail");
  panel.querySelector(`[data-move="${move}"]`)?.focus({preventScroll: true});
  panel.scrollIntoView();
}
function numbers(tensor) {
  const rows = [["min", number(tensor.min)], ["max", number(tensor.max)], ["mean", number(tensor.mean)]];
  if (tensor.kernel !== undefined) rows.push(
    ["error of this step alone", number(tensor.max_rel)], ["error accumulated from the tokens on", number(tensor.total_rel)],
    [`time, ${tensor.kernel}`, milliseconds(tensor.ms)]);
  return el("table", {class: "numbers"}, el("tbody", {}, ...rows.map(([name, value]) => el("tr", {}, el("th", {scope: "row"}, name), el("td", {}, value)))));
}
function fusion(step) {
  const {joins} = steps[step], last = joins.at(-1), list = joins.length > 1 ? `${joins.slice(0, -1).join(", ")} and ${last}` : "";
  const stored = tensors[tensorName(step)].stored;
  if (!stored) return `This device computes ${list} in one kernel and stores ${last} alone. The numbers here are those of the float64 pass.`;
  if (!inBlock(step)) return "";
  if (joins.length === 1) return "The fused plan runs this step by itself.";
  return `The fused plan computes ${list} in one kernel${last === step ? "." : `, and never stores ${step}.`}`;
}
function drawTensor(step, tensor) {
  const {rows, columns} = tensor.grid, [height, width] = tensor.shape, values = decoded(tensor.grid);
  const sizes = Float64Array.from(values, Math.abs).filter(Number.isFinite).sort();
  const largest = sizes.at(-1), end = sizes[Math.max(0, Math.ceil(0.99 * sizes.length) - 1)] || largest || 1;
  const readout = el("output", {class: "readout", "aria-live": "polite"});
  const describe = (r, c) => {
    const [t, tEnd] = areaOf(r, rows, height), [k, kEnd] = areaOf(c, columns, width);
    const who = tEnd - t > 1 ? `tokens ${span(t, tEnd)}` : `token ${t} ${quoted(tokens[t].text)}`;
    return `${who}, ${step === "logits" ? "vocabulary" : "channel"} ${span(k, kEnd)}: ${number(values[r * columns + c])}`;
  };
  const map = heatmap({name: "tensor", label: `${step}, ${height} tokens by ${width} channels, from ${number(tensor.min)} to ${number(tensor.max)}`, rows, columns, describe, readout,
    colorAt: (r, c) => mixed(theme(DIVERGING), values[r * columns + c] / end / 2 + 0.5), height: `${Math.round(Math.min(Math.max(rows * 12, 84), 528))}px`,
    reached: (r, c) => showProduct(middle(areaOf(r, rows, height)), middle(areaOf(c, columns, width)))});
  if (data.opened.products[step]) map.querySelector("canvas").setAttribute("aria-describedby", "product-sum");
  const labels = rows === height ? tokenLabels("rows") : "";
  const bar = el("span", {class: "ramp"}), paintBar = () => { bar.style.background = ramp(theme(DIVERGING)); };
  painters.set("tensor-ramp", paintBar);
  paintBar();
  const area = rows === height && columns === width ? "Every cell is one number." : `Each cell is the number of largest magnitude among ${part(height, rows, "token")} × ${part(width, columns, "channel")}.`;
  const scale = legend(`≤ ${number(-end)}`, bar, `≥ ${number(end)}`, `linear; ${end < largest ? "the largest 1% have the end colors" : "to the largest magnitude"}`);
  return [el("div", {class: labels ? "labeled" : null}, labels, map), readout, el("div", {class: "legend"}, ...scale),
    el("p", {class: "note"}, `Rows are tokens, columns are channels. ${area}`)];
}
function tokenLabels(kind) {  // labels along an axis of tokens; "" for more than MAX_LABELS tokens
  const long = tokens.some(({text}) => visible(text).length > 1) ? " long" : "";
  return T > MAX_LABELS ? "" : el("div", {class: `labels ${kind}${long}`, "aria-hidden": "true"}, ...tokens.map(token => el("span", {}, visible(token.text))));
}
function part(size, parts, unit) {
  const least = Math.floor(size / parts), most = Math.ceil(size / parts);
  return `${least === most ? least : `${least}–${most}`} ${unit}${most > 1 ? "s" : ""}`;
}
