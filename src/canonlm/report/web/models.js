// The table of models: sorted by any column, at first by the average; filtered by the bar, columns by group.

VIEWS.models = () => {
  const names = Object.keys(groups);
  if (hides("models", names.length === 0)) return;
  choice("models-group", names, names.find(name => answered(name).some(isMine)) ?? names[0]);
  const ABOUT = {model: "model", size: "size", tokens: "tokens", lr: "learning rate"};
  const group = () => groups[at("models-group").value];
  const averaged = () => group().labels.findIndex(label => label.includes("avg"));
  const first = () => group().questions[Math.max(0, averaged())];
  let [order, falling] = [first(), !questions[first()].less];

  const rows = () => [...models.keys()].filter(i => shown(i) && group().questions.some(q => standing(q, i)));
  const value = (column, i) =>
    typeof column === "number" ? (standing(column, i)?.value ?? null) : (models[i][column] ?? null);
  const sorted = () =>
    rows().sort((i, j) => {
      const [way, a, b] = [falling ? -1 : 1, value(order, i), value(order, j)];
      if (order === "size") return way * bySize(models[i], models[j]);
      if (a === null || b === null) return (a === null) - (b === null); // without a number: last in either order
      return way * (typeof a === "string" ? a.localeCompare(b, undefined, {numeric: true}) : a - b);
    });

  const header = (column, label, title) => {
    const active = order === column;
    const sort = () => {
      falling = active ? !falling : typeof column === "number" && !questions[column].less;
      order = column;
      show();
      at("models-table").querySelector("th[aria-sort] button").focus();
    };
    const state = active ? (falling ? "descending" : "ascending") : null;
    const button = make("button", {type: "button", title, onclick: sort}, label);
    return make("th", {scope: "col", "aria-sort": state}, button);
  };

  const score = (q, i, best) => {
    if (!standing(q, i)) return "–";
    const {value, stderr, low, high, runs} = standing(q, i);
    const say = number => written(number, questions[q]);
    const span = low === null ? "all equal" : `${say(low)} to ${say(high)}`;
    return {
      text: say(value),
      small: runs > 1 ? `${span}, ${runs} runs` : stderr ? `± ${say(stderr)}` : "",
      ...(questions[q].unit === "%" ? {share: value} : {}),
      ...(value === best ? {"data-best": "best of the column"} : {}),
    };
  };

  const showTicked = () => {
    at("ticked").hidden = unticked.size === 0;
    showAll();
  };
  const tick = i => {
    const onchange = ({target}) => {
      const boxes = () => [...at("models-table").querySelectorAll("input")];
      const place = boxes().indexOf(target);
      seedsOf(i).forEach(one => unticked.add(one));
      showTicked();
      (boxes()[place] ?? at("ticked")).focus(); // a keyboard stays where it is
    };
    return make("input", {type: "checkbox", checked: true, "aria-label": `show ${nameOf(models[i])}`, onchange});
  };

  const show = () => {
    const {questions: columns, labels} = group();
    if (typeof order === "number" && !columns.includes(order)) [order, falling] = [first(), !questions[first()].less];
    const visible = sorted();
    const best = columns.map(q => {
      const [low, high] = extent(visible.map(i => standing(q, i)?.value).filter(Number.isFinite));
      return low < high ? (questions[q].less ? low : high) : null;
    });
    const heads = Object.entries(ABOUT).map(([column, label]) => header(column, label));
    heads.push(...columns.map((q, i) => header(q, labels[i], questions[q].full)));
    const rowOf = i => {
      const model = models[i];
      const name = make("th", {scope: "row", title: about(model)}, make("label", {}, tick(i), " ", nameOf(model)));
      const scores = columns.map((q, place) => score(q, i, best[place]));
      return [name, model.size, tokens(model.tokens), model.lr, ...scores];
    };
    const marks = visible.map(i => isMine(i) && "yours");
    table(at("models-table"), heads, visible.map(rowOf), marks);
    at("models-count").textContent = `${visible.length} models`;
  };

  at("ticked").addEventListener("click", () => {
    unticked.clear();
    showTicked();
  });
  exported("models", () => {
    const scores = (q, i) => [...questionOf(questions[q]), ...NUMBERS.map(key => standing(q, i)[key])];
    const answered = i => group().questions.filter(q => standing(q, i));
    const rows = i => answered(i).map(q => [...identity(models[i]), ...scores(q, i)]);
    return [[...IDENTITY, ...QUESTION, ...NUMBERS], ...sorted().flatMap(rows)];
  });
  follow(show, "models-group");
};
