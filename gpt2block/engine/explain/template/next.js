// ---- the next token, by the rules of gpt2block/sampling.py: float32 up to exp, then integers
const logits = new Float32Array(bytesOf(data.next.logits).buffer);
const UNIT = 2 ** 40;
function massesOf(temperature, topK, topP) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const mass = new Float64Array(logits.length);
  if (temperature === 0) { mass[logits.indexOf(largest)] = UNIT; return mass; }
  const inverse = Math.fround(1 / Math.fround(temperature));
  logits.forEach((l, i) => {
    const below = l === largest ? 0 : Math.fround(l - largest);
    mass[i] = Math.floor(Math.fround(Math.exp(Math.fround(below * inverse))) * UNIT);
  });
  const dropBelow = least => logits.forEach((l, i) => { if (l < least) mass[i] = 0; });
  if (topK > 0 && topK < logits.length) dropBelow(logits.toSorted().at(-topK));
  if (Math.fround(topP) < 1) {
    const order = Array.from(mass.keys()).filter(i => mass[i] > 0).sort((a, b) => logits[b] - logits[a]);
    const total = order.reduce((sum, i) => sum + BigInt(mass[i]), 0n);
    const share = BigInt(Math.fround(topP) * 2 ** 64) * total;
    const least = share / 2n ** 64n + (share % 2n ** 64n ? 1n : 0n);
    let sum = 0n;
    const last = order.find(i => (sum += BigInt(mass[i])) >= (least > 1n ? least : 1n));
    dropBelow(logits[last]);
  }
  return mass;
}
function distribution(...options) {
  const mass = massesOf(...options), total = mass.reduce((a, b) => a + b, 0);
  return mass.map(m => m / total);
}
const byModel = distribution(1, 0, 1);
// Describe the number of tokens that each filter keeps, in the order in which the filters are applied.
function whatIsKept(temperature, topK, topP, kept) {
  if (temperature === 0) return "At temperature 0 the most likely token is always drawn; the filters change nothing.";
  const counted = (...options) => massesOf(...options).reduce((n, mass) => n + (mass > 0), 0), few = n => n === 1 ? "1 token" : `${n.toLocaleString("en")} tokens`;
  const all = logits.length, possible = counted(temperature, 0, 1), afterK = counted(temperature, topK, 1), parts = [];
  if (possible < all) parts.push(`${few(all - possible)} ${all - possible === 1 ? "is" : "are"} less than 2⁻⁴⁰ times as likely as the most likely one, which the sampler rounds to 0.`);
  if (afterK < possible) parts.push(`Top-k keeps the ${few(afterK)} with the largest logits.`);
  else if (topK) parts.push("Top-k drops none of the others.");
  if (kept < afterK) parts.push(`Top-p keeps the fewest of the most likely tokens that have ${percent(topP)} of what is left: ${few(kept)}.`);
  else if (topP < 1) parts.push("Top-p drops none of the others.");
  if (!topK && topP >= 1) parts.push(`Top-k and top-p are off: ${possible < all ? "all others" : "all tokens"} can be drawn.`);
  return parts.join(" ");
}
function drawNext() {
  const temperature = Number(byId("temperature").value), topK = Number(byId("top-k").value), topP = Number(byId("top-p").value);
  byId("temperature-value").textContent = temperature === 0 ? "0, greedy" : temperature.toFixed(2);
  byId("top-k-value").textContent = topK || "off";
  byId("top-p-value").textContent = topP < 1 ? topP.toFixed(2) : "off";
  const sampled = distribution(temperature, topK, topP);
  const kept = sampled.reduce((n, p) => n + (p > 0), 0), entropy = sampled.reduce((h, p) => p > 0 ? h - p * Math.log2(p) : h, 0);
  byId("next-kept").textContent = whatIsKept(temperature, topK, topP, kept);
  byId("next-readout").textContent = `${kept.toLocaleString("en")} of ${logits.length.toLocaleString("en")} tokens can be drawn; entropy ${number(Math.max(0, entropy))} bits`;
  const widest = Math.max(...data.next.shown.map(id => Math.max(sampled[id], byModel[id])));
  byId("next-rows").replaceChildren(...data.next.shown.map(id => {
    const bar = (p, kind) => { const node = el("span", {class: `bar ${kind}`}); node.style.width = `${100 * p / widest}%`; return node; };
    return el("tr", {class: sampled[id] ? null : "out", "data-id": id, "data-p": sampled[id]}, el("th", {scope: "row", title: `id ${id}`}, visible(textOf(id))),
      el("td", {class: "bars", "aria-hidden": "true"}, bar(sampled[id], ""), bar(byModel[id], "model")), el("td", {}, percent(byModel[id])), el("td", {}, percent(sampled[id])));
  }));
}
