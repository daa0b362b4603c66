// Draws the figures that were made in Python, and lets each be saved: a row per point, with the panel that it is in.
// Labels of plotly are HTML.
const plain = html => new DOMParser().parseFromString(html ?? "", "text/html").body.textContent;

for (const figure of JSON.parse(document.getElementById("report-figures").textContent)) {
  const box = document.getElementById(figure.id);
  onRedraw(() => plot(box, figure.data, figure.wide, figure.narrow));
  const panels = (figure.wide.annotations ?? []).map(title => plain(title.text));
  const list = values => (Array.isArray(values) ? values : []);
  const rows = () => [
    ["panel", "series", "run", "x", "y"],
    ...figure.data.flatMap(trace =>
      list(trace.x).map((x, i) => [
        panels[Number((trace.xaxis ?? "x").slice(1) || 1) - 1],
        plain(trace.name),
        trace.meta,
        x,
        list(trace.y)[i],
      ]),
    ),
  ];
  const button = Object.assign(document.createElement("button"), {type: "button", textContent: "Download CSV", rows});
  button.className = "csv screen";
  button.onclick = () => save(`${figure.id}.csv`, rows());
  box.after(button);
}
redraw();
