// ---- the whole page
function drawFacts() {
  const letters = [...readable(data.text)];
  byId("title").textContent = letters.slice(0, 140).join("") + (letters.length > 140 ? "…" : "");
  const facts = {model: `${model.name} (${model.kind})`, sizes: `${model.n_layer} blocks, ${model.n_head} heads${served > 1 ? ` (${model.n_kv_head} of keys and values)` : ""}, ${model.n_embd} channels, ${model.vocab_size.toLocaleString("en")} tokens in the vocabulary`,
    text: `${T} token${T > 1 ? "s" : ""}, context ${model.n_ctx.toLocaleString("en")}`, weights: model.dtype, device: model.device};
  byId("facts").append(...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}
function drawNotes() {
  const other = tensors[`h.${(data.layer + 1) % model.n_layer}.output`].grid, own = tensors[`h.${data.layer}.output`].grid;
  const notes = [
    "Heatmaps and attention hold the real tensors of this forward pass, each number rounded to float16 relative to the tensor's largest magnitude: about three significant digits. A tensor that is too large is downsampled: each cell is the number of largest magnitude in its area, so that outliers stay visible.",
    "min, max and mean are those of the whole tensor. Statistics, errors, times and surprisals are rounded to four significant digits. The logits of the next token are exact.",
    "Errors are the largest difference from the same step in float64, divided by the tensor's largest magnitude. Alone: the step on exact inputs. Accumulated: from the tokens on.",
    model.device.startsWith("CPU") ? "Times are the shortest wall time of three runs of the step's NumPy function on this machine." : "Times are the shortest of five runs of the step's kernels, between two CUDA events; gaps between several launches count.",
    "Colors: blue for negative and orange for positive numbers, which people with color blindness can tell apart. The scale is written under each heatmap.",
  ];
  if (model.n_layer > 1 && own.rows * own.columns > other.rows * other.columns) notes.push(`To keep the page small, heatmaps of block ${data.layer} have more cells than those of the other blocks, here ${own.rows} × ${own.columns} and ${other.rows} × ${other.columns}. The option --layer, or layer= of explain, chooses the block.`);
  const {attention: held} = data.opened;
  const ofProducts = held.layer === data.layer ? "its products" : `the products of block ${data.layer}, which has no attention`;
  notes.push(`Of block ${held.layer}, the page holds queries, keys and values of ${held.tokens < T ? `the first ${held.tokens} tokens` : "all tokens"}, ${held.rows.scale === undefined ? "in float32" : "rounded to float16"}, and rows and columns of ${ofProducts}: rows in float32, weights rounded to float16. It computes scores, weights and sums from these numbers.`);
  if (tokens.some(({bytes}) => partial(bytes))) notes.push("A token that is not a whole character, but some of its bytes, is shown as these bytes: \\xe4 is the byte e4.");
  if (side < T) notes.push(`To keep the page small, attention over ${T} tokens is downsampled to ${side} × ${side} cells for each head.`);
  if (data.lens.positions < T) notes.push(`To keep the page small, the logit lens holds the last ${data.lens.positions} positions.`);
  byId("notes").append(...notes.map(text => el("li", {}, text)));
}
function setUpTheme() {
  const button = byId("theme"), update = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; painters.forEach(draw => draw()); };
  try { const kept = localStorage.getItem("gpt2block-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* not allowed here */ }
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("gpt2block-theme", document.documentElement.dataset.theme); } catch { /* not allowed here */ }
    update();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  addEventListener("message", ({source, data}) => {  // a page that shows this page in a frame sets the theme
    if (source !== parent || !["light", "dark"].includes(data?.theme)) return;
    document.documentElement.dataset.theme = data.theme;
    update();
  });
  update();
}
setUpTheme();
drawFacts();
drawTokens();
drawFlow();
setUpWalk();
drawForward();
byId("attention-layer").append(...plan.blocks.map((_, layer) => layer).filter(attends).map(layer => el("option", {value: layer}, `${layer}`)));
byId("attention-layer").addEventListener("change", event => selectLayer(Number(event.target.value)));
drawAttention();
byId("lens-position").max = T - 1;
byId("lens-position").addEventListener("input", event => selectPosition(Number(event.target.value)));
byId("top-k").max = Math.min(100, logits.length);
for (const id of ["temperature", "top-k", "top-p"]) byId(id).addEventListener("input", drawNext);
byId("next-note").textContent = `The ${data.next.shown.length} most likely tokens. Wide bars: after temperature, top-k and top-p. Thin bars: the model's own distribution.`;
selectPosition(T - 1);
drawNext();
drawNotes();
