// How a page draws: in the colours of its scheme, as wide as there is room, and again when either changes.
// DARK (a colour → the same on a dark page) stands before this script.
const dark = matchMedia("(prefers-color-scheme: dark)");
const drawn = [];
let printing = false;

const onRedraw = draw => drawn.push(draw);
const redraw = () => drawn.forEach(draw => draw());

// A copy of a figure in which every colour is the one for a dark page. Only keys that hold colours are looked at.
function recolour(value, key) {
  if (typeof value === "string") return (key.endsWith("color") && DARK[value.toLowerCase()]) || value;
  if (Array.isArray(value)) return value.map(item => recolour(item, key));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, recolour(item, name)]));
}

function plot(box, traces, wide, narrow = wide) {
  const width = printing ? 660 : box.clientWidth;
  if (!width) return; // inside a closed <details>: drawn when it opens
  const shade = dark.matches && !printing ? recolour : value => value;
  const phone = width < 560;
  const layout = {...structuredClone(shade(phone ? narrow : wide, "")), width};
  if (phone) layout.dragmode = false; // a finger scrolls the page and does not zoom the chart
  const data = structuredClone(shade(traces, ""));
  (box.data || []).forEach((old, i) => {
    // what a click on the legend hid stays hidden
    if (old.visible !== undefined && data[i]?.name === old.name) data[i].visible = old.visible;
  });
  Plotly.react(box, data, layout, {displaylogo: false, displayModeBar: false});
}

let waiting;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(redraw, 100);
});
dark.addEventListener("change", redraw);
addEventListener("beforeprint", () => {
  printing = true;
  redraw();
});
addEventListener("afterprint", () => {
  printing = false;
  redraw();
});
document.querySelectorAll("details").forEach(part => part.addEventListener("toggle", redraw));

// -- downloads

// A text that a spreadsheet would run as a formula has an apostrophe before it, as in canonlm.report.sheet.
const guarded = text => (/^['=+\-@\t\r\n]/.test(text) && !isNumber(text) ? `'${text}` : text);
const isNumber = text => /^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$/.test(text);

const csvOf = rows =>
  rows
    .map(row =>
      row
        .map(cell => {
          const text = cell === null || cell === undefined ? "" : guarded(String(cell));
          return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
        })
        .join(","),
    )
    .join("\n") + "\n";

function save(name, rows) {
  const url = URL.createObjectURL(new Blob([csvOf(rows)], {type: "text/csv"}));
  Object.assign(document.createElement("a"), {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
