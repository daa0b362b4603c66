// What all sections share: the data, which models are shown, how numbers are written, tables, downloads.
"use strict";
const results = JSON.parse(document.getElementById("results-data").textContent);
const {models, questions, groups, style} = results;

// answers.get(question).get(model) → {value, stderr, n, low, high, runs}
const answers = new Map();
(results.scores.model || []).forEach((model, i) => {
  const of = results.scores;
  if (!answers.has(of.question[i])) answers.set(of.question[i], new Map());
  answers.get(of.question[i]).set(model, {
    value: of.value[i],
    stderr: of.stderr[i],
    n: of.n[i],
    low: of.low[i],
    high: of.high[i],
    runs: of.runs[i],
  });
});
const answer = (question, model) => answers.get(question)?.get(model);

const SOURCES = {
  yours: "your runs",
  published: "the 64 released models",
  reference: "open models of others",
  best: "best learning rate, column by column",
  paper: "the paper's own tables",
};
const LATER = ["reference", "best", "paper"]; // sources that are not shown until asked for
const isMine = i => models[i].source === "yours";
const CANON = {true: "with Canon", false: "without", null: "unknown"};

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
  element.append(...children);
  return element;
}

function choice(select, entries, chosen) {
  select.replaceChildren(
    ...Object.entries(entries).map(([value, text]) =>
      make("option", {value, selected: value === String(chosen)}, text),
    ),
  );
}

const asIs = names => Object.fromEntries(names.map(name => [name, name]));

// -- words ------------------------------------------------------------------------------------------------------------

function tokens(count) {
  if (count === null || count === undefined) return "–";
  for (const [size, letter] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "K"],
  ])
    if (count >= 0.995 * size) return Number((count / size).toPrecision(2)) + letter;
  return String(count);
}

function written(value, question) {
  if (value === null || value === undefined) return "–";
  if (question.unit === "%") return value.toFixed(1);
  return question.metric.includes("perplexity") ? value.toFixed(2) : String(Number(value.toPrecision(4)));
}

const unit = question => (question.unit === "%" ? " %" : "");
const signed = (delta, question) => (delta > 0 ? "+" : delta < 0 ? "−" : "") + written(Math.abs(delta), question);
const difference = (a, b) => Math.round((a - b) * 1e9) / 1e9; // what is left of 67.5 − 66.5 beyond the printed digits

function about(model) {
  const parts = [
    model.arch,
    model.canon === null
      ? null
      : model.canon === "none"
        ? "without Canon"
        : model.canon === "b"
          ? "short convolution"
          : `Canon ${model.canon}`,
    model.size,
    model.tokens && `${tokens(model.tokens)} tokens`,
    model.lr !== null && `learning rate ${model.lr}`,
    model.seed !== null && model.source === "yours" && `seed ${model.seed}`,
  ];
  return parts.filter(Boolean).join(", ");
}

// -- which models -----------------------------------------------------------------------------------------------------

// setting → the mean over its seeds, which is among the models
const settingOf = model => JSON.stringify([model.source, model.arch, model.canon, model.size, model.tokens, model.lr]);
const means = new Map([...models.keys()].filter(i => models[i].mean).map(i => [settingOf(models[i]), i]));
const nameOf = model => (model.mean ? `${about(model)}, ${model.model}` : model.model);
const FILTERS = {
  source: {title: "whose", of: model => model.source, say: value => SOURCES[value]},
  arch: {title: "architecture", of: model => model.arch ?? "other", say: value => value},
  canon: {title: "Canon layers", of: model => String(model.has_canon), say: value => CANON[value]},
  size: {title: "size", of: model => model.size ?? "–", say: value => value},
  tokens: {title: "training tokens", of: model => tokens(model.tokens), say: value => value},
};
const off = Object.fromEntries(Object.keys(FILTERS).map(key => [key, new Set()]));
const unticked = new Set(); // single models
// By parameters where they are known, or else as `12L768D` reads.
const bySize = (a, b) =>
  (a.parameters ?? 0) - (b.parameters ?? 0) || (a.size ?? "").localeCompare(b.size ?? "", undefined, {numeric: true});
let part = ""; // of a name
let overSeeds = false;

// skip: filters that do not count here, such as whose, where a section shows the models of one source.
function passes(model, skip = []) {
  if (part && !`${model.model ?? ""} ${about(model)}`.toLowerCase().includes(part)) return false;
  return Object.entries(FILTERS).every(([key, filter]) => skip.includes(key) || !off[key].has(filter.of(model)));
}
const shown = (i, skip = []) => !unticked.has(i) && passes(models[i], skip);

// The answer, unless another stands for it: the mean over seeds for those of single seeds, or the other way round.
function standing(q, i) {
  const mean = means.get(settingOf(models[i]));
  const averaged = mean !== undefined && models[i].seed !== null && answer(q, mean);
  return (models[i].mean ? overSeeds : !(overSeeds && averaged)) ? answer(q, i) : undefined;
}

const sections = []; // functions that show a section anew
const showAll = () => sections.forEach(show => show());

// The values that some model of the sources shown has; a box ticked off stays so while its source is away.
function filterBar() {
  const sources = [...new Set(models.map(FILTERS.source.of))];
  if (sources.some(source => !LATER.includes(source))) LATER.forEach(source => off.source.add(source));
  let typing;
  at("named").addEventListener("input", event => {
    part = event.target.value.trim().toLowerCase();
    clearTimeout(typing);
    typing = setTimeout(showAll, 150);
  });
  at("over-seeds").addEventListener("change", event => {
    overSeeds = event.target.checked;
    showAll();
  });
  at("over-seeds").parentElement.hidden = means.size === 0;
  const boxes = Object.fromEntries(
    Object.entries(FILTERS).map(([key, filter]) => [
      key,
      make("fieldset", {}, make("legend", {}, filter.title), make("div")),
    ]),
  );
  at("filters").replaceChildren(...Object.values(boxes));
  const inOrder = {size: (a, b) => bySize(a, b), tokens: (a, b) => (a.tokens ?? 0) - (b.tokens ?? 0)};
  const fill = key => {
    const here = key === "source" ? models : models.filter(model => !off.source.has(model.source));
    const values = [...new Set((inOrder[key] ? here.toSorted(inOrder[key]) : here).map(FILTERS[key].of))];
    boxes[key].hidden = values.length < 2 && !values.some(value => off[key].has(value));
    boxes[key].lastChild.replaceChildren(
      ...values.map(value =>
        make(
          "label",
          {class: "chip"},
          make("input", {
            type: "checkbox",
            name: key,
            value,
            checked: !off[key].has(value),
            onchange: event => {
              off[key][event.target.checked ? "delete" : "add"](value);
              if (key === "source")
                Object.keys(FILTERS)
                  .filter(other => other !== key)
                  .forEach(fill);
              showAll();
            },
          }),
          FILTERS[key].say(value),
        ),
      ),
    );
  };
  Object.keys(FILTERS).forEach(fill);
}

// -- downloads --------------------------------------------------------------------------------------------------------

// The rows that a section shows right now, with all digits, and a button that saves them.
function exported(id, rows) {
  const button = at(`${id}-csv`);
  button.onclick = () => save(`canonlm-${id}.csv`, rows());
  button.rows = rows;
}
const IDENTITY = ["source", "model", "arch", "canon", "size", "tokens", "lr", "seed"];
const identity = model => IDENTITY.map(key => model[key]);
const ASKED = ["task", "setting", "slice", "metric", "unit"];
const asked = question => ASKED.map(key => question[key]);

// -- charts -----------------------------------------------------------------------------------------------------------

const lookOf = model => results.looks[model.look];
const hoverOf = model => safe(nameOf(model)) + "<br>" + safe(about(model));

// Where an axis of tokens or operations has its marks, as plotly writes neither 1T nor 2 × 10²².
const roundBetween = (low, high) => {
  const found = [];
  if (!(low > 0)) return found;
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    found.push(...[1, 2, 5].map(digit => digit * power).filter(x => low <= x && x <= high));
  return found;
};
const evenUpTo = high => {
  if (!(high > 0)) return [0];
  const step = roundBetween(high / 11, high).find(x => high / x <= 6);
  return Array.from({length: Math.floor(high / step) + 1}, (_, i) => i * step);
};
const powerOfTen = x => {
  const power = Math.floor(Math.log10(x) + 1e-9),
    digit = Math.round(x / 10 ** power);
  return `${digit === 1 ? "" : `${digit} × `}10<sup>${power}</sup>`;
};
const safe = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
// Not Math.min(...values): so many arguments no function takes.
const extent = values =>
  values.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
const titled = text => ({
  ...structuredClone(style.axis),
  title: {text, standoff: 8, font: {size: 12, color: style.axis.color}},
});

const GLYPHS = {
  circle: "●",
  diamond: "◆",
  "triangle-up": "▲",
  cross: "✚",
  "square-open": "□",
  "diamond-open": "◇",
  "triangle-up-open": "△",
  "cross-open": "✛",
  "x-thin-open": "×",
};
const DASHES = {solid: "", dash: "7 4", longdash: "11 4", dashdot: "7 3 2 3", longdashdot: "11 3 2 3", dot: "2 3"};

// How architectures look, once for a whole section: as lines or as markers.
function legend(box, indices, markers = false) {
  const looks = [...new Set(indices.map(i => models[i].look))];
  box.replaceChildren(
    ...looks.map(look => {
      const model = models[indices.find(i => models[i].look === look)],
        {color, dash, symbol} = results.looks[look];
      const swatch = markers
        ? make("b", {style: `color: var(--c${color.slice(1)})`}, GLYPHS[symbol])
        : line(color, DASHES[dash]);
      return make(
        "span",
        {},
        swatch,
        look === "other"
          ? "others"
          : (model.family ?? "") +
              (model.has_canon ? " + Canon" : "") +
              [...new Set(indices.filter(i => models[i].look === look).map(i => models[i].mark))].sort().join(""),
      );
    }),
  );
}

function line(color, dashes) {
  const [svg, path] = ["svg", "path"].map(tag => document.createElementNS("http://www.w3.org/2000/svg", tag));
  svg.setAttribute("viewBox", "0 0 30 10");
  path.setAttribute("d", "M0 5H30");
  path.setAttribute("stroke-dasharray", dashes);
  path.style.stroke = `var(--c${color.slice(1)})`;
  svg.append(path);
  return svg;
}
