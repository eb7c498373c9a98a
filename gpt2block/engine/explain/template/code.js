// ---- code
const LANGUAGES = {
  cuda: /(?<comment>\/\/[^\n]*|\/\*[\s\S]*?\*\/)|(?<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')|(?<builtin>^[ \t]*#[ \t]*\w+|\b__\w+\b|\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b)|(?<type>\b(?:void|bool|char|short|int|long|float|double|unsigned|signed|size_t|auto|half|__half2?|float[234]|int[234]|uint[234]|u?int(?:8|16|32|64)_t)\b)|(?<keyword>\b(?:if|else|for|while|do|return|break|continue|switch|case|default|const|constexpr|static|inline|extern|template|typename|struct|class|namespace|using|sizeof|static_assert|reinterpret_cast|static_cast|volatile|asm|true|false|operator|public|private)\b)|(?<number>\b(?:0x[\da-fA-F]+|\d+\.?\d*(?:e[+-]?\d+)?)[fuUlL]*\b)/gm,
  python: /(?<comment>#[^\n]*|"""[\s\S]*?""")|(?<string>f?"(?:\\.|[^"\\\n])*"|f?'(?:\\.|[^'\\\n])*')|(?<builtin>@\w+|\bnp\b|\bmath\b)|(?<type>\b(?:int|float|bool|str|None|True|False|tuple|list|dict|Any|Array|NDArray)\b)|(?<keyword>\b(?:def|return|if|elif|else|for|while|in|is|not|and|or|import|from|as|with|lambda|raise|yield|class|pass)\b)|(?<number>\b\d+\.?\d*(?:e[+-]?\d+)?\b)/gm,
};
function listing(text, language, {first = 1, here = 0, label}) {
  const code = el("code"), pre = el("pre", {class: "listing", tabindex: 0, role: "region", "aria-label": label}, code);
  let row = el("span", {class: "row"});
  const push = (piece, kind) => piece.split("\n").forEach((line, n) => {
    if (n) { code.append(row); row = el("span", {class: "row"}); }
    if (line) row.append(kind ? el("span", {class: `t-${kind}`}, line) : line);
  });
  let at = 0;
  for (const match of text.matchAll(LANGUAGES[language])) {
    push(text.slice(at, match.index));
    push(match[0], Object.keys(match.groups).find(kind => match.groups[kind] !== undefined));
    at = match.index + match[0].length;
  }
  push(text.slice(at).replace(/\n$/, ""));
  code.append(row);
  code.style.counterReset = `row ${first - 1}`;
  const marked = code.querySelectorAll(".row")[here - first];
  marked?.classList.add("here");
  return [pre, () => { if (marked) pre.scrollTop = Math.max(0, marked.offsetTop - 60); }];
}
function ideaOf({idea, constants}) {
  const heads = Object.entries(constants).map(([name, value]) => `${name} = ${value}`).join(", ");
  return [idea, heads && `compiled with ${heads}`].filter(Boolean).join(" · ");
}
function drawCode(step) {
  const {op, kernels} = steps[step], source = data.functions[op];
  const reference = {title: `NumPy · ${op}`, file: source.file, line: source.line, text: source.text, first: source.line, language: "python", idea: `The reference of this step, in float32 and float64.`};
  const cuda = kernels.map(kernel => ({title: `CUDA, ${kernel.plan} · ${kernel.names[0]}`, file: `kernels_cu/${kernel.file}`, line: kernel.line, text: data.files[kernel.file], first: 1, language: "cuda", idea: ideaOf(kernel)}));
  const sources = [...cuda, reference], panel = el("div", {role: "tabpanel", id: "source"});
  const open = n => {
    const {file, line, text, first, language, idea} = sources[n];
    const [pre, reveal] = listing(text, language, {first, here: line, label: `${file}, line ${line}`});
    panel.replaceChildren(el("p", {class: "note"}, el("code", {}, `${file}:${line}`), idea ? ` · ${idea}` : ""), pre);
    if (panel.isConnected) reveal(); else requestAnimationFrame(reveal);
  };
  const {list, choose} = tabList({label: "Source code", titles: sources.map(({title}) => title), prefix: "code", panel, open});
  choose(0);
  return el("div", {class: "code"}, list, panel);
}
