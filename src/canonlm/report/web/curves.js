// Scores and losses during training: a panel for each size, number of tokens and architecture, a line per model.

VIEWS.curves = () => {
  const lines = Map.groupBy(results.curves, curve => curve.question);
  if (hides("curves", lines.size === 0)) return;
  const order = [...lines.keys()].sort((a, b) => lines.get(b).length - lines.get(a).length);
  const mine = order.find(q => lines.get(q).some(curve => isMine(curve.model)));
  const standard = order.find(q => questions[q].task === "hellaswag");
  const chosen = choiceOfQuestion("curves-question", order, mine ?? standard ?? order[0]);
  const visible = () => lines.get(chosen()).filter(curve => shown(curve.model));
  const rowOf = curve => {
    const {size, tokens: count} = models[curve.model];
    return `${size ?? "size unknown"}, ${isMine(curve.model) ? "your runs" : `${tokens(count)} tokens`}`;
  };

  // The mean of that many neighbours; near an end, of as many as there are on each side.
  const smooth = values => {
    const max = (Number(at("curves-smooth").value) - 1) / 2;
    return values.map((_, i) => {
      const reach = Math.min(max, i, values.length - 1 - i);
      return average(values.slice(i - reach, i + reach + 1));
    });
  };

  const chart = () => {
    const [all, question, log] = [visible(), questions[chosen()], at("curves-log").checked];
    const families = [...new Set(all.map(curve => models[curve.model].family))];
    const rows = [...new Set(all.map(rowOf))];
    // The first tenth may leave the panel: with its range, later curves could not be told apart.
    const begins = values => Math.floor(values.length / 10);
    const rangeOf = row => {
      const members = all.filter(curve => rowOf(curve) === row);
      const [low, high] = extent(members.flatMap(curve => smooth(curve.values).slice(begins(curve.values))));
      const room = 0.05 * (high - low || 1);
      return [low - room, high + room];
    };
    const ranges = Object.fromEntries(rows.map(row => [row, rangeOf(row)]));
    const places = rows.flatMap(row => families.map(family => [row, family]));
    const of = ([row, family]) => all.filter(curve => rowOf(curve) === row && models[curve.model].family === family);
    const filled = places.filter(place => of(place).length);
    const panels = filled.map(place => {
      const [low, high] = extent(of(place).flatMap(curve => curve.tokens.filter(count => count > 0)));
      const ticks = (log ? roundBetween(low, high, [1]) : evenUpTo(high)).map(count => [count, tokens(count)]);
      const x = {title: "training tokens", log, ticks, range: log ? undefined : [0, 1.02 * high]};
      return {title: `${place[1]}, ${place[0]}`, x, y: {range: ranges[place[0]]}};
    });
    const lineOf = panel => curve => {
      const model = models[curve.model];
      const name = model.has_canon ? `${model.family} + Canon` : (model.family ?? "other");
      const hover = `${nameOf(model)}\n${about(model)}`;
      const points = {x: curve.tokens, y: smooth(curve.values), hover, tip: `%{y:.4~g}${unit(question)}`};
      return {panel, kind: "line", look: model.look, run: model.model, name, ...points};
    };
    const series = filled.flatMap((place, panel) => of(place).map(lineOf(panel)));
    const none = "No model that passes the filters has this curve";
    at("curves-count").textContent = all.length ? `${all.length} models` : none;
    return {id: "curves", columns: Math.max(3, families.length), height: 190, panels, series, highlight: true};
  };

  exported("curves", () => {
    const points = ({model, question, tokens, values}) => {
      const [who, what] = [identity(models[model]), questionOf(questions[question])];
      return tokens.map((count, i) => [...who, count, ...what, values[i]]);
    };
    return [[...IDENTITY, "at_tokens", ...QUESTION, "value"], ...visible().flatMap(points)];
  });
  charts.set(at("curves-chart"), chart);
  follow(() => redraw(at("curves")), "curves-question", "curves-smooth", "curves-log");
};

// The ticks of an axis of tokens or operations: plotly writes neither 1T nor 2 × 10²².
function roundBetween(low, high, digits = [1, 2, 5]) {
  const marks = [];
  if (!(low > 0)) return marks;
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    marks.push(...digits.map(digit => digit * power).filter(x => low <= x && x <= high));
  return marks;
}
function evenUpTo(high) {
  if (!(high > 0)) return [0];
  const step = roundBetween(high / 11, high).find(x => high / x <= 4) ?? high;
  return Array.from({length: Math.floor(high / step) + 1}, (_, i) => i * step);
}
