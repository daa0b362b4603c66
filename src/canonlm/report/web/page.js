// Draws a page from its blocks. A block is an object with one key, its kind.
const BLOCKS = {
  text: text => make("p", {}, text),
  note: text => make("p", {class: "note"}, text),
  answer: text => make("p", {class: "answer"}, text),
  caveat: text => make("p", {class: "caveat"}, text),
  heading: text => make("h3", {}, text),
  code: text => make("pre", {}, text),
  list: items => make("ul", {}, ...items.map(item => make("li", {}, item))),
  table: ({head, rows, marks, kind}) =>
    make("div", {class: "scroll"}, table(make("table", {class: kind}), head, rows, marks)),
  chart: chart => {
    const box = make("div", {class: "chart", id: chart.id, role: "img", "aria-label": chart.caption});
    charts.set(box, () => chart);
    box.csv = saving(`${chart.id}.csv`, () => pointsOf(chart));
    return make("figure", {}, box, make("figcaption", {}, chart.caption));
  },
  fold: ({title, blocks, open}) => {
    const fold = make("details", {open}, make("summary", {}, title));
    const fill = () => {
      if (isUnseen(fold, rowsIn(blocks))) return;
      fold.append(...built(blocks));
      blocks = [];
    };
    fill();
    fold.addEventListener("toggle", () => {
      fill();
      redraw(fold);
    });
    return fold;
  },
  section: ({title, blocks}) => make("section", {}, title ? make("h2", {}, title) : null, ...built(blocks)),
  view: name => at(`view-${name}`).content.cloneNode(true),
  sheet: ({name, deflated}) => {
    const inflate = async () => save(name, await inflated(deflated));
    const button = {type: "button", class: "csv", id: "sheet", onclick: inflate};
    return make("p", {class: "screen"}, make("button", button, "Download the numbers (CSV)"));
  },
};
const rowsIn = blocks => blocks.reduce((sum, {table, list}) => sum + (table?.rows ?? list ?? []).length, 0);
const built = blocks => blocks.flatMap(block => Object.entries(block).map(([kind, of]) => BLOCKS[kind](of)));

const inflated = text => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
};

// A row per point, with the panel that it is in, the ends of its interval, and what is shown on hover.
const pointsOf = chart => {
  const about = ({hover}, i) => (Array.isArray(hover) ? hover[i] : hover)?.replaceAll("\n", "; ");
  const row = one => (x, i) =>
    [chart.panels[one.panel].title, one.name, one.run, x, one.y[i], one.low?.[i], one.high?.[i], about(one, i)];
  const head = ["panel", "series", "run", "x", "y", "low", "high", "about"];
  return [head, ...chart.series.flatMap(one => one.x.map(row(one)))];
};

const header = make("header", {}, make("h1", {}, page.title));
if (page.facts.length) header.append(make("p", {class: "sub"}, page.facts.join(" · ")));
document.querySelector("main").append(header, ...built(page.blocks));

// The views of results that this page has.
for (const view of page.views) {
  VIEWS[view]?.();
  const fold = at(view)?.closest("details");
  if (fold) fold.hidden = at(view).hidden;
}
if (page.views.length) showAll();

// A page of unfinished runs reloads itself and keeps its scroll position: every half minute while it is being written,
// less often the older it is. A hidden page waits.
const folds = () => [...document.querySelectorAll("details")];
const titleOf = fold => {
  const titles = [fold.closest("section")?.querySelector("h2"), fold.firstChild];
  return titles.map(title => title?.textContent.replace(/\d+/g, "")).join();
};
function readAgain() {
  const open = folds().filter(fold => fold.open);
  history.replaceState({top: scrollY, open: open.map(titleOf)}, "");
  location.reload();
}
if (page.written) {
  const written = new Date(1000 * page.written);
  const age = Date.now() - written;
  const text = `Runs are going on. This page follows them; as of ${written.toLocaleTimeString()}.`;
  header.append(make("p", {class: "sub", id: "live"}, text));
  const whenVisible = () =>
    document.hidden ? document.addEventListener("visibilitychange", readAgain, {once: true}) : readAgain();
  setTimeout(whenVisible, Math.min(Math.max(30_000, age / 4), 3_600_000));
}
if (history.state) {
  history.scrollRestoration = "manual";
  folds().forEach(fold => (fold.open ||= history.state.open.includes(titleOf(fold))));
  whenDrawn.push(() => scrollTo(0, history.state.top));
}
