// What Canon layers change: each model with them minus the one without, at equal settings.

function overview() {
  const names = {
    yours: "your runs",
    published: "every learning rate",
    best: "the best learning rate of each, benchmark by benchmark",
    paper: "the paper's own tables",
  };
  const isOf = (pair, source) => models[pair.base].source === source;
  // The groups in which such a pair has both numbers.
  const groupsOf = source => {
    const here = results.pairs.filter(pair => isOf(pair, source));
    const both = (q, some) => some.some(({base, canon}) => answer(q, base) && answer(q, canon));
    const count = name => here.filter(pair => groups[name].questions.some(q => both(q, [pair]))).length;
    return Object.keys(groups)
      .filter(name => groups[name].questions.some(q => both(q, here)))
      .sort((a, b) => count(b) - count(a));
  };
  const whose = Object.keys(names).filter(source => groupsOf(source).length);
  at("overview").hidden = whose.length === 0;
  if (at("overview").hidden) return;
  choice(at("overview-whose"), Object.fromEntries(whose.map(source => [source, names[source]])), whose[0]);

  const fill = () => {
    const there = groupsOf(at("overview-whose").value);
    const before = at("overview-group").value;
    choice(at("overview-group"), asIs(there), there.includes(before) ? before : there[0]);
  };
  fill();

  const pairs = () =>
    results.pairs.filter(
      ({base, canon}) =>
        isOf({base}, at("overview-whose").value) &&
        shown(base, ["source", "canon"]) &&
        shown(canon, ["source", "canon"]),
    );

  // [question, label, [[pair, delta]]] of the group, with what there is
  const found = () => {
    const group = groups[at("overview-group").value],
      here = pairs();
    return group.questions
      .map((q, i) => [
        q,
        group.labels[i],
        here
          .filter(p => answer(q, p.base) && answer(q, p.canon))
          .map(p => [p, difference(answer(q, p.canon).value, answer(q, p.base).value)]),
      ])
      .filter(row => row[2].length);
  };
  const gain = (delta, question) => (questions[question].less ? -delta : delta);

  const show = () => {
    const rows = found(),
      here = rows.flatMap(row => row[2].map(([pair]) => pair.canon));
    chart(rows);
    legend(at("overview-legend"), [...new Set(here)], true);
    const archs = [...new Set(here.map(i => models[i].arch))];
    const head = ["", "mean", "smallest", "largest", "better", "worse", "pairs", ...(archs.length > 1 ? archs : [])];
    const meanOf = list => list.reduce((a, b) => a + b, 0) / list.length;
    const body = rows.map(([q, label, deltas]) => {
      const question = questions[q],
        gains = deltas.map(([, delta]) => gain(delta, q)),
        all = deltas.map(([, delta]) => delta);
      const count = sign => gains.filter(x => sign * x > 0).length;
      return [
        make("th", {scope: "row"}, label, ...(question.full === label ? [] : [make("small", {}, question.full)])),
        signed(meanOf(all), question),
        signed(Math.min(...all), question),
        signed(Math.max(...all), question),
        count(1),
        count(-1),
        all.length,
        ...head.slice(7).map(arch => {
          const part = deltas.filter(([{canon}]) => models[canon].arch === arch).map(([, delta]) => delta);
          const box = make("td", {}, part.length ? signed(meanOf(part), question) : "–");
          if (part.length)
            box.append(make("small", {}, `better ${part.filter(x => gain(x, q) > 0).length} of ${part.length}`));
          return box;
        }),
      ];
    });
    table(at("overview-table"), head, body);
    at("overview-notes").hidden = !["published", "best"].includes(at("overview-whose").value);
    seeds();
  };

  const chart = rows => {
    const traces = {};
    rows.forEach(([q, label, deltas], row) =>
      deltas.forEach(([{base, canon}, delta], i) => {
        const model = models[canon],
          look = lookOf(model),
          question = questions[q];
        const trace = (traces[model.look] ??= {
          type: "scatter",
          mode: "markers",
          name: model.look,
          x: [],
          y: [],
          hovertext: [],
          hovertemplate: "%{hovertext}<extra></extra>",
          marker: {color: look.color, symbol: look.symbol, size: 8, opacity: 0.75},
        });
        trace.x.push(gain(delta, q));
        trace.y.push(row + 0.5 * ((i + 0.5) / deltas.length - 0.5)); // apart, so that equal ones do not hide each other
        trace.hovertext.push(
          `<b>${safe(label)}</b>: ${written(answer(q, base).value, question)} to ` +
            `${written(answer(q, canon).value, question)} (${signed(delta, question)})<br>${hoverOf(model)}${model.mark}`,
        );
      }),
    );
    const mean = {
      type: "scatter",
      mode: "markers",
      name: "mean",
      x: [],
      y: [],
      hoverinfo: "skip",
      marker: {
        symbol: "line-ns",
        size: 18,
        color: "#d55e00",
        line: {width: 2.5, color: "#d55e00"},
      },
    };
    rows.forEach(([q, , deltas], row) => {
      mean.x.push(deltas.reduce((sum, [, delta]) => sum + gain(delta, q), 0) / deltas.length);
      mean.y.push(row);
    });
    const height = 90 + 30 * rows.length;
    const layout = {
      ...structuredClone(style.layout),
      height,
      margin: {l: 90, r: 12, t: 12, b: 52},
      showlegend: false,
      xaxis: {
        ...titled("better with Canon →   (points of percent; losses and perplexities: units, turned round)"),
        zeroline: true,
        zerolinecolor: style.axis.color,
        zerolinewidth: 1.5,
        side: "bottom",
      },
      yaxis: {
        ...structuredClone(style.axis),
        tickvals: rows.map((_, i) => i),
        ticktext: rows.map(([, label]) => safe(label)),
        range: [rows.length - 0.5, -0.5],
        fixedrange: true,
        showgrid: false,
      },
    };
    const narrow = structuredClone(layout);
    narrow.xaxis.title.text = "better with Canon →";
    plot(at("overview-chart"), [...Object.values(traces), mean], layout, narrow);
  };

  // Of settings that were trained with several seeds: what the difference is, and how surely.
  const seeds = () => {
    const whose = at("overview-whose").value,
      group = groups[at("overview-group").value];
    const rows = results.pairs_over_seeds.filter(
      row => row.source === whose && group.questions.includes(row.question) && passes(row, ["source", "canon"]),
    );
    at("overview-seeds").hidden = rows.length === 0;
    table(
      at("overview-seeds-table"),
      ["", "architecture", "size", "Canon", "learning rate", "mean", "95% interval", "seeds"],
      rows.map(row => {
        const question = questions[row.question];
        return [
          make("th", {scope: "row"}, group.labels[group.questions.indexOf(row.question)]),
          row.arch,
          row.size ?? "–",
          `${row.base_canon} → ${row.canon}`,
          row.lr ?? "–",
          signed(row.delta, question) + unit(question),
          row.low === null ? "all equal" : `${signed(row.low, question)} to ${signed(row.high, question)}`,
          row.runs,
        ];
      }),
    );
  };

  exported("overview", () => [
    ["base_model", ...IDENTITY.map(key => (key === "model" ? "canon_model" : key)), ...ASKED, "base", "value", "delta"],
    ...found().flatMap(([q, , deltas]) =>
      deltas.map(([{base, canon}, delta]) => [
        models[base].model,
        ...identity(models[canon]),
        ...asked(questions[q]),
        answer(q, base).value,
        answer(q, canon).value,
        delta,
      ]),
    ),
  ]);
  at("overview-group").addEventListener("change", show);
  at("overview-whose").addEventListener("change", () => {
    fill();
    show();
  });
  sections.push(show);
  onRedraw(() => chart(found()));
}

// A table of texts; any of them may be a cell of its own.
function table(box, head, rows) {
  box.replaceChildren(
    make("thead", {}, make("tr", {}, ...head.map(of => (of instanceof Node ? of : make("th", {scope: "col"}, of))))),
    make(
      "tbody",
      {},
      ...rows.map(row =>
        make("tr", {}, ...row.map(cell => (cell instanceof Node ? cell : make("td", {}, String(cell))))),
      ),
    ),
  );
}
