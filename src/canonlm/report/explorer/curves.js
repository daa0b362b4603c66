// Scores and losses during training: a panel for each size and number of tokens, a line per model.

function trainingCurves() {
  const lines = Map.groupBy(results.curves, curve => curve.question);
  at("curves").hidden = lines.size === 0;
  if (lines.size === 0) return;
  const order = [...lines.keys()].sort((a, b) => lines.get(b).length - lines.get(a).length);
  const mine = order.find(q => lines.get(q).some(curve => isMine(curve.model)));
  const standard = order.find(q => questions[q].task === "hellaswag");
  // Keys that are numbers would come out sorted.
  choice(
    at("curves-question"),
    Object.fromEntries(order.map(q => [`q${q}`, questions[q].full])),
    `q${mine ?? standard ?? order[0]}`,
  );

  const chosen = () => Number(at("curves-question").value.slice(1));
  const here = () => lines.get(chosen()).filter(curve => shown(curve.model));
  const panelOf = curve => {
    const {size, tokens: count} = models[curve.model];
    return `${size ?? "size unknown"}, ${isMine(curve.model) ? "your runs" : `${tokens(count)} tokens`}`;
  };

  // The mean of so many neighbours; nearer to an end of as many as there are on both sides.
  const smooth = values => {
    const most = (Number(at("curves-smooth").value) - 1) / 2;
    return values.map((_, i) => {
      const reach = Math.min(most, i, values.length - 1 - i),
        part = values.slice(i - reach, i + reach + 1);
      return part.reduce((a, b) => a + b, 0) / part.length;
    });
  };

  const draw = () => {
    const all = here(),
      question = questions[chosen()],
      panels = Map.groupBy(all, panelOf);
    // The same for all published panels, and for all of yours. A loss falls from so high at first that nothing could be told
    // apart later: its beginning leaves the panel.
    const rangeOf = members => {
      const begins = values => (question.less ? Math.floor(values.length / 10) : 0);
      const [low, high] = extent(members.flatMap(curve => smooth(curve.values).slice(begins(curve.values))));
      const room = 0.05 * (high - low || 1);
      return [low - room, high + room];
    };
    const ranges = Map.groupBy(all, curve => isMine(curve.model));
    while (at("curves-panels").children.length > panels.size) {
      Plotly.purge(at("curves-panels").lastChild.lastChild);
      at("curves-panels").lastChild.remove();
    }
    while (at("curves-panels").children.length < panels.size)
      at("curves-panels").append(make("figure", {}, make("h3"), make("div", {class: "chart"})));
    [...panels].forEach(([title, curves], place) => {
      const box = at("curves-panels").children[place];
      box.firstChild.textContent = title;
      const traces = curves.map(curve => {
        const model = models[curve.model],
          look = lookOf(model);
        return {
          type: "scatter",
          mode: curve.tokens.length > 1 ? "lines" : "markers",
          name: model.model,
          x: curve.tokens,
          y: smooth(curve.values),
          line: {color: look.color, dash: look.dash, width: 1.8},
          marker: {color: look.color, symbol: look.symbol},
          customdata: curve.tokens.map(tokens),
          meta: hoverOf(model),
          hovertemplate: `%{customdata} tokens: %{y:.4~g}${unit(question)}<br>%{meta}<extra></extra>`,
        };
      });
      const [least, most] = extent(curves.flatMap(curve => curve.tokens.filter(count => count > 0)));
      const ticks = at("curves-log").checked ? roundBetween(least, most) : evenUpTo(most);
      const layout = {
        ...structuredClone(style.layout),
        height: 340,
        margin: {l: 52, r: 10, t: 8, b: 48},
        showlegend: false,
        xaxis: {
          ...titled("training tokens"),
          type: at("curves-log").checked ? "log" : "linear",
          tickvals: ticks,
          ticktext: ticks.map(tokens),
          ...(at("curves-log").checked ? {} : {range: [0, 1.02 * most]}),
        },
        yaxis: {
          ...titled(question.less ? question.metric : "percent"),
          range: rangeOf(ranges.get(isMine(curves[0].model))),
        },
      };
      plot(box.lastChild, traces, layout);
    });
    legend(
      at("curves-legend"),
      all.map(curve => curve.model),
    );
    at("curves-count").textContent = all.length
      ? `${all.length} models`
      : "No model that the filters leave has this curve.";
  };

  exported("curves", () => [
    [...IDENTITY, "at_tokens", ...ASKED, "value"],
    ...here().flatMap(curve =>
      curve.tokens.map((count, i) => [
        ...identity(models[curve.model]),
        count,
        ...asked(questions[curve.question]),
        curve.values[i],
      ]),
    ),
  ]);
  ["curves-question", "curves-smooth", "curves-log"].forEach(id => at(id).addEventListener("change", draw));
  sections.push(draw);
  onRedraw(draw);
}
