// ---- one number of a product, and the row of x and the column of W from which it is computed
const productOf = (() => {  // a product's stored rows and columns, decoded at the first use
  const known = new Map();
  return step => {
    if (!known.has(step)) {
      const {rows, columns, x, w, b, y} = data.opened.products[step];
      known.set(step, {rows, columns, x: decoded(x), w: decoded(w), b: b && decoded(b), y: decoded(y)});
    }
    return known.get(step);
  };
})();
const middle = ([first, end]) => Math.floor((first + end - 1) / 2);
const nearest = (list, at) => list.reduce((best, each, i) => Math.abs(each - at) < Math.abs(list[best] - at) ? i : best, 0);
// m and n: indices into the stored rows and the stored columns
function numberOfProduct(step, m, n) {
  const {rows, columns, x, w, b, y} = productOf(step), K = x.length / rows.length;
  const row = x.subarray(m * K, (m + 1) * K), column = w.subarray(n * K, (n + 1) * K), terms = row.map((a, k) => a * column[k]);
  const bias = b ? b[n] : null, sum = terms.reduce((a, b) => a + b, 0) + (bias ?? 0);
  return {t: rows[m], n: columns[n], row, column, terms, bias, sum, stored: y[m * columns.length + n]};
}
let showProduct = () => {};  // arguments: token and channel; without a channel, the previous channel
function drawProduct(step) {
  showProduct = () => {};
  if (!data.opened.products[step]) return "";
  const title = el("h4", {}, `One number of ${step}: a row times a column`), box = el("div", {class: "product", id: "product", role: "group", "aria-label": `One number of ${step}`}, title);
  if (inBlock(step) && state.layer !== data.layer) {
    box.append(el("p", {class: "note"}, `The page holds rows and columns of block ${data.layer} alone. `, el("button", {type: "button", onclick: () => selectLayer(data.layer)}, `Open block ${data.layer}`)));
    return box;
  }
  const {rows, columns} = productOf(step), tensor = tensors[tensorName(step)], [height, width] = tensor.shape;
  const [[x, [, K]], [w], [b] = []] = tensor.inputs, body = el("div");
  const held = [[rows, height, `rows of ${x}`], [columns, width, `columns of ${w}`]].filter(([list, size]) => list.length < size).map(([list, size, what]) => `${list.length} of ${size.toLocaleString("en")} ${what}`);
  let channel = columns[0];
  showProduct = (token, to = channel) => {
    channel = to;
    const found = numberOfProduct(step, nearest(rows, token), nearest(columns, channel));
    body.replaceChildren(...productParts({step, x, w, b, K, height, width, ...found}));
  };
  showProduct(state.position);
  const hint = `Point at a cell of ${step} above, tap it, or move to it with the arrow keys.`;
  box.append(body, el("p", {class: "note"}, held.length ? `${hint} The page has room for ${held.join(" and ")}: other cells show the nearest one.` : hint, " Weights are rounded to 11 bits here, as float16 numbers are."));
  return box;
}
function productParts({step, x, w, b, K, height, width, t, n, row, column, terms, bias, sum, stored}) {
  const logit = step === "logits" && data.texts[n] !== undefined ? ` ${quoted(textOf(n))}` : "", readout = el("output", {class: "readout", "aria-live": "polite"});
  const bias_ = bias === null ? "" : ` + ${b}[${n}]`, shift = bias === null ? "" : ` + ${signed(bias)} (${b}[${n}])`;
  const pairs = Array.from(row, (a, k) => [a, column[k]]);
  return [
    el("div", {class: "operands"},
      el("div", {class: "matrices", "aria-hidden": "true"}, matrixBox(x, [height, K], {row: t}), "×", matrixBox(w, [K, width], {column: n}), "=", matrixBox(step, [height, width], {row: t, column: n})),
      el("div", {},
        el("p", {class: "mono equation"}, `${step}[${t}, ${n}] = ${x}[${t}, :] · ${w}[:, ${n}]${bias_}`),
        el("p", {class: "mono equation", id: "product-sum"}, `${sumOfProducts(pairs)}${shift} = ${number(sum)}`),
        el("p", {class: "note"}, `Row ${t} of ${x} is token ${quoted(tokens[t].text)}; column ${n} of ${w} makes ${step === "logits" ? "vocabulary entry" : "channel"} ${n}${logit}. The tensor ${step} holds ${number(stored)}.`))),
    strips({name: "product", label: `${x}[${t}, :], ${w}[:, ${n}] and their products, ${K} channels`, readout,
      vectors: [["row", row], ["column", column], ["product", terms]],
      describe: (_, k) => `k = ${k}: ${signed(row[k])} × ${signed(column[k])} = ${number(terms[k])}`}), readout,
  ];
}
// Draw a matrix as a rectangle in which a row, a column or their common cell is marked.
function matrixBox(name, sizes, {row, column}) {
  const mark = el("span", {class: "mark"}), at = (index, size) => [`${100 * index / size}%`, `max(4px, ${100 / size}%)`];
  if (row !== undefined) [mark.style.top, mark.style.height] = at(row, sizes[0]);
  if (column !== undefined) [mark.style.left, mark.style.width] = at(column, sizes[1]);
  return el("figure", {}, el("div", {class: "matrix"}, mark), el("figcaption", {}, name, el("br"), shape(sizes)));
}
