// Scores against training compute: 6 operations per parameter and token.

VIEWS.compute = () => {
  const flops = model => (model.parameters && model.tokens ? 6 * model.parameters * model.tokens : null);
  const usable = q => [...(answers.get(q)?.keys() ?? [])].filter(i => flops(models[i]) && models[i].source !== "paper");
  const inGroups = Object.values(groups).flatMap(group => group.questions.filter(q => usable(q).length > 2));
  const places = [...new Set(inGroups)]; // a question may be in two groups
  if (hides("compute", places.length === 0)) return;
  const largest = places.toSorted((a, b) => usable(b).length - usable(a).length)[0];
  const chosen = choiceOfQuestion("compute-question", places, largest);
  const skip = i => (at("compute-others").checked && models[i].source === "reference" ? ["source"] : []);
  const visible = () => usable(chosen()).filter(i => standing(chosen(), i) && shown(i, skip(i)));

  const chart = () => {
    const [all, question] = [visible(), questions[chosen()]];
    const value = i => answer(chosen(), i).value;
    const hint = i => `${written(value(i), question)}${unit(question)}\n${nameOf(models[i])}\n${about(models[i])}`;
    const series = [...Map.groupBy(all, i => models[i].look)].map(([look, members]) => {
      const {family, has_canon} = models[members[0]];
      const name = look === "other" ? "others" : `${family}${has_canon ? " + Canon" : ""}`;
      const x = members.map(i => flops(models[i]));
      return {panel: 0, kind: "dots", look, name, x, y: members.map(value), hover: members.map(hint)};
    });
    const [low, high] = extent(all.map(i => flops(models[i])));
    const ticks = all.length ? roundBetween(low / 2, 2 * high, [1]).map(x => [x, powerOfTen(x)]) : [];
    const x = {title: "training operations: 6 × parameters × tokens", log: true, ticks};
    const y = {title: question.unit === "%" ? "percent" : question.metric};
    return {id: "compute", height: 360, panels: [{title: "", x, y}], series};
  };

  exported("compute", () => {
    const sizes = i => [models[i].parameters, flops(models[i])];
    const head = [...IDENTITY, "parameters", "operations", ...QUESTION, "value"];
    return [head, ...visible().map(i => [...identity(models[i]), ...sizes(i), ...scored(chosen(), i)])];
  });
  at("compute-others").parentElement.hidden = !models.some(model => model.source === "reference");
  charts.set(at("compute-chart"), chart);
  follow(() => redraw(at("compute")), "compute-question", "compute-others");
};

const powerOfTen = x => "10" + String(Math.round(Math.log10(x))).replace(/\d/g, digit => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
