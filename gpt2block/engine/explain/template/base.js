"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const {model, tokens, tensors} = data;
// The data of a step in the selected block. Names of a block that computes the step in another way begin with its kind.
const steps = new Proxy(data.steps, {get: (all, step) => all[`${plan.kinds[state.layer]}.${step}`] ?? all[step]});
const plan = {...data.plan, get block() { return this.blocks[state.layer]; }};  // block: the steps of the selected block
const attends = layer => plan.blocks[layer].includes("attn");
const attending = () => attends(state.layer) ? state.layer : data.opened.attention.layer;  // the block whose attention is shown
const served = model.n_head / model.n_kv_head;  // number of query heads per key head
const GROUPED = `Queries are grouped: each of the ${model.n_kv_head} head${model.n_kv_head > 1 ? "s" : ""} of keys and values serves ${served} heads of queries.`;
const windowOf = layer => model.windows[layer] === null ? "" : ` In this layer a token sees the last ${model.windows[layer]} tokens only, its own among them: its window.`;
const growth = model.growth ? ` Queries at position t are then multiplied by 1 + ${model.growth[0]} log(1 + ⌊t / ${model.growth[1]}⌋).` : "";
const T = tokens.length;
const state = {layer: data.layer, step: plan.before[0], head: 0, position: T - 1, opened: 0, read: 0, channel: 0};
const MAX_LABELS = 44;
const painters = new Map();  // functions that redraw elements whose colors depend on the theme
const byId = id => document.getElementById(id);

// ---- elements, numbers, texts: a text of a user or model becomes a text node, never HTML
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replaceAll("-", "−");
}
const percent = p => p >= 0.9995 && p < 1 ? "99.9+%" : p === 0 ? "0%" : p < 1e-4 ? "<0.01%" : `${(100 * p).toFixed(p < 0.1 ? 2 : 1)}%`;
const milliseconds = ms => ms === undefined || ms === null ? "" : ms < 0.9995 ? `${Number((1000 * ms).toPrecision(3))} µs` : `${ms.toPrecision(3)} ms`;
const shape = sizes => `(${sizes.join(", ")})`;
const NAMED = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"};
const hidden = c => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0");
// Control characters, and marks that change the direction of text, are shown as their code.
const visible = text => text.replace(/[ \n\t\r]/g, c => NAMED[c]).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu, hidden) || "∅";
const readable = text => text.replace(/[\p{Cf}\p{Zl}\p{Zp}\p{Cs}]|(?![\n\t])\p{Cc}/gu, hidden);
const quoted = text => `“${visible(text)}”`;
// A note for a token whose bytes are not whole UTF-8 characters; "" for other tokens.
const partial = bytes => {
  try { new TextDecoder("utf-8", {fatal: true}).decode(Uint8Array.from(bytes.split(" ").filter(Boolean), byte => parseInt(byte, 16))); return ""; }
  catch { return ", not a whole character"; }
};
const textOf = id => data.texts[id] ?? tokens.find(token => token.id === id)?.text ?? `#${id}`;
const signed = value => value < 0 ? `(${number(value)})` : number(value);
const span = (first, end) => end - first > 1 ? `${first}–${end - 1}` : `${first}`;

// ---- tabs of one panel: arrow keys move between the tabs, and open(n) fills the panel
function tabList({label, titles, prefix, panel, open}) {
  const list = el("div", {role: "tablist", "aria-label": label});
  const choose = (n, focus) => {
    [...list.children].forEach((tab, i) => { tab.setAttribute("aria-selected", i === n); tab.tabIndex = i === n ? 0 : -1; });
    panel.setAttribute("aria-labelledby", `${prefix}-${n}`);
    open(n);
    if (focus) list.children[n].focus();
  };
  list.append(...titles.map((title, n) => el("button", {type: "button", role: "tab", id: `${prefix}-${n}`, "aria-controls": panel.id, onclick: () => choose(n),
    onkeydown: event => { const move = {ArrowRight: 1, ArrowLeft: -1}[event.key]; if (move) { event.preventDefault(); choose((n + move + titles.length) % titles.length, true); } }}, title)));
  return {list, choose};
}

// ---- decoding of stored numbers: base64 of float32, or of float16 multiples of a scale
function bytesOf(text) { return Uint8Array.from(atob(text), c => c.charCodeAt(0)); }
function half(bits) {
  const exponent = bits >> 10 & 31, fraction = bits & 1023;
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction;
  return bits & 0x8000 ? -size : size;
}
function decoded({values, scale}) {
  const bytes = bytesOf(values);
  if (scale === undefined) return Float64Array.from(new Float32Array(bytes.buffer));
  const out = new Float64Array(bytes.length / 2);
  for (let i = 0; i < out.length; i++) out[i] = half(bytes[2 * i] | bytes[2 * i + 1] << 8) * (scale || 1);
  return out;
}
