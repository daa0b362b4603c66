// Synthetic tasks: a row per architecture, a column per difficulty, yours beside the paper's, cell by cell.

const ALONE =
  "The paper has no model of the same architecture, Canon layers and size as one of yours, so no cell is compared. " +
  "Below the name of each of the paper's models is ours, or the reason why it has none.";

VIEWS.grids = () => {
  const isSynthetic = name => groups[name].questions.every(q => ["accuracy", "kl"].includes(questions[q].metric));
  const ofPaper = i => models[i].source === "paper" && models[i].canon !== null;
  const names = Object.keys(groups).filter(
    name => (isSynthetic(name) && answered(name).some(ofPaper)) || answered(name).some(isPlayed(name)),
  );
  if (hides("grids", names.length === 0)) return;
  const mine = names.find(name => answered(name).some(isMine));
  choice("grids-task", names, mine ?? names[0]);

  // Whether a model is yours and the task has difficulties: a benchmark has no setting.
  function isPlayed(name) {
    const graded = q => questions[q].setting && questions[q].metric === "accuracy";
    return i => isMine(i) && groups[name].questions.some(graded);
  }

  const all = () => groups[at("grids-task").value].questions;
  const refill = () => {
    const metrics = [...new Set(all().map(q => questions[q].metric))];
    const theirs = answered(at("grids-task").value).filter(i => !isMine(i));
    const sizes = [...new Set(theirs.map(i => models[i].size ?? "–"))];
    sizes.sort((a, b) => a.localeCompare(b, undefined, {numeric: true}));
    at("grids-size").parentElement.hidden = sizes.length === 0;
    choice("grids-size", sizes, sizes.at(-1));
    choice("grids-metric", metrics, metrics[0]);
  };

  // Rows and columns of the table. Your runs are shown at every size. The columns that they have come first, then those
  // that most rows have.
  const grid = () => {
    const places = all().filter(q => questions[q].metric === at("grids-metric").value);
    const ofSize = i => isMine(i) || (models[i].size ?? "–") === at("grids-size").value;
    const inTable = i => places.some(q => standing(q, i)) && shown(i, ["source", "size"]) && ofSize(i);
    const rows = [...models.keys()].filter(inTable);
    const count = members => new Map(places.map(q => [q, members.filter(i => standing(q, i)).length]));
    const [filled, mine] = [count(rows), count(rows.filter(isMine))];
    const columns = places
      .filter(q => filled.get(q))
      .sort((a, b) => (mine.get(b) > 0) - (mine.get(a) > 0) || filled.get(b) - filled.get(a));
    const first = new Map(rows.map(i => [i, columns.findIndex(q => standing(q, i))]));
    return [rows.sort((i, j) => isMine(j) - isMine(i) || first.get(i) - first.get(j)), columns];
  };

  // The paper's model with the same architecture, Canon layers and size; -1: none, or its tick was taken off.
  const kindOf = model => JSON.stringify(["family", "canon", "size"].map(key => model[key]));
  const ofKind = new Map();
  models.forEach((model, i) => model.source === "paper" && ofKind.set(kindOf(model), ofKind.get(kindOf(model)) ?? i));
  const counterpart = i => {
    const found = isMine(i) ? ofKind.get(kindOf(models[i])) : undefined;
    return found === undefined || unticked.has(found) ? -1 : found;
  };

  // The command that trains one of the paper's models on a difficulty.
  const command = (model, question) =>
    model.counterpart?.arguments
      ? `canonlm play ${question.task} --preset paper --difficulty ${question.setting} ${model.counterpart.arguments}`
      : null;

  const cell = (q, i, max, beside) => {
    const [score, question, other] = [standing(q, i), questions[q], answer(q, beside)];
    if (!score) return make("td", {}, "");
    const share = score.value / (question.unit === "%" ? 100 : max);
    const alike = models[i].as_in_the_paper;
    const delta = other && alike && `${signed(difference(score.value, other.value), question)} from the paper's`;
    return {
      text: written(score.value, question),
      small: other && (delta || (alike === null ? "training not known" : "other training")),
      class: share > 0.65 ? "heat deep" : "heat",
      style: `--heat:${(100 * share).toFixed(1)}%`,
      title: command(models[i], question),
    };
  };

  const show = () => {
    const [rows, columns] = grid();
    const {questions: places, labels} = groups[at("grids-task").value];
    const head = q => make("th", {scope: "col", title: questions[q].full}, labels[places.indexOf(q)]);
    const name = i => {
      const box = make("th", {scope: "row", title: about(models[i])}, nameOf(models[i]));
      if (isMine(i)) box.append(make("small", {}, `yours, ${models[i].size ?? "size unknown"}`));
      const ours = models[i].counterpart;
      if (ours) box.append(make("small", {}, ours.arch || `not compared: ${ours.why}`));
      return box;
    };
    const max = extent(columns.flatMap(q => rows.map(i => standing(q, i)?.value ?? 0)))[1] || 1;
    const cells = rows.map(i => [name(i), ...columns.map(q => cell(q, i, max, counterpart(i)))]);
    table(at("grids-table"), ["architecture", ...columns.map(head)], cells);
    [...at("grids-table").tBodies[0].rows].forEach((row, i) => row.classList.toggle("yours", isMine(rows[i])));
    const alone = rows.some(isMine) && !rows.some(i => counterpart(i) >= 0);
    at("grids-note").textContent = alone ? ALONE : "";
  };

  exported("grids", () => {
    const [rows, columns] = grid();
    const cells = i => columns.filter(q => standing(q, i)).map(q => [...identity(models[i]), ...scored(q, i)]);
    return [[...IDENTITY, ...QUESTION, "value"], ...rows.flatMap(cells)];
  });
  at("grids-task").addEventListener("change", refill);
  follow(show, "grids-task", "grids-size", "grids-metric");
  refill();
};
