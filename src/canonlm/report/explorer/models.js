// The table of models: sorted by any column, filtered by the bar, columns by group.

function modelTable() {
  const names = Object.keys(groups);
  at("models").hidden = names.length === 0;
  if (at("models").hidden) return;
  const mine = name => groups[name].questions.some(q => [...(answers.get(q)?.keys() ?? [])].some(isMine));
  choice(at("models-group"), asIs(names), names.find(mine) ?? names[0]);
  let order = null; // a column, or null: as the data have them
  let falling = true;

  const ABOUT = {
    model: model => model.model,
    size: model => model,
    tokens: model => model.tokens,
    lr: model => model.lr,
  };
  const group = () => groups[at("models-group").value];
  const rows = () => [...models.keys()].filter(i => shown(i) && group().questions.some(q => standing(q, i)));
  const cell = (column, i) =>
    typeof column === "number" ? (standing(column, i)?.value ?? null) : (ABOUT[column](models[i]) ?? null);

  const sorted = () => {
    if (order === null) return rows().sort((i, j) => isMine(j) - isMine(i));
    const way = falling ? -1 : 1;
    return rows().sort((i, j) => {
      const [a, b] = [cell(order, i), cell(order, j)];
      if (order === "size") return way * bySize(a, b);
      if (a === null || b === null) return (a === null) - (b === null); // what has no number is last, either way
      return way * (typeof a === "string" ? a.localeCompare(b, undefined, {numeric: true}) : a - b);
    });
  };

  const header = (column, label, title) => {
    const here = order === column;
    const button = make(
      "button",
      {
        type: "button",
        title,
        onclick: () => {
          falling = here ? !falling : typeof column === "number" && !questions[column].less;
          order = column;
          show();
          at("models-table").querySelector("th[aria-sort] button").focus();
        },
      },
      label,
    );
    return make("th", {scope: "col", "aria-sort": here ? (falling ? "descending" : "ascending") : null}, button);
  };

  const score = (q, i) => {
    const found = standing(q, i),
      question = questions[q];
    if (!found) return make("td", {}, "–");
    const span =
      found.low === null ? "all equal" : `${written(found.low, question)} to ${written(found.high, question)}`;
    const error = found.stderr ? `± ${written(found.stderr, question)}` : "";
    const small = found.runs > 1 ? `${span}, ${found.runs} runs` : error;
    const box = make(
      "td",
      question.unit === "%" ? {class: "share", style: `--share:${found.value}%`} : {},
      written(found.value, question),
    );
    if (small) box.append(make("small", {}, small));
    return box;
  };

  const show = () => {
    const {questions: columns, labels} = group(),
      here = sorted();
    if (order !== null && typeof order === "number" && !columns.includes(order)) order = null;
    const tick = i =>
      make("input", {
        type: "checkbox",
        checked: true,
        "aria-label": `show ${nameOf(models[i])}`,
        onchange: () => {
          unticked.add(i);
          at("ticked").hidden = false;
          showAll();
        },
      });
    table(
      at("models-table"),
      [
        ...Object.entries({model: "model", size: "size", tokens: "tokens", lr: "learning rate"}).map(
          ([column, label]) => header(column, label),
        ),
        ...columns.map((q, i) => header(q, labels[i], questions[q].full)),
      ],
      here.map(i => {
        const model = models[i];
        const name = make("th", {scope: "row", title: about(model)}, make("label", {}, tick(i), " ", nameOf(model)));
        return [name, model.size ?? "–", tokens(model.tokens), model.lr ?? "–", ...columns.map(q => score(q, i))];
      }),
    );
    at("models-count").textContent = `${here.length} models`;
  };

  at("ticked").addEventListener("click", () => {
    unticked.clear();
    at("ticked").hidden = true;
    showAll();
  });
  exported("models", () => [
    [...IDENTITY, ...ASKED, "value", "stderr", "n", "low", "high", "runs"],
    ...sorted().flatMap(i =>
      group()
        .questions.filter(q => standing(q, i))
        .map(q => {
          const {value, stderr, n, low, high, runs} = standing(q, i);
          return [...identity(models[i]), ...asked(questions[q]), value, stderr, n, low, high, runs];
        }),
    ),
  ]);
  at("models-group").addEventListener("change", show);
  sections.push(show);
}
