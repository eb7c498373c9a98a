// ---- tokens
function drawTokens() {
  const most = Math.max(8, Math.ceil(Math.max(...tokens.map(token => token.bits ?? 0))));
  const describe = n => {
    const {id, text, bytes, bits} = tokens[n];
    const surprise = bits === null ? (n ? "surprisal not finite" : "first token: nothing predicts it") : `surprisal ${number(bits)} bits`;
    return `Token ${n}: ${quoted(text)} · id ${id} · ${bytes ? `bytes ${bytes}${partial(bytes)} · ` : ""}${surprise}`;
  };
  const show = n => { byId("token-readout").textContent = describe(n); };
  byId("strip").append(...tokens.map((token, n) => el("button", {
    type: "button", role: "option", class: n ? "token" : "token first", title: describe(n), "aria-label": describe(n), "data-position": n,
    "--share": Math.min((token.bits ?? 0) / most, 1), onclick: () => selectPosition(n),
    onpointerenter: () => show(n), onpointerleave: () => show(state.position), onfocus: () => show(n),
  }, visible(token.text))));
  byId("strip").addEventListener("keydown", event => {
    const at = Number(event.target.dataset.position), move = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: T - 1}[event.key];
    if (move === undefined) return;
    event.preventDefault();
    selectPosition(Math.min(Math.max(move, 0), T - 1));
    byId("strip").children[state.position].focus();
  });
  const bar = el("span", {class: "ramp"});
  bar.style.background = "linear-gradient(to right, var(--sunken), var(--strong-warm))";
  byId("token-legend").append(...legend("0 bits", bar, `${most} bits`));
}
function selectPosition(position) {
  state.position = position;
  [...byId("strip").children].forEach((button, n) => {
    button.setAttribute("aria-selected", n === position);
    button.tabIndex = n === position ? 0 : -1;
  });
  byId("token-readout").textContent = byId("strip").children[position].getAttribute("aria-label");
  drawAttended();
  drawExperts();
  showProduct(position);
  drawLens();
}
