// What Canon layers change: each model with them minus the one without, at equal settings.

VIEWS.overview = () => {
  at("overview-notes").append(...results.notes.map(note => make("li", {}, note)));
  const names = {
    yours: "your runs",
    published: "every learning rate",
    best: "the best learning rate of each, benchmark by benchmark",
    paper: "the paper's own tables",
  };
  const isOf = (pair, source) => models[pair.base].source === source;
  const both = (q, pair) => answer(q, pair.base) && answer(q, pair.canon);
  // The groups in which a pair of the source has both numbers.
  const groupsOf = source => {
    const pairs = results.pairs.filter(pair => isOf(pair, source));
    const count = name => pairs.filter(pair => groups[name].questions.some(q => both(q, pair))).length;
    const names = Object.keys(groups).filter(count);
    return names.sort((a, b) => count(b) - count(a));
  };
  const whose = Object.keys(names).filter(source => groupsOf(source).length);
  if (hides("overview", whose.length === 0)) return;
  choice("overview-whose", whose.map(source => [source, names[source]]), whose[0]);

  const fill = () => {
    const [names, before] = [groupsOf(at("overview-whose").value), at("overview-group").value];
    choice("overview-group", names, names.includes(before) ? before : names[0]);
  };
  fill();

  const above = list => list.filter(x => x > 0).length;

  // {q, label, question, deltas: [[pair, delta]], gains} of each question of the group that has any
  const comparisons = () => {
    const group = groups[at("overview-group").value];
    const visible = i => shown(i, ["source", "canon"]);
    const pairs = results.pairs.filter(
      pair => isOf(pair, at("overview-whose").value) && visible(pair.base) && visible(pair.canon),
    );
    const rows = group.questions.map((q, i) => {
      const question = questions[q];
      const delta = ({base, canon}) => difference(answer(q, canon).value, answer(q, base).value);
      const deltas = pairs.filter(pair => both(q, pair)).map(pair => [pair, delta(pair)]);
      const gains = deltas.map(([, delta]) => (question.less ? -delta : delta));
      return {q, label: group.labels[i], question, deltas, gains};
    });
    return rows.filter(row => row.deltas.length);
  };

  // About the first question, which is the average if there is one.
  const headline = rows => {
    if (!rows.length) return "No pair passes the filters.";
    const {question, deltas, gains} = rows[0];
    const mixed = deltas.filter(([pair]) => models[pair.canon].mark).length;
    const mean = average(deltas.map(([, delta]) => delta));
    const what = rows[0].label.includes("avg") ? `the ${question.slice} (${question.task} benchmarks)` : question.full;
    const by = `${signed(mean, question)}${unitOfGap(question)} on average`;
    const aside = mixed ? ` ${mixed} of these pairs differ in more than Canon layers.` : "";
    return `With Canon layers ${what} is better in ${above(gains)} of ${deltas.length} pairs, by ${by}.${aside}`;
  };

  // Each row on its own scale; a panel for each kind of unit. Pairs that differ in more are hollow.
  const KINDS_OF_UNIT = ["percentage points", "more is better", "less is better, sign reversed"];
  const kindOf = ({question}) => KINDS_OF_UNIT[question.unit === "%" ? 0 : question.less ? 2 : 1];
  const chart = () => {
    const rows = comparisons();
    const parts = KINDS_OF_UNIT.map(kind => rows.filter(row => kindOf(row) === kind)).filter(part => part.length);
    const series = parts.flatMap(points);
    return {id: "overview", columns: 1, panels: parts.map(panelOf), series};
  };
  const scaleOf = row => Math.max(...row.gains.map(Math.abs)) || 1;

  const panelOf = part => ({
    title: kindOf(part[0]),
    height: 38 * part.length,
    x: {title: "←\u00a0worse          better with Canon layers\u00a0→", range: [-1.08, 1.08], ticks: [[0, "0"]]},
    y: {
      ticks: part.map((row, place) => {
        const end = written(scaleOf(row), row.question);
        return [place, `${row.label}\n−${end} to +${end}`];
      }),
      range: [part.length - 0.5, -0.5],
      even: true,
    },
  });

  // A series for each architecture, and the means.
  const points = (part, panel) => {
    const series = new Map();
    const means = {x: [], y: [], hover: []};
    part.forEach((row, place) => {
      row.deltas.forEach(([pair, delta], i) => {
        const model = models[pair.canon];
        const name = `${model.family ?? "other"}${model.mark && ", differs in more than Canon"}`;
        if (!series.has(name)) {
          const style = model.mark ? {symbol: `${page.looks[model.look].symbol}-open`} : {};
          series.set(name, {panel, name, kind: "dots", look: model.look, style, x: [], y: [], hover: []});
        }
        const [base, canon] = [pair.base, pair.canon].map(side => written(answer(row.q, side).value, row.question));
        const one = series.get(name);
        one.x.push(row.gains[i] / scaleOf(row));
        one.y.push(place + 0.5 * ((i + 0.5) / row.deltas.length - 0.5)); // apart, so that equal ones are all visible
        const change = `${row.label}: ${base} to ${canon} (${signed(delta, row.question)})`;
        one.hover.push(`${change}\n${nameOf(model)}${model.mark}\n${about(model)}`);
      });
      means.x.push(average(row.gains) / scaleOf(row));
      means.y.push(place);
      means.hover.push(`${row.label}: mean ${signed(average(row.deltas.map(([, delta]) => delta)), row.question)}`);
    });
    const style = {symbol: "line-ns-open", color: ["#d55e00", "#ff8f52"]};
    return [
      ...series.values(),
      {panel, name: "mean of the pairs", kind: "dots", sizes: 20, style, ...means},
      {panel, name: "no difference", kind: "level", x: [0, 0], y: [-0.5, part.length - 0.5]},
    ];
  };

  const show = () => {
    const rows = comparisons();
    if (at("overview-answer")) at("overview-answer").textContent = headline(rows);
    redraw(at("overview"));
    const archs = [...new Set(rows.flatMap(row => row.deltas.map(([pair]) => models[pair.canon].arch)))];
    const split = archs.length > 1 ? archs : [];
    const rowOf = ({label, question, deltas, gains}) => {
      const all = deltas.map(([, delta]) => delta);
      const byArch = arch => {
        const places = [...deltas.keys()].filter(i => models[deltas[i][0].canon].arch === arch);
        if (!places.length) return "–";
        const mean = average(places.map(i => all[i]));
        return {text: signed(mean, question), small: `better ${above(places.map(i => gains[i]))} of ${places.length}`};
      };
      const head = {text: label, scope: "row", small: question.full === label ? "" : question.full};
      const numbers = [average(all), ...extent(all)].map(delta => signed(delta, question));
      return [head, ...numbers, above(gains), above(gains.map(x => -x)), all.length, ...split.map(byArch)];
    };
    const columns = ["", "mean", "smallest", "largest", "better", "worse", "pairs", ...split];
    table(at("overview-table"), columns, rows.map(rowOf));
    at("overview-notes").hidden = !["published", "best"].includes(at("overview-whose").value);
    seeds(rows);
  };

  // For settings that were trained with several seeds: the mean difference and its interval.
  const seeds = rows => {
    const settingsOf = ([{base, canon}]) => settings[base] + settings[canon];
    const lines = rows.flatMap(({label, question, deltas}) => {
      const known = deltas.filter(([{base}]) => models[base].seed !== null);
      return [...Map.groupBy(known, settingsOf).values()].map(of => {
        const bySeed = [...Map.groupBy(of, ([{base}]) => models[base].seed).values()];
        const votes = bySeed.map(same => average(same.map(([, delta]) => delta)));
        const [{arch, size, lr, canon: before}, {canon}] = [models[of[0][0].base], models[of[0][0].canon]];
        const mean = signed(average(votes), question) + unitOfGap(question);
        return [label, arch, size, `${before} → ${canon}`, lr, mean, interval(votes, question), votes.length];
      });
    });
    const several = lines.filter(line => line.at(-1) > 1);
    at("overview-seeds").hidden = several.length === 0;
    const columns = ["", "architecture", "size", "Canon", "learning rate", "mean", "95% interval", "seeds"];
    table(at("overview-seeds-table"), columns, several);
  };

  // The t-interval of the mean; differences of percentages are cut to −100 to 100.
  const interval = (deltas, question) => {
    const [count, mean, [low, high]] = [deltas.length, average(deltas), extent(deltas)];
    if (low === high) return "all equal";
    const variance = deltas.reduce((sum, delta) => sum + (delta - mean) ** 2, 0) / (count - 1);
    const half = results.t_factors[count] * Math.sqrt(variance / count);
    const bound = question.unit === "%" ? 100 : Infinity;
    const ends = [Math.max(-bound, mean - half), Math.min(bound, mean + half)];
    return ends.map(end => signed(end, question)).join(" to ");
  };

  exported("overview", () => {
    const rename = key => (key === "model" ? "canon_model" : key);
    const values = (q, {base, canon}) => [answer(q, base).value, answer(q, canon).value];
    const about = ({base, canon}) => [models[base].model, ...identity(models[canon])];
    const rows = ({q, question, deltas}) =>
      deltas.map(([pair, delta]) => [...about(pair), ...questionOf(question), ...values(q, pair), delta]);
    const head = ["base_model", ...IDENTITY.map(rename), ...QUESTION, "base", "value", "delta"];
    return [head, ...comparisons().flatMap(rows)];
  });
  at("overview-whose").addEventListener("change", fill);
  charts.set(at("overview-chart"), chart);
  follow(show, "overview-group", "overview-whose");
};
