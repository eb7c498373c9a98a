// ---- a walk through the block: one sentence for each step, for the selected token
const widthOf = step => tensors[tensorName(step)].shape[1].toLocaleString("en");
const hasExperts = () => data.experts?.layers.includes(state.layer);
const readToken = () => `token ${state.position} ${quoted(tokens[state.position].text)}`;
const WALK = {
  ln1: () => `The ${widthOf("ln1")} numbers of each token in the residual stream are shifted and scaled to mean 0 and variance 1, then multiplied by γ and shifted by β.`,
  rms1: () => `The ${widthOf("rms1")} numbers of each token in the residual stream are divided by their root mean square, then multiplied by γ.`,
  qkv: () => `One product turns them into ${widthOf("qkv")} numbers: the queries of ${model.n_head} heads, and keys and values of ${model.n_kv_head === model.n_head ? "the same heads" : `${model.n_kv_head} heads, each for ${served} heads of queries`}.`,
  qk: () => "Every query and key is divided by its root mean square, or by that of all heads, and multiplied by γ.",
  rope: () => "Every query and key is rotated by angles that grow with its position, so that the product of two depends on their distance.",
  attn: () => `In each of ${model.n_head} heads, ${readToken()} compares its query with the keys of the ${model.windows[state.layer] === null ? "" : `last ${model.windows[state.layer]} `}tokens up to itself, and the softmax of the results weights the mean of their values.`,
  rms_in: () => `The ${widthOf("rms_in")} numbers of each token in the residual stream are divided by their root mean square, then multiplied by γ.`,
  bcx: () => `One product turns them into ${widthOf("bcx")} numbers: B, C and x, each with a number for every channel of the convolution.`,
  conv: () => `In each channel, B · x of ${readToken()} and of the tokens just before it are added with the weights of the channel, and the sum is multiplied by C.`,
  proj: () => `A product mixes ${attends(state.layer) ? "the means of all heads" : "all channels"} into ${widthOf("proj")} numbers.`,
  x1: () => `They are added to the residual stream: the vector of ${readToken()} now has what ${attends(state.layer) ? "attention" : "the convolution"} read from other tokens.`,
  ln2: () => "The sum is normalized like the block's input, before the feed-forward network reads it.",
  rms2: () => "The sum is normalized like the block's input, before the feed-forward network reads it.",
  ff1: () => `A product expands each token's vector to ${widthOf("ff1")} channels; in this half of the block, each token is computed by itself.`,
  gelu: () => "The GELU keeps large positive numbers and brings negative ones close to 0: without it, two products would be no more than one.",
  routes: () => `The router scores all experts, and ${readToken()} uses the ${data.experts.used} with the highest scores; the scores become weights of their results.`,
  gate: () => `A product computes ${widthOf("gate")} gates for each token; in this half of the block, each token is computed by itself.`,
  up: () => `Another product of the same vector computes ${widthOf("up")} numbers, one for each gate.`,
  ff: () => hasExperts() ? `Each chosen expert computes gates and numbers by two products of the same vector, and multiplies each number by the SiLU of its gate: ${widthOf("ff")} numbers of all these experts.` : `Each number is multiplied by the ${steps.ff.gate === "gelu" ? "GELU" : "SiLU"} of its gate, which is close to 0 for a negative gate and close to the gate for a large one.`,
  fc: () => `A product expands each token's vector to ${widthOf("fc")} channels; in this half of the block, each token is computed by itself.`,
  relu2: () => "Positive numbers are squared and negative ones become 0: without it, two products would be no more than one.",
  ff2: () => `A product brings them back to ${widthOf("ff2")} channels.`,
  down: () => hasExperts() ? "A product for each of these experts brings its numbers back to the width of the residual stream." : `A product brings them back to ${widthOf("down")} channels.`,
  queries: () => `One product turns them into ${widthOf("queries")} numbers: the queries of ${model.n_head} heads. Keys and values are those of an earlier block.`,
  q_rope: () => "Every query is divided by its root mean square, multiplied by γ, and rotated by angles that grow with its position.",
  x2: () => "They are divided by their root mean square, multiplied by γ, and added to the residual stream.",
  layer_gate: () => `A product computes ${widthOf("layer_gate")} gates for each token, for the row that the token has for this block.`,
  layer_ff: () => "Each number of the row is multiplied by the GELU of its gate.",
  layer_proj: () => `A product brings them back to ${widthOf("layer_proj")} channels.`,
  output: () => `They are ${hasExperts() ? "multiplied by the weights of their experts and " : ""}added to the residual stream, which ${state.layer + 1 < model.n_layer ? `block ${state.layer + 1}` : plan.after[0]} reads next.`,
};
let walking = false;
function setUpWalk() {
  const button = (id, text, onclick) => el("button", {type: "button", id: `walk-${id}`, onclick}, text);
  byId("walk").append(
    button("start", "", () => { walking = true; selectStep(plan.block[0]); byId("walk-next").focus(); }),
    el("p", {id: "walk-text", "aria-live": "polite"}),
    button("back", "Back", () => walk(-1)), button("next", "Next", () => walk(1)), button("end", "End", endWalk));
  byId("walk").addEventListener("keydown", event => {
    if (!walking) return;
    const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (move) { event.preventDefault(); walk(move); }
    if (event.key === "Escape") endWalk();
  });
  drawWalk();
}
function walk(move) {
  const at = plan.block.indexOf(state.step) + move;
  if (at === plan.block.length) endWalk();
  else if (at >= 0) selectStep(plan.block[at]);
}
function endWalk() {
  walking = false;
  drawWalk();
  byId("walk-start").focus();
}
function drawWalk() {  // draw the sentence of the selected step, wherever the step was selected
  walking &&= inBlock(state.step);
  byId("walk").classList.toggle("walking", walking);
  byId("walk-start").textContent = `Walk through the block in ${plan.block.length} steps`;
  for (const node of byId("walk").children) node.hidden = walking === (node.id === "walk-start");
  const at = plan.block.indexOf(state.step), last = at + 1 === plan.block.length;
  byId("walk-text").replaceChildren(...walking ? [el("b", {}, `Step ${at + 1} of ${plan.block.length}, ${state.step}. `), WALK[state.step]()] : []);
  byId("walk-back").setAttribute("aria-disabled", at === 0);
  byId("walk-next").textContent = last ? "Finish" : "Next";
}
