// The table of models: sorted by any column, at first by the average; filtered by the bar, columns by group.

VIEWS.models = () => {
  const names = Object.keys(groups);
  at("models").hidden = names.length === 0;
  if (at("models").hidden) return;
  choice(at("models-group"), asIs(names), names.find(name => answered(name).some(isMine)) ?? names[0]);
  const ABOUT = {model: "model", size: "size", tokens: "tokens", lr: "learning rate"};
  const group = () => groups[at("models-group").value];
  const first = () =>
    group().questions[
      Math.max(
        0,
        group().labels.findIndex(label => label.includes("avg")),
      )
    ];
  let order = first(),
    falling = !questions[order].less;

  const rows = () => [...models.keys()].filter(i => shown(i) && group().questions.some(q => standing(q, i)));
  const value = (column, i) =>
    typeof column === "number" ? (standing(column, i)?.value ?? null) : (models[i][column] ?? null);
  const sorted = () =>
    rows().sort((i, j) => {
      const way = falling ? -1 : 1,
        [a, b] = [value(order, i), value(order, j)];
      if (order === "size") return way * bySize(models[i], models[j]);
      if (a === null || b === null) return (a === null) - (b === null); // what has no number is last, either way
      return way * (typeof a === "string" ? a.localeCompare(b, undefined, {numeric: true}) : a - b);
    });

  const header = (column, label, title) => {
    const here = order === column;
    const sort = () => {
      falling = here ? !falling : typeof column === "number" && !questions[column].less;
      order = column;
      show();
      at("models-table").querySelector("th[aria-sort] button").focus();
    };
    const state = here ? (falling ? "descending" : "ascending") : null;
    return make(
      "th",
      {scope: "col", "aria-sort": state},
      make("button", {type: "button", title, onclick: sort}, label),
    );
  };

  const score = (q, i, best) => {
    const found = standing(q, i),
      question = questions[q];
    if (!found) return "–";
    const span =
      found.low === null ? "all equal" : `${written(found.low, question)} to ${written(found.high, question)}`;
    const error = found.stderr ? `± ${written(found.stderr, question)}` : "";
    return {
      text: written(found.value, question),
      small: found.runs > 1 ? `${span}, ${found.runs} runs` : error,
      ...(question.unit === "%" ? {share: found.value} : {}),
      ...(found.value === best ? {"data-best": "best of the column"} : {}),
    };
  };

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

  const show = () => {
    const {questions: columns, labels} = group();
    if (typeof order === "number" && !columns.includes(order)) [order, falling] = [first(), !questions[first()].less];
    const here = sorted();
    const best = columns.map(q => {
      const [low, high] = extent(here.map(i => standing(q, i)?.value).filter(Number.isFinite));
      return low < high ? (questions[q].less ? low : high) : null;
    });
    const heads = Object.entries(ABOUT).map(([column, label]) => header(column, label));
    table(
      at("models-table"),
      [...heads, ...columns.map((q, i) => header(q, labels[i], questions[q].full))],
      here.map(i => {
        const model = models[i];
        const name = make("th", {scope: "row", title: about(model)}, make("label", {}, tick(i), " ", nameOf(model)));
        return [
          name,
          model.size,
          tokens(model.tokens),
          model.lr,
          ...columns.map((q, place) => score(q, i, best[place])),
        ];
      }),
      here.map(i => isMine(i) && "yours"),
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
  views.push(show);
};
