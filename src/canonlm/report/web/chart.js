// Every chart of every page: panels that share a legend, and series in them.
//
// chart:  {id, columns, height, panels, series, highlight}
// panel:  {title, height, x, y}, axes {title, range, log, share, ticks: [[value, text]], words, linked, format, even}
// series: {panel, name, look, kind, dash, x, y, low, high, across, hover, tip, run}; kind is one of KINDS
const KINDS = {
  thin: {mode: "lines", width: 1, opacity: 0.5},
  line: {mode: "lines", width: 1.8, opacity: 0.85},
  bold: {mode: "lines+markers", width: 3, size: 7},
  level: {mode: "lines", width: 1.5},
  steps: {mode: "lines+markers", width: 2.5, size: 9},
  dots: {mode: "markers", size: 9},
  pale: {mode: "markers", size: 5, opacity: 0.45},
};
const PLAIN = {dash: "solid", symbol: "circle", pattern: ""};
const SHARE = {range: [-0.04, 1.06], dtick: 0.25, tickformat: ".0%"};
const FEW_POINTS = 30; // a line with at most this many has markers

const safe = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const withBreaks = text => safe(text).replaceAll("\n", "<br>");
const shownAt = value => (typeof value === "string" ? safe(value) : value); // a category is also its label
const lookAt = one => ({...PLAIN, color: page.colors.muted, ...(page.looks[one.look] ?? {}), ...one.style});

function traceOf(one, off) {
  const [look, kind] = [lookAt(one), KINDS[one.kind] ?? {}];
  const [color, panel] = [shade(look.color), one.panel ? one.panel + 1 : ""];
  const byPoint = Array.isArray(one.hover);
  const hint = byPoint ? "%{hovertext}" : "%{meta[1]}"; // templates have hovertext per point only
  const trace = {
    type: "scatter",
    x: one.x.map(shownAt),
    y: one.y.map(shownAt),
    name: safe(one.name),
    meta: [one.run, byPoint ? "" : withBreaks(one.hover ?? "")],
    showlegend: false,
    xaxis: `x${panel}`,
    yaxis: `y${panel}`,
    visible: !off.has(one.name),
    opacity: kind.opacity ?? 1,
    hovertext: byPoint ? one.hover.map(withBreaks) : undefined,
    hovertemplate: (one.tip ? `<b>%{fullData.name}</b><br>${one.tip}<br>` : "") + `${hint}<extra></extra>`,
  };
  if (one.kind === "bar") {
    const pattern = {shape: look.pattern, fgcolor: color, fillmode: "replace", size: 6};
    Object.assign(trace, {type: "bar", marker: {color, line: {width: 1, color}, pattern}});
  } else {
    const few = one.kind === "line" && one.x.length <= FEW_POINTS;
    trace.mode = few ? "lines+markers" : kind.mode;
    const dash = one.dash ?? (one.kind === "thin" ? "solid" : look.dash);
    trace.line = {color, width: kind.width, dash, shape: one.kind === "steps" ? "hv" : "linear"};
    const size = one.sizes ?? (few ? 6 : kind.size);
    trace.marker = {symbol: look.symbol, color, size, line: {width: one.kind === "dots" ? 2 : 0, color}};
  }
  if (one.low) {
    // A whisker from a value to itself would be drawn as a cap.
    const of = one.across ? one.x : one.y;
    const real = i => one.low[i] !== null && one.low[i] < one.high[i];
    trace[one.across ? "error_x" : "error_y"] = {
      type: "data",
      symmetric: false,
      thickness: 1.4,
      width: 4,
      color: one.kind === "bar" ? tint("ink") : color,
      array: of.map((value, i) => (real(i) ? one.high[i] - value : null)),
      arrayminus: of.map((value, i) => (real(i) ? value - one.low[i] : null)),
    };
  }
  return trace;
}

function axisOf({title = "", range, log, share, ticks, words, format, even}, shown = true) {
  const axis = {
    title: {text: withBreaks(shown ? title : ""), standoff: 8, font: {size: 12, color: tint("muted")}},
    automargin: true,
    zeroline: false,
    gridcolor: tint("grid"),
    linecolor: tint("grid"),
    color: tint("muted"),
    tickfont: {size: 12},
    tickformat: format,
  };
  if (share) Object.assign(axis, SHARE);
  if (log) {
    // Labels at 1, 2 and 5 × 10ⁿ, or only at 10ⁿ; plotly's own where there may be fewer than two of them.
    const decades = range ? range[1] - range[0] : 0;
    const dtick = decades < 0.7 ? undefined : decades > 1.5 && !format ? 1 : "D2";
    Object.assign(axis, {type: "log", dtick, nticks: 8, tickformat: format ?? "~g"});
  }
  if (words) Object.assign(axis, {type: "category", showgrid: false, fixedrange: true});
  if (ticks) {
    const [tickvals, ticktext] = [ticks.map(([at]) => at), ticks.map(([, text]) => withBreaks(text))];
    Object.assign(axis, {tickvals, ticktext, showgrid: !even});
  }
  if (range) axis.range = range;
  return axis;
}

function widthOf(text, font) {
  pen.font = `${font} ${page.font}`;
  return pen.measureText(text).width;
}

// The text in lines of at most that many pixels, as far as its words permit.
const pen = document.createElement("canvas").getContext("2d");
function inLines(text, wide) {
  const [first, ...words] = text.split(" ");
  return words.reduce(
    ([line, ...above], word) =>
      widthOf(`${line} ${word}`, "bold 13px") > wide ? [word, line, ...above] : [`${line} ${word}`, ...above],
    [first],
  ).toReversed();
}

// Panels in rows; gaps are in pixels, so that axes fit into them at any width.
function layoutOf(chart, width) {
  const [count, sparse] = [chart.panels.length, width < 560];
  const columns = Math.max(1, Math.min(count, chart.columns ?? 4, Math.floor((width + 40) / (sparse ? 170 : 230))));
  const rows = Math.ceil(count / columns);
  const usual = chart.height ?? (rows === 1 ? 220 : 170);
  const tall = Array.from({length: rows}, (_, row) => chart.panels[row * columns].height ?? usual);
  const gapX = chart.panels.every(panel => panel.y.share) ? 16 : chart.panels.some(panel => panel.y.title) ? 70 : 52;
  const labels = chart.panels.flatMap(panel => (panel.y.ticks ?? []).flatMap(([, text]) => text.split("\n")));
  const left = Math.max(50, 12 + extent(labels.map(text => widthOf(text, "12px")))[1]);
  const [right, bottom] = [10, 46];
  const across = width - left - right;
  const wide = (across - gapX * (columns - 1)) / columns;
  const titles = chart.panels.map(panel => inLines(panel.title, wide));
  const more = 17 * (Math.max(...titles.map(lines => lines.length)) - 1);
  const top = (chart.panels.some(panel => panel.title) ? 26 : 10) + more;
  const gapY = (chart.panels.every(panel => panel.x.linked) ? 44 : 66) + more;
  const above = row => tall.slice(0, row).reduce((sum, height) => sum + height + gapY, 0);
  const down = above(rows) - gapY;
  const layout = {
    template: "none",
    width,
    height: down + top + bottom,
    margin: {l: left, r: right, t: top, b: bottom},
    hovermode: "closest",
    showlegend: false,
    font: {family: page.font, size: 13, color: tint("ink")},
    paper_bgcolor: tint("paper"),
    plot_bgcolor: tint("paper"),
    hoverlabel: {
      bgcolor: tint("paper"),
      bordercolor: tint("grid"),
      align: "left",
      font: {color: tint("ink"), size: 13},
    },
    dragmode: sparse ? false : "zoom", // a finger scrolls the page and does not zoom the chart
    barmode: "group",
    bargap: 0.35,
    bargroupgap: 0.12,
    annotations: [],
  };
  chart.panels.forEach((panel, place) => {
    const [column, row, name] = [place % columns, Math.floor(place / columns), place ? place + 1 : ""];
    const [from, roof] = [(column * (wide + gapX)) / across, 1 - above(row) / down];
    const below = inLines(panel.x.title ?? "", wide).join("\n");
    const [x, y] = [axisOf({...panel.x, title: below}, panel.x.title !== chart.panels[place + columns]?.x.title), axisOf(panel.y)];
    const nticks = Math.max(3, Math.floor(wide / 70));
    Object.assign(x, {domain: [from, Math.min(1, from + wide / across)], anchor: `y${name}`, nticks});
    Object.assign(y, {domain: [Math.max(0, roof - tall[row] / down), roof], anchor: `x${name}`});
    if (panel.y.share && column && gapX < 20) y.showticklabels = false;
    if (place && panel.x.linked) x.matches = "x";
    if (place && panel.y.share) y.matches = "y";
    layout[`xaxis${name}`] = x;
    layout[`yaxis${name}`] = y;
    const corner = {x: from, y: roof, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom"};
    const font = {size: 13, color: tint("ink")};
    const text = `<b>${withBreaks(titles[place].join("\n"))}</b>`;
    if (panel.title) layout.annotations.push({text, align: "left", ...corner, showarrow: false, font});
  });
  return layout;
}

function drawChart(box, chart) {
  if (!window.Plotly) return;
  coming.unobserve(box);
  box.style.minHeight = "";
  const off = (box.off ??= new Set()); // names that a click on the legend has hidden
  const width = printing ? 660 : box.clientWidth;
  const [traces, layout] = [chart.series.map(one => traceOf(one, off)), layoutOf(chart, width)];
  if (printing) box.style.setProperty("--fit", Math.max(0.5, Math.min(1, 860 / layout.height))); // a page has 979 pixels
  Plotly.react(box, traces, layout, {displaylogo: false, displayModeBar: false});
  legend(box, chart, off);
  box.saves ??= make("p", {class: "saves screen"}, box.csv, " ", imageOf(box, "SVG"), " ", imageOf(box, "PNG"));
  if (!box.saves.isConnected) box.after(box.saves);
  if (chart.highlight && !box.listens) {
    box.listens = true;
    const show = run =>
      Plotly.restyle(box, {opacity: box.data.map(trace => (run === null || trace.meta[0] === run ? 1 : 0.15))});
    box.on("plotly_hover", event => show(event.points[0].data.meta[0]));
    box.on("plotly_unhover", () => show(null));
  }
}

// -- images -----------------------------------------------------------------------------------------------------------

const IMAGE_WIDTH = 720;

// A button that saves the chart as it is now, but on white paper and with its legend.
function imageOf(box, kind) {
  const onclick = async () => {
    const format = kind.toLowerCase();
    const figure = figureOf(charts.get(box)(), box.off);
    const image = await Plotly.toImage(figure, {format, width: null, height: null, scale: kind === "PNG" ? 3 : 1});
    savedFrom(image, `${box.id || "chart"}.${format}`);
  };
  return make("button", {type: "button", class: "csv", onclick}, kind);
}

function figureOf(chart, off) {
  const wasPrinting = printing;
  printing = true; // the colours of a light page
  try {
    const [data, layout] = [chart.series.map(one => traceOf(one, off)), layoutOf(chart, IMAGE_WIDTH)];
    const named = [...namesOf(chart).values()];
    chart.series.forEach((one, i) => (data[i].showlegend = named.includes(one) && !off.has(one.name)));
    const tall = 22 * Math.ceil(named.reduce((sum, one) => sum + 60 + 7 * one.name.length, 0) / IMAGE_WIDTH);
    layout.legend = {orientation: "h", x: 0, y: 1, yref: "container", yanchor: "top", font: {size: 12}};
    layout.margin.t += tall + 8;
    layout.height += tall + 8;
    layout.showlegend = true;
    return {data, layout};
  } finally {
    printing = wasPrinting;
  }
}

// -- the legend -------------------------------------------------------------------------------------------------------

const DASHES = {solid: "", dash: "7 4", longdash: "11 4", dashdot: "7 3 2 3", dot: "2 3"};
const GLYPHS = {
  circle: "●",
  diamond: "◆",
  "triangle-up": "▲",
  cross: "✚",
  "square-open": "□",
  "diamond-open": "◇",
  "triangle-up-open": "△",
  "cross-open": "✛",
  "circle-open": "○",
  "x-thin-open": "×",
  "line-ns-open": "|",
  "line-ew-open": "–",
};

// The series that stands for each name, reference lines last.
function namesOf(chart) {
  const entries = new Map();
  const levels = [...chart.series].sort((a, b) => (a.kind === "level") - (b.kind === "level"));
  for (const one of levels)
    if (!one.unnamed && (!entries.has(one.name) || one.kind === "bold")) entries.set(one.name, one);
  return entries;
}

// A click on a name hides it in every panel, or shows it again.
function legend(box, chart, off) {
  const entries = namesOf(chart);
  const bar = (box.legend ??= make("p", {class: "legend"}));
  if (!bar.isConnected) box.before(bar);
  const buttonOf = ([name, one]) => {
    const look = lookAt(one);
    const color = shade(look.color);
    const dots = ["dots", "pale", "bar"].includes(one.kind);
    const glyph = GLYPHS[look.symbol] ?? "●";
    const onclick = () => {
      off[off.has(name) ? "delete" : "add"](name);
      drawChart(box, chart);
    };
    const marked = one.kind === "level" || one.kind === "thin" ? "" : glyph;
    const sample = dots
      ? make("b", {style: `color: ${color}`, "aria-hidden": "true"}, glyph)
      : dashes(color, DASHES[one.dash ?? look.dash], marked);
    return make("button", {type: "button", "aria-pressed": String(!off.has(name)), onclick}, sample, name);
  };
  const focused = [...bar.children].indexOf(document.activeElement); // a keyboard stays where it is
  bar.replaceChildren(...[...entries].map(buttonOf));
  bar.children[focused]?.focus();
}

// A piece of a line with its marker.
function dashes(color, pattern, glyph) {
  const drawn = (tag, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const path = drawn("path", {d: "M0 6H30", "stroke-dasharray": pattern, stroke: color});
  const marker = drawn("text", {x: 15, y: 10, "font-size": 12, "text-anchor": "middle", fill: color}, glyph);
  return drawn("svg", {viewBox: "0 0 30 12", "aria-hidden": "true"}, path, marker);
}
