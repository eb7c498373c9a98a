// ---- the forward pass
const inBlock = step => plan.block.includes(step);
const tensorName = step => inBlock(step) ? `h.${state.layer}.${step}` : step;
const timeOfBlock = layer => plan.blocks[layer].reduce((sum, step) => sum + (tensors[`h.${layer}.${step}`].ms ?? 0), 0);
function flowButton(key, title, small, onclick) {
  return el("li", {}, el("button", {type: "button", class: "pick", "data-part": key, onclick}, title, el("small", {}, small)));
}
function drawFlow() {
  const outer = step => flowButton(step, step, milliseconds(tensors[step].ms), () => selectStep(step));
  const blocks = Array.from({length: model.n_layer}, (_, layer) => flowButton(`${layer}`, `block ${layer}`, milliseconds(timeOfBlock(layer)), () => selectLayer(layer)));
  byId("flow").append(...plan.before.map(outer), ...blocks, ...plan.after.map(outer),
    flowButton("next", "next token", quoted(textOf(data.next.shown[0])), () => byId("next").scrollIntoView()));
}
const fusedLetters = (() => {  // step → letter of its group; a group is one kernel in the fused plan
  const groups = [...new Set(Object.values(data.steps).map(({joins}) => joins.join()))].filter(group => group.includes(","));
  return step => { const at = groups.indexOf(steps[step].joins.join()); return at < 0 ? "" : "ABCDEFGH"[at]; };
})();
function stepButton(step) {
  const at = plan.block.indexOf(step), letter = fusedLetters(step), tensor = tensors[`h.${state.layer}.${step}`];
  const joined = letter && `, joined in the fused plan: ${steps[step].joins.join(", ")}`, time = milliseconds(tensor.ms) || "not stored";
  return el("button", {type: "button", class: "step pick", "data-step": step, "aria-label": `Step ${at + 1}: ${step}, ${steps[step].op}${joined}; ${time}`, onclick: () => selectStep(step)},
    letter ? el("span", {class: "badge", title: `One kernel in the fused plan: ${steps[step].joins.join(" + ")}`}, letter) : "",
    el("span", {class: "number"}, `${at + 1}`), el("b", {}, steps[step].adds ? `+ ${step}` : step), el("small", {}, time));
}
function drawBlock() {
  const diagram = el("div", {class: "diagram"}), reads = (step, other) => tensors[tensorName(step)].inputs.some(([name]) => name === other);
  // Columns of a branch. A step that does not read the step before it, such as Llama's up, is drawn below that step.
  let columns = [];
  for (const step of plan.block) {
    if (!steps[step].adds) {
      if (columns.length > 1 && !reads(step, columns.at(-1).at(-1))) columns.at(-1).push(step);
      else columns.push([step]);
      continue;
    }
    const branch = columns.map(below => el("li", {class: below.length > 1 ? "both" : null}, ...below.map(stepButton)));
    diagram.append(el("div", {class: "sublayer"}, el("div", {class: "rail"}, el("span", {}, diagram.children.length ? "" : "residual stream")),
      el("div", {class: "join", style: "grid-column: 2; grid-row: 1"}, stepButton(step)), el("ol", {class: "branch", style: "grid-area: 2 / 1 / auto / -1"}, ...branch)));
    // The addition comes last in the document, so that screen readers and the keyboard reach the steps in order.
    const added = diagram.lastChild;
    added.append(added.querySelector(".join"));
    columns = [];
  }
  byId("block").replaceChildren(el("div", {role: "group", "aria-label": `Steps of block ${state.layer}`}, diagram),
    el("p", {class: "note"}, "Steps with the same letter are one kernel in the fused plan. Times are of each step alone."));
}
function selectLayer(layer) {
  state.layer = layer;
  if (!inBlock(state.step)) state.step = plan.block[0];
  drawForward();
  drawAttention();
}
function selectStep(step) {
  state.step = step;
  drawForward();
}
function drawForward() {
  const focused = document.activeElement?.dataset?.step;
  drawBlock();
  for (const button of document.querySelectorAll("#flow button")) button.setAttribute("aria-pressed", button.dataset.part === (inBlock(state.step) ? `${state.layer}` : state.step));
  for (const button of document.querySelectorAll(".step")) button.setAttribute("aria-pressed", button.dataset.step === state.step);
  if (focused) document.querySelector(`.step[data-step="${focused}"]`)?.focus();
  drawDetail();
  drawWalk();
}
