// Scores against the arithmetic of training: 6 operations per parameter and token.

function compute() {
  const flops = model => (model.parameters && model.tokens ? 6 * model.parameters * model.tokens : null);
  const usable = q => [...(answers.get(q)?.keys() ?? [])].filter(i => flops(models[i]) && models[i].source !== "paper");
  const places = Object.fromEntries(
    Object.values(groups)
      .flatMap(group => group.questions)
      .filter(q => usable(q).length > 2)
      .map(q => [`q${q}`, questions[q].full]),
  );
  at("compute").hidden = Object.keys(places).length === 0;
  if (at("compute").hidden) return;
  const count = place => usable(Number(place.slice(1))).length;
  choice(at("compute-question"), places, Object.keys(places).sort((a, b) => count(b) - count(a))[0]);
  const chosen = () => Number(at("compute-question").value.slice(1));
  const here = () =>
    usable(chosen()).filter(
      i =>
        standing(chosen(), i) &&
        shown(i, at("compute-others").checked && models[i].source === "reference" ? ["source"] : []),
    );

  const draw = () => {
    const all = here(),
      question = questions[chosen()];
    const traces = [...Map.groupBy(all, i => models[i].look)].map(([look, members]) => ({
      type: "scatter",
      mode: "markers",
      name: look,
      x: members.map(i => flops(models[i])),
      y: members.map(i => answer(chosen(), i).value),
      marker: {color: results.looks[look].color, symbol: results.looks[look].symbol, size: 9},
      hovertext: members.map(
        i => `${written(answer(chosen(), i).value, question)}${unit(question)}<br>${hoverOf(models[i])}`,
      ),
      hovertemplate: "%{hovertext}<br>%{x:.2e} operations<extra></extra>",
    }));
    const [least, most] = extent(all.map(i => flops(models[i])));
    const ticks = all.length ? roundBetween(least / 2, 2 * most) : [];
    const layout = {
      ...structuredClone(style.layout),
      height: 420,
      margin: {l: 52, r: 12, t: 12, b: 52},
      showlegend: false,
      xaxis: {
        ...titled("arithmetic of training: 6 × parameters × tokens"),
        type: "log",
        tickvals: ticks,
        ticktext: ticks.map(powerOfTen),
      },
      yaxis: titled(question.less ? question.metric : "percent"),
    };
    const narrow = structuredClone(layout);
    narrow.xaxis.tickvals = ticks.filter(x => powerOfTen(x).startsWith("10"));
    narrow.xaxis.ticktext = narrow.xaxis.tickvals.map(powerOfTen);
    plot(at("compute-chart"), traces, layout, narrow);
    legend(at("compute-legend"), all, true);
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
  ["compute-question", "compute-others"].forEach(id => at(id).addEventListener("change", draw));
  sections.push(draw);
  onRedraw(draw);
}
