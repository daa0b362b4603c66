"use strict";
// What every page shares: its data, elements, tables, downloads, and when charts are drawn.
const page = JSON.parse(document.getElementById("page-data").textContent);

// -- elements ---------------------------------------------------------------------------------------------------------

const at = id => document.getElementById(id);

// Text is always set as text: a name of a run is never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

// A cell is a text, an element, or {text, small, hint, share, parts, …}. small: print below it. hint: shown on hover.
// share: a percentage, drawn as a bar. parts: more such cells. Other keys are attributes.
function cellOf(of, tag) {
  if (of instanceof Node) return of;
  const {text, small, hint, share, parts = [], ...others} = of !== null && typeof of === "object" ? of : {text: of};
  const bar = share === undefined ? {} : {class: "share", style: `--share:${share}%`};
  const below = [small ? make("small", {}, small) : null, ...parts.map(part => cellOf(part, "div"))];
  return make(tag, {title: hint, ...bar, ...others}, String(text ?? "–"), ...below);
}

const headOf = (of, scope) => cellOf(typeof of === "object" ? of : {text: of, scope}, "th");

// The first cell of a row is its heading. marks: a class for each row.
function table(box, head, rows, marks = []) {
  const heads = head.map(of => headOf(of, "col"));
  const body = rows.map(([first, ...others], i) =>
    make("tr", {class: marks[i] || null}, headOf(first, "row"), ...others.map(of => cellOf(of, "td"))),
  );
  box.replaceChildren(savesOf(box), make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body));
  return box;
}

// Below a table: what it shows now, as files.
function savesOf(box) {
  const name = box.id || "table";
  const textOf = ([text, small]) => (small ? `${text} (${small})` : text);
  const csv = saving(`${name}.csv`, () => textsOf(box).map(row => row.map(textOf)));
  const tex = make("button", {type: "button", class: "csv", onclick: () => save(`${name}.tex`, latexOf(box))}, "LaTeX");
  return make("caption", {class: "saves screen"}, csv, " ", tex);
}

// The cells of a table, each its text and the small print below it.
const textsOf = box => [...box.rows].map(row => [...row.cells].map(textsIn));
function textsIn(cell) {
  const nodes = Object.groupBy([...cell.childNodes], node => (node.nodeName === "SMALL" ? "small" : "text"));
  return ["text", "small"].map(key => (nodes[key] ?? []).map(node => node.textContent.trim()).join(" "));
}

const IN_LATEX = {
  "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}",
  "−": "$-$", "±": "$\\pm$", "×": "$\\times$", "→": "$\\to$", "≤": "$\\leq$", "≥": "$\\geq$", "≈": "$\\approx$", "…": "\\dots{}",
};
const inLatex = text =>
  text.replace(/[\\~^<>−±×→≤≥≈…&%$#_{}]/g, sign => IN_LATEX[sign] ?? `\\${sign}`).replace(/\s+/g, " ");

// A tabular with the rules of the package booktabs; small print stands behind its number, in parentheses.
function latexOf(box) {
  const cellIn = ([text, small]) => inLatex(text) + (small ? ` {\\scriptsize (${inLatex(small)})}` : "");
  const [head, ...others] = textsOf(box).map(row => `${row.map(cellIn).join(" & ")} \\\\`);
  const begin = ["% \\usepackage{booktabs}", `\\begin{tabular}{l${"r".repeat(box.rows[0].cells.length - 1)}}`, "\\toprule"];
  return [...begin, head, "\\midrule", ...others, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

// Not Math.min(...values): the number of arguments is limited.
const extent = values =>
  values.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);

// A page may have millions of cells: a closed fold of many rows is filled when the reader opens it, or searches the page.
const MAX_UNSEEN = 1000; // rows
let searched = false;
const isUnseen = (fold, rows) => fold && !fold.open && rows > MAX_UNSEEN && !searched;
addEventListener("keydown", ({key, ctrlKey, metaKey}) => {
  if (searched || (key !== "F3" && !((ctrlKey || metaKey) && key === "f"))) return;
  searched = true;
  document.querySelectorAll("details").forEach(fold => fold.dispatchEvent(new Event("toggle")));
});

// -- when charts are drawn --------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const shade = ([light, onDark]) => (dark.matches && !printing ? onDark : light);
const tint = name => shade(page.colors[name]);

const charts = new Map(); // the box of a chart → the function that returns it

// A page may have hundreds: charts out of sight only take their space, and are drawn when the reader comes near.
function redraw(within = document) {
  for (const [box, chart] of charts) {
    if (!within.contains(box) || !box.checkVisibility()) continue;
    const {top, bottom} = box.getBoundingClientRect();
    if (printing || (bottom > -innerHeight && top < 2 * innerHeight)) drawChart(box, chart());
    else {
      box.style.minHeight = `${layoutOf(chart(), box.clientWidth).height}px`;
      coming.observe(box);
    }
  }
}

const comes = ({isIntersecting, target}) => isIntersecting && drawChart(target, charts.get(target)());
const coming = new IntersectionObserver(entries => entries.forEach(comes), {rootMargin: "100%"});

let waiting;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(redraw, 100);
});
dark.addEventListener("change", () => redraw());
for (const event of ["beforeprint", "afterprint"])
  addEventListener(event, () => {
    printing = event === "beforeprint";
    redraw();
  });

const whenDrawn = []; // callbacks after the first charts are drawn

// The page is painted before the plotting library is read, which takes longer than everything else.
addEventListener("DOMContentLoaded", () => requestAnimationFrame(() => setTimeout(begin)));
function begin() {
  document.head.append(make("script", {}, at("plotly").textContent));
  at("plotly").remove();
  redraw();
  whenDrawn.forEach(then => then());
}

// -- downloads --------------------------------------------------------------------------------------------------------

// A text that a spreadsheet would run as a formula gets an apostrophe before it, as in canonlm.report.sheet.
const guarded = text => (/^['=+\-@\t\r\n]/.test(text) && !isNumber(text) ? `'${text}` : text);
const isNumber = text => /^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$/.test(text);
const quoted = value => {
  const text = value === null || value === undefined ? "" : guarded(String(value));
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const csvOf = rows => rows.map(row => row.map(quoted).join(",") + "\n").join("");

const savedFrom = (href, name) => make("a", {href, download: name}).click();

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], {type: "text/plain"}));
  savedFrom(url, name);
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function saving(name, rows, button = make("button", {type: "button", class: "csv screen"}, "CSV")) {
  button.rows = rows;
  button.onclick = () => save(name, csvOf(rows()));
  return button;
}
