// ---- colors: blue for negative numbers, orange for positive numbers, the page's background for zero
const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const DIVERGING = {
  light: [[8, 64, 129], [67, 147, 195], [246, 245, 242], [240, 150, 60], [140, 60, 0]],
  dark: [[158, 208, 255], [55, 120, 185], [27, 30, 36], [176, 98, 24], [255, 196, 120]],
};
const SEQUENTIAL = {
  light: [[250, 250, 248], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]],
  dark: [[24, 27, 33], [33, 62, 97], [49, 108, 166], [106, 168, 232], [214, 236, 255]],
};
function mixed(stops, share) {  // share: position from 0 to 1 on the color scale; NaN becomes gray
  if (Number.isNaN(share)) return [128, 128, 128];
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((v, i) => Math.round(v + (stops[low + 1][i] - v) * (at - low)));
}
const ramp = stops => `linear-gradient(to right, ${stops.map(c => `rgb(${c})`).join(", ")})`;
const theme = stops => stops[isDark() ? "dark" : "light"];

// ---- a heatmap; the pointer or the arrow keys select a cell
function paint(canvas, rows, columns, colorAt) {
  canvas.width = columns; canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  for (let r = 0, i = 0; r < rows; r++) for (let c = 0; c < columns; c++, i += 4) {
    const color = colorAt(r, c);
    if (color) { image.data.set(color, i); image.data[i + 3] = 255; }
  }
  context.putImageData(image, 0, 0);
}
function heatmap({name, label, rows, columns, colorAt, describe, readout, height, start = [0, 0], chosen, reached}) {
  const canvas = el("canvas", {tabindex: 0, role: "application", "aria-roledescription": "heatmap", "aria-label": `${label}. Arrow keys move between cells.`});
  const cursor = el("div", {class: "cursor"}), frame = el("div", {class: "map"}, canvas, cursor);
  if (height) frame.style.height = height;
  let cell = start;
  const show = (r, c) => {
    cell = [Math.min(Math.max(r, 0), rows - 1), Math.min(Math.max(c, 0), columns - 1)];
    const text = describe(...cell);
    readout.textContent = text ?? "";
    reached?.(...cell);
    cursor.style.display = text === null ? "none" : "block";
    Object.assign(cursor.style, {left: `${100 * cell[1] / columns}%`, top: `${100 * cell[0] / rows}%`, width: `max(4px, ${100 / columns}%)`, height: `max(4px, ${100 / rows}%)`});
  };
  const under = event => {
    const box = canvas.getBoundingClientRect();
    show(Math.floor((event.clientY - box.top) / box.height * rows), Math.floor((event.clientX - box.left) / box.width * columns));
  };
  canvas.addEventListener("pointermove", under);
  canvas.addEventListener("pointerdown", under);
  canvas.addEventListener("click", () => chosen?.(...cell));
  canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) { cursor.style.display = "none"; readout.textContent = ""; } });
  canvas.addEventListener("focus", () => show(...cell));
  canvas.addEventListener("blur", () => { cursor.style.display = "none"; });
  canvas.addEventListener("keydown", event => {
    const move = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -columns], End: [0, columns]}[event.key];
    if (move) { event.preventDefault(); show(cell[0] + move[0], cell[1] + move[1]); }
    if (event.key === "Enter") chosen?.(...cell);
  });
  const draw = () => paint(canvas, rows, columns, colorAt);
  painters.set(name, draw);
  draw();
  return frame;
}
// Draw vectors with the same channels as rows of a heatmap; each row has a color scale of its own.
function strips({vectors, ...options}) {  // vectors: pairs [label, numbers]
  const ends = vectors.map(([, values]) => values.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || 1);
  const map = heatmap({...options, rows: vectors.length, columns: vectors[0][1].length, height: `${1.5 * vectors.length}rem`,
    colorAt: (r, c) => mixed(theme(DIVERGING), vectors[r][1][c] / ends[r] / 2 + 0.5)});
  return el("div", {class: "labeled"}, el("div", {class: "labels rows", "aria-hidden": "true"}, ...vectors.map(([label]) => el("span", {}, label))), map);
}
// Write the first terms of a sum of products and the sum of the rest: "1.2 × 3 + (−2) × 0.5 + 4.1 (62 more terms)".
const FIRST_TERMS = 4;
function sumOfProducts(pairs) {
  const first = pairs.slice(0, FIRST_TERMS).map(([a, b]) => `${signed(a)} × ${signed(b)}`), rest = pairs.slice(FIRST_TERMS);
  if (rest.length) first.push(`${signed(rest.reduce((sum, [a, b]) => sum + a * b, 0))} (${rest.length === 1 ? "1 more term" : `${rest.length.toLocaleString("en")} more terms`})`);
  return first.join(" + ");
}
const legend = (...parts) => parts.map(part => el("span", {}, part));
const areaOf = (index, parts, size) => [Math.floor(index * size / parts), Math.floor((index + 1) * size / parts)];
