// What the views of results share: which models are shown, how their numbers are written, and what is downloaded.
const {results} = page;
const {models, questions, groups} = results;

// answers.get(question).get(model) → {value, stderr, n, low, high, runs}
const NUMBERS = ["value", "stderr", "n", "low", "high", "runs"];
const answers = new Map();
(results.scores.model ?? []).forEach((model, i) => {
  const question = results.scores.question[i];
  if (!answers.has(question)) answers.set(question, new Map());
  answers.get(question).set(model, Object.fromEntries(NUMBERS.map(key => [key, results.scores[key][i]])));
});
const answer = (question, model) => answers.get(question)?.get(model);
const answered = name => groups[name].questions.flatMap(q => [...(answers.get(q)?.keys() ?? [])]);

const SOURCES = {
  yours: "your runs",
  published: "the 64 released models",
  reference: "other open models",
  best: "best learning rate, column by column",
  paper: "the paper's own tables",
};
const LATER = ["reference", "best", "paper"]; // sources that are hidden at first
const isMine = i => models[i].source === "yours";
const CANON = {true: "with Canon", false: "without", null: "unknown"};

// -- words ------------------------------------------------------------------------------------------------------------

function tokens(count) {
  if (count === null || count === undefined) return "–";
  const sizes = {T: 1e12, B: 1e9, M: 1e6, K: 1e3};
  const letter = Object.keys(sizes).find(letter => count >= 0.995 * sizes[letter]);
  return letter ? Number((count / sizes[letter]).toPrecision(2)) + letter : String(count);
}

function written(value, question) {
  if (value === null || value === undefined) return "–";
  if (question.unit === "%") return fixed(value, 1);
  return question.metric.includes("perplexity") ? fixed(value, 2) : String(Number(value.toPrecision(4)));
}

// Ties go to the even digit, as in Python, which writes the other numbers of a page: 56.25 is 56.2.
function fixed(value, digits) {
  const [text, tie] = [value.toFixed(digits), (Math.abs(value) * 2 ** (digits + 1)) % 2 === 1];
  return tie && text.at(-1) % 2 ? (value * (1 - 1e-9)).toFixed(digits) : text;
}

const unit = question => (question.unit === "%" ? " %" : "");
const unitOfGap = question => (question.unit === "%" ? " points" : "");
function signed(delta, question) {
  const text = written(Math.abs(delta), question);
  return (Number(text) ? (delta > 0 ? "+" : "−") : "") + text;
}
const difference = (a, b) => Math.round((a - b) * 1e9) / 1e9; // without the rounding error of 67.5 − 66.5
const average = list => list.reduce((a, b) => a + b, 0) / list.length;

function about(model) {
  const canon = {null: null, none: "without Canon", b: "short convolution"};
  const parts = [
    model.arch,
    model.canon in canon ? canon[model.canon] : `Canon ${model.canon}`,
    model.size,
    model.tokens && `${tokens(model.tokens)} tokens`,
    model.lr !== null && `learning rate ${model.lr}`,
    model.seed !== null && model.source === "yours" && `seed ${model.seed}`,
  ];
  return parts.filter(Boolean).join(", ");
}

// -- which models -----------------------------------------------------------------------------------------------------

// Each model's setting as a text; setting → the index of its mean over seeds in models
const SETTING = ["source", "arch", "canon", "size", "tokens", "lr"];
const settings = models.map(model => JSON.stringify(SETTING.map(key => model[key])));
const means = new Map([...models.keys()].filter(i => models[i].mean).map(i => [settings[i], i]));
const nameOf = model => (model.mean ? `${about(model)}, ${model.model}` : model.model);
const FILTERS = {
  source: {title: "whose", of: model => model.source, say: value => SOURCES[value]},
  arch: {title: "architecture", of: model => model.arch ?? "other", say: value => value},
  canon: {title: "Canon layers", of: model => String(model.has_canon), say: value => CANON[value]},
  size: {title: "size", of: model => model.size ?? "–", say: value => value},
  tokens: {title: "training tokens", of: model => tokens(model.tokens), say: value => value},
};
const DEPENDENT = Object.keys(FILTERS).slice(1); // the chosen sources decide which values these offer
const off = Object.fromEntries(Object.keys(FILTERS).map(key => [key, new Set()]));
const unticked = new Set(); // single models
// By parameters if they are known, else by names such as `12L768D`.
const bySize = (a, b) =>
  (a.parameters ?? 0) - (b.parameters ?? 0) || (a.size ?? "").localeCompare(b.size ?? "", undefined, {numeric: true});
let part = ""; // that a name or setting has to contain
let overSeeds = false;

// The models that a row stands for: the seeds of a mean, or itself.
const seeded = Map.groupBy([...models.keys()].filter(i => models[i].seed !== null), i => settings[i]);
const seedsOf = i => (models[i].mean ? seeded.get(settings[i]) : [i]);

// A mean over seeds is left out if one of them is: it would count a model that no other row has.
const hasName = i => !part || `${models[i].model ?? ""} ${about(models[i])}`.toLowerCase().includes(part);
const isChosen = i => !seedsOf(i).some(one => unticked.has(one)) && (hasName(i) || seedsOf(i).every(hasName));

// skip: filters to ignore, such as the source in a view that shows one source.
const shown = (i, skip = []) =>
  isChosen(i) &&
  Object.entries(FILTERS).every(([key, filter]) => skip.includes(key) || !off[key].has(filter.of(models[i])));

// The answer, unless it is replaced: those of single seeds by their mean, or the mean by those of single seeds.
function standing(q, i) {
  const mean = means.get(settings[i]);
  const averaged = mean !== undefined && models[i].seed !== null && isChosen(mean) && answer(q, mean);
  return (models[i].mean ? overSeeds : !(overSeeds && averaged)) ? answer(q, i) : undefined;
}

const VIEWS = {}; // functions that set up a view, by its name
const views = []; // functions that redraw a view
const showAll = () => views.forEach(show => show());

// The filters, with the values that models of the shown sources have. A box stays unticked while its source is hidden.
VIEWS.bar = () => {
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
  const fieldset = title => make("fieldset", {}, make("legend", {}, title), make("div"));
  const boxes = Object.fromEntries(Object.entries(FILTERS).map(([key, {title}]) => [key, fieldset(title)]));
  at("filters").replaceChildren(...Object.values(boxes));
  const inOrder = {size: bySize, tokens: (a, b) => (a.tokens ?? 0) - (b.tokens ?? 0)};
  const box = (key, value) => {
    const onchange = event => {
      off[key][event.target.checked ? "delete" : "add"](value);
      if (key === "source") DEPENDENT.forEach(fill);
      showAll();
    };
    return make("input", {type: "checkbox", name: key, value, checked: !off[key].has(value), onchange});
  };
  const fill = key => {
    const chosen = key === "source" ? models : models.filter(model => !off.source.has(model.source));
    const values = [...new Set((inOrder[key] ? chosen.toSorted(inOrder[key]) : chosen).map(FILTERS[key].of))];
    boxes[key].hidden = values.length < 2 && !values.some(value => off[key].has(value));
    const chip = value => make("label", {class: "chip"}, box(key, value), FILTERS[key].say(value));
    boxes[key].lastChild.replaceChildren(...values.map(chip));
  };
  Object.keys(FILTERS).forEach(fill);
};

// Hides a view if it is empty; returns whether it is.
const hides = (id, empty) => (at(id).hidden = empty);

// Redraws a view when one of its controls or a filter changes.
function follow(show, ...controls) {
  const fold = at(controls[0]).closest("details");
  const showSeen = () => isUnseen(fold, models.length) || show();
  controls.forEach(id => at(id).addEventListener("change", show));
  views.push(showSeen);
  if (models.length > MAX_UNSEEN) fold?.addEventListener("toggle", showSeen);
}

// -- controls and downloads -------------------------------------------------------------------------------------------

// options: texts, or [value, text]
function choice(id, options, chosen) {
  const pairs = options.map(option => [option].flat());
  const elements = pairs.map(([value, text = value]) => make("option", {value, selected: value === chosen}, text));
  at(id).replaceChildren(...elements);
}

// A choice among questions; returns the function that reads it.
function choiceOfQuestion(id, places, first) {
  choice(id, places.map(q => [q, questions[q].full]), first);
  return () => Number(at(id).value);
}

// The rows that a view shows right now, with all digits, and a button that saves them.
const exported = (id, rows) => saving(`canonlm-${id}.csv`, rows, at(`${id}-csv`));
const IDENTITY = ["source", "model", "arch", "canon", "size", "tokens", "lr", "seed"];
const identity = model => IDENTITY.map(key => model[key]);
const QUESTION = ["task", "setting", "slice", "metric", "unit"];
const questionOf = question => QUESTION.map(key => question[key]);
const scored = (q, i) => [...questionOf(questions[q]), answer(q, i).value];
