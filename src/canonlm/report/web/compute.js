// Scores against the arithmetic of training: 6 operations per parameter and token.

VIEWS.compute = () => {
  const flops = model => (model.parameters && model.tokens ? 6 * model.parameters * model.tokens : null);
  const usable = q => [...(answers.get(q)?.keys() ?? [])].filter(i => flops(models[i]) && models[i].source !== "paper");
  const places = Object.values(groups)
    .flatMap(group => group.questions)
    .filter(q => usable(q).length > 2);
  at("compute").hidden = places.length === 0;
  if (at("compute").hidden) return;
  const most = places.toSorted((a, b) => usable(b).length - usable(a).length)[0];
  choice(at("compute-question"), Object.fromEntries(places.map(q => [`q${q}`, questions[q].full])), `q${most}`);
  const chosen = () => Number(at("compute-question").value.slice(1));
  const skip = i => (at("compute-others").checked && models[i].source === "reference" ? ["source"] : []);
  const here = () => usable(chosen()).filter(i => standing(chosen(), i) && shown(i, skip(i)));

  const chart = () => {
    const all = here(),
      question = questions[chosen()];
    const series = [...Map.groupBy(all, i => models[i].look)].map(([look, members]) => {
      const {family, has_canon} = models[members[0]];
      return {
        panel: 0,
        kind: "dots",
        look,
        name: look === "other" ? "others" : `${family}${has_canon ? " + Canon" : ""}`,
        x: members.map(i => flops(models[i])),
        y: members.map(i => answer(chosen(), i).value),
        hover: members.map(
          i =>
            `${written(answer(chosen(), i).value, question)}${unit(question)}\n${nameOf(models[i])}\n${about(models[i])}`,
        ),
      };
    });
    const [least, greatest] = extent(all.map(i => flops(models[i])));
    const ticks = all.length ? roundBetween(least / 2, 2 * greatest, [1]).map(x => [x, powerOfTen(x)]) : [];
    const x = {title: "operations of training: 6 × parameters × tokens", log: true, ticks};
    return {
      id: "compute",
      height: 360,
      panels: [{title: "", x, y: {title: question.less ? question.metric : "percent"}}],
      series,
    };
  };

  exported("compute", () => [
    [...IDENTITY, "parameters", "operations", ...ASKED, "value"],
    ...here().map(i => [
      ...identity(models[i]),
      models[i].parameters,
      flops(models[i]),
      ...asked(questions[chosen()]),
      answer(chosen(), i).value,
    ]),
  ]);
  at("compute-others").parentElement.hidden = !models.some(model => model.source === "reference");
  const show = () => redraw(at("compute"));
  ["compute-question", "compute-others"].forEach(id => at(id).addEventListener("change", show));
  charts.set(at("compute-chart"), chart);
  views.push(show);
};

const powerOfTen = x => "10" + String(Math.round(Math.log10(x))).replace(/\d/g, digit => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
