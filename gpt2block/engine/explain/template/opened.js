// ---- one row of attention, step by step, from the queries, keys and values of the block that the page opens
const LATER = 3;  // number of tokens shown after the selected token, to show that the mask hides them
const rowsOfQKV = decoded(data.opened.attention.rows), openedTokens = data.opened.attention.tokens;
const openedWindow = model.windows[data.opened.attention.layer], scaleOfScores = steps.attn.number;  // window null: all tokens; scale null: 1 / √d
const isPast = (position, j) => openedWindow !== null && j <= position - openedWindow;
function attentionRow(position, head) {
  const D = model.head_size, Q = model.n_head * D, KV = model.n_kv_head * D, shared = Math.floor(head * model.n_kv_head / model.n_head);
  const part = (token, from) => rowsOfQKV.subarray(token * (Q + 2 * KV) + from, token * (Q + 2 * KV) + from + D);
  const seen = Array.from({length: position + 1}, (_, j) => j), all = Array.from({length: Math.min(openedTokens, position + 1 + LATER)}, (_, j) => j);
  const q = part(position, head * D), keys = all.map(j => part(j, Q + shared * D)), values = seen.map(j => part(j, Q + KV + shared * D));
  const scores = keys.map(k => k.reduce((sum, each, c) => sum + q[c] * each, 0)), scaled = scores.map(score => scaleOfScores === null ? score / Math.sqrt(D) : score * scaleOfScores);
  const masked = scaled.map((score, j) => j > position || isPast(position, j) ? -Infinity : score), largest = Math.max(...masked);
  const powers = masked.map(score => Math.exp(score - largest)), total = powers.reduce((a, b) => a + b, 0), weights = powers.map(power => power / total);
  const output = q.map((_, c) => values.reduce((sum, v, j) => sum + weights[j] * v[c], 0));
  return {position, head, q, keys, values, scores, scaled, masked, largest, powers, total, weights, output};
}
const infinite = value => value === -Infinity ? "−∞" : number(value);
const nameOfToken = token => `${quoted(tokens[token].text)} (${token})`;
const equation = text => el("p", {class: "mono equation"}, text);
const livePart = () => el("output", {class: "readout", "aria-live": "polite"});

// Functions that return a step's details for the token selected in the table. Arguments: row, token, redraw of the table.
function detailOfScore({position, q, keys, scores}, j) {
  const k = keys[j], products = q.map((each, c) => each * k[c]), readout = livePart();
  return [strips({name: "opened", label: `Query of ${nameOfToken(position)}, key of ${nameOfToken(j)} and their products, ${q.length} channels`, readout,
    vectors: [[`q(${position})`, q], [`k(${j})`, k], ["product", products]], describe: (_, c) => `channel ${c}: ${signed(q[c])} × ${signed(k[c])} = ${number(products[c])}`}), readout,
  equation(`${sumOfProducts(Array.from(q, (each, c) => [each, k[c]]))} = ${number(scores[j])}`)];
}
function detailOfScale({q, scores, scaled}, j) {
  if (scaleOfScores !== null) return [equation(`${signed(scores[j])} × ${number(scaleOfScores)} = ${number(scaled[j])}`)];
  return [equation(`${signed(scores[j])} ÷ √${q.length} = ${signed(scores[j])} ÷ ${number(Math.sqrt(q.length))} = ${number(scaled[j])}`)];
}
function detailOfMask({position, scaled, masked}, j) {
  const order = j > position ? `comes after ${nameOfToken(position)}: it is hidden`
    : isPast(position, j) ? `comes before the last ${openedWindow} tokens up to ${nameOfToken(position)}: it is hidden` : j < position ? `comes before ${nameOfToken(position)}: it stays` : "is the token itself: it stays";
  return [equation(masked[j] === -Infinity ? `${signed(scaled[j])} + (−∞) = −∞` : `${signed(scaled[j])} + 0 = ${number(scaled[j])}`), el("p", {class: "note"}, `${nameOfToken(j)} ${order}.`)];
}
function detailOfSoftmax({masked, largest, powers, total, weights}, j) {
  return [equation(`e^(${infinite(masked[j])} − ${signed(largest)}) = ${number(powers[j])}`), equation(`${number(powers[j])} ÷ ${number(total)} = ${percent(weights[j])}`),
    el("p", {class: "note"}, `${number(largest)} is the largest score of the row. Subtracting it from all scores changes no weight and keeps the powers from overflowing. ${number(total)} is the sum of the powers.`)];
}
function detailOfValues({position, head, values, weights, output}, j, drawTable) {
  const weighted = values.map((v, i) => v.map(each => weights[i] * each)), end = weighted.reduce((most, v) => v.reduce((a, b) => Math.max(a, Math.abs(b)), most), 0) || 1;
  const readout = livePart(), result = livePart(), sum = equation(""), D = output.length;
  const choose = channel => {
    state.channel = channel;
    sum.textContent = `${sumOfProducts(values.map((v, i) => [weights[i], v[channel]]))} = ${number(output[channel])}`;
  };
  choose(state.channel);
  return [el("p", {class: "note"}, "Rows are tokens, columns are the channels of the head: weight times value."),
    heatmap({name: "opened", label: `Weighted values, ${values.length} tokens by ${D} channels`, rows: values.length, columns: D, readout, start: [Math.min(j, position), state.channel], height: `${Math.min(Math.max(values.length * 12, 48), 300)}px`,
      colorAt: (r, c) => mixed(theme(DIVERGING), weighted[r][c] / end / 2 + 0.5), describe: (r, c) => `${nameOfToken(r)}, channel ${c}: ${percent(weights[r])} × ${signed(values[r][c])} = ${number(weighted[r][c])}`,
      reached: (_, c) => { if (c !== state.channel) { choose(c); drawTable(); } }}), readout,
    strips({name: "opened-result", label: `Result of head ${head} for ${nameOfToken(position)}, ${D} channels`, readout: result, vectors: [["sum", output]], describe: (_, c) => `channel ${c}: ${number(output[c])}`}), result, sum];
}
// head, cell, sum: heading, entry and total of a column of the table
const OPENED_STEPS = [
  {title: "Q·K", head: () => "q·k", about: row => `The query of ${nameOfToken(row.position)} is multiplied by the key of every token: one score each, the sum of ${model.head_size} products.`,
    cell: (row, j) => number(row.scores[j]), detail: detailOfScore},
  {title: "scale", head: () => scaleOfScores === null ? "÷ √d" : "scaled", about: () => scaleOfScores === null
    ? `Every score is divided by √${model.head_size}, the root of the number of channels of a head, so that wider heads do not have larger scores.`
    : `Every score is multiplied by ${number(scaleOfScores)}, a number of this model's config.`,
    cell: (row, j) => number(row.scaled[j]), detail: detailOfScale},
  {title: "mask", head: () => "masked", about: row => `Scores of tokens after ${nameOfToken(row.position)} become −∞: a token must not see what comes later.${openedWindow === null ? "" : ` So do those before the last ${openedWindow} tokens, the window of this layer.`}`,
    cell: (row, j) => infinite(row.masked[j]), detail: detailOfMask},
  {title: "softmax", head: () => "weight", about: () => "Softmax turns the scores into weights that are positive and add up to 100%: e to the power of each score, divided by the sum of all.",
    cell: (row, j) => percent(row.weights[j]), sum: () => "100%", detail: detailOfSoftmax},
  {title: "weights · V", head: () => `× v[${state.channel}]`, about: () => "The values of the tokens, multiplied by their weights, add up to the result of the head: one number for each channel.",
    cell: (row, j) => j > row.position ? "0" : number(row.weights[j] * row.values[j][state.channel]), sum: row => number(row.output[state.channel]), detail: detailOfValues},
];
function drawOpened() {
  const {head, position} = state, layer = attending(), opened = data.opened.attention.layer, box = byId("opened-row");
  byId("opened-title").textContent = `One row of attention, step by step: block ${layer}, head ${head}, ${nameOfToken(position)}`;
  if (layer !== opened) {
    box.replaceChildren(el("p", {class: "note"}, `The page holds queries, keys and values of block ${opened} alone. `, el("button", {type: "button", onclick: () => selectLayer(opened)}, `Open block ${opened}`)));
    return;
  }
  if (position >= openedTokens) {
    box.replaceChildren(el("p", {class: "note"}, `The page has room for queries, keys and values of the first ${openedTokens} tokens. `, el("button", {type: "button", onclick: () => selectPosition(openedTokens - 1)}, `Select ${nameOfToken(openedTokens - 1)}`)));
    return;
  }
  const row = attentionRow(position, head), panel = el("div", {role: "tabpanel", id: "opened-panel"});
  state.read = row.weights.indexOf(Math.max(...row.weights));
  const {list, choose} = tabList({label: "Steps of attention", titles: OPENED_STEPS.map(({title}, n) => `${n + 1} · ${title}`), prefix: "opened", panel,
    open: n => { state.opened = n; drawOpenedStep(row, panel); }});
  box.replaceChildren(list, panel);
  choose(state.opened);
}
function drawOpenedStep(row, panel) {
  const step = OPENED_STEPS[state.opened], detail = el("div", {class: "opened-detail"}), table = el("div", {class: "opened-table"});
  const later = T - 1 - row.position, hidden = row.masked.length - 1 - row.position;
  const drawTable = () => drawOpenedTable(row, table, select);
  const draw = () => { drawTable(); detail.replaceChildren(el("h4", {}, nameOfToken(state.read)), ...step.detail(row, state.read, drawTable)); };
  const select = token => {
    state.read = token;
    draw();
    table.querySelector('[aria-pressed="true"]').focus();
  };
  panel.replaceChildren(el("p", {}, step.about(row)), el("div", {class: "opened"}, el("div", {}, table, later > hidden ? el("p", {class: "note"}, `${later - hidden} more tokens come later and are masked, too.`) : ""), detail));
  draw();
}
function drawOpenedTable(row, box, select) {
  const shown = OPENED_STEPS.slice(0, state.opened + 1), now = n => n === state.opened ? "now" : n < state.opened - 1 ? "before" : null, at = box.scrollTop;
  const head = ({head}, n) => el("th", {scope: "col", class: now(n)}, head());
  const move = (event, j) => {
    const to = {ArrowDown: j + 1, ArrowUp: j - 1, Home: 0, End: row.masked.length - 1}[event.key];
    if (to === undefined || !(to in row.masked)) return;
    event.preventDefault();
    select(to);
  };
  const body = row.masked.map((_, j) => el("tr", {class: row.masked[j] === -Infinity ? "out" : null}, el("th", {scope: "row"}, el("button", {type: "button", class: "pick", "aria-pressed": j === state.read, tabindex: j === state.read ? 0 : -1, "data-token": j,
    onclick: () => select(j), onkeydown: event => move(event, j)}, nameOfToken(j))), ...shown.map(({cell}, n) => el("td", {class: now(n)}, cell(row, j)))));
  const sums = shown.some(({sum}) => sum) ? el("tfoot", {}, el("tr", {}, el("th", {scope: "row"}, "sum"), ...shown.map(({sum}, n) => el("td", {class: now(n)}, sum ? sum(row) : "")))) : "";
  box.replaceChildren(el("table", {}, el("caption", {class: "hidden-text"}, `Scores of ${nameOfToken(row.position)} with every token`), el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "token"), ...shown.map(head))), el("tbody", {}, ...body), sums));
  const {offsetTop: top, offsetHeight: height} = box.querySelectorAll("tbody tr")[state.read];
  box.scrollTop = top < at + 2 * height || top + 3 * height > at + box.clientHeight ? top - box.clientHeight / 2 : at;
}
