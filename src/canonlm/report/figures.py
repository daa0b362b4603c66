"""The charts of a page as SVG and PDF, for papers: drawn by matplotlib (extra `figures`) from the page's own data.

The format of a chart is described at the top of `web/chart.js`, which draws the same on the page.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from canonlm.core.errors import writing
from canonlm.core.extras import needed
from canonlm.core.files import make_folder, write_bytes

DASHES: dict[str, Any] = {
    "solid": "-", "dash": (0, (5, 2.5)), "longdash": (0, (8, 3)), "dashdot": "-.",
    "dot": ":",
}  # fmt: skip
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x-thin": "x",
           "line-ns": "|", "line-ew": "_"}  # fmt: skip
WIDTHS = {"thin": 0.6, "line": 1.1, "bold": 1.8, "level": 0.9, "steps": 1.5}  # of lines, in points
ALPHAS = {"thin": 0.5, "line": 0.85, "pale": 0.45}
SIZES = {"bold": 4.5, "dots": 5.5, "pale": 3.0}
STYLE: Any = {
    "font.family": "sans-serif", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 8, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    "axes.grid": True, "grid.color": "#e4e7eb", "grid.linewidth": 0.5, "axes.axisbelow": True, "hatch.linewidth": 0.6,
    "svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "canonlm", "figure.dpi": 100,
}  # fmt: skip
WIDTH, COLUMN = 7.0, 3.4  # inches: of a page's text, and of one column
PANEL, ALONE = 1.55, 2.3  # heights
MAX_COLUMNS = 4
LETTERS = 48  # that fit below a chart of one column
FEW_POINTS = 30  # a line with at most this many has markers


def check() -> None:
    """ValueError without matplotlib."""
    needed("matplotlib", "--figures")


def write_figures(html: str, folder: Path) -> list[Path]:
    """Write each chart of a page of ours as NAME.svg and NAME.pdf; returns the files. The same page gives the same
    bytes. ValueError: no matplotlib, or a folder that cannot be written."""
    check()
    files = []
    with writing("--figures", folder):
        make_folder(folder)
        for name, _, figure in drawn(html):
            for kind, metadata in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
                files.append(folder / f"{name}.{kind}")
                figure.savefig(buffer := BytesIO(), format=kind, metadata=metadata)
                write_bytes(files[-1], buffer.getvalue())
    return files


def drawn(html: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """The charts of a page: name, data, and the figure of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    data = json.loads(html.partition('id="page-data">')[2].partition("</script>")[0])
    for chart in _charts(data["blocks"]):
        with matplotlib.rc_context(STYLE):
            figure = Figure(layout="constrained")
            _draw(figure, chart, data["looks"])
            yield chart["id"], chart, figure


def _charts(blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The charts among blocks and in their folds and sections, in order."""
    for block in blocks:
        if "chart" in block:
            yield block["chart"]
        for kind in ("fold", "section"):
            yield from _charts(block.get(kind, {}).get("blocks", []))


def _draw(figure: Any, chart: Mapping[str, Any], looks: Mapping[str, Any]) -> None:
    panels = chart["panels"]
    columns = min(len(panels), chart.get("columns") or MAX_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    width = min(COLUMN, WIDTH / columns)
    usual = PANEL if len(panels) > 1 else max(ALONE, chart.get("height", 0) / 130)
    heights = [max(usual, panel.get("height", 0) / 100) for panel in panels[::columns]]
    all_axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flat
    handles: dict[str, Any] = {}
    for place, (axes, panel) in enumerate(zip(all_axes, panels, strict=False)):
        own = [one for one in chart["series"] if one["panel"] == place]
        words = list(dict.fromkeys(x for one in own for x in one["x"])) if panel["x"].get("words") else None
        bars = [one for one in own if one["kind"] == "bar"]
        for one in own:
            shift = 0.8 * ((bars.index(one) + 0.5) / len(bars) - 0.5) if one in bars else 0.0
            drawn = _series(axes, one, looks, words, shift, 0.72 / max(1, len(bars)))
            if not one.get("unnamed") and (one["name"] not in handles or one["kind"] == "bold"):
                handles[one["name"]] = drawn
        axes.set_title(_plain(panel["title"]))
        below = place + columns >= len(panels)
        _axis(axes, "x", panel["x"], words, titled=below)
        shared = place % columns > 0 and panel["y"].get("share")
        _axis(axes, "y", panel["y"], None, titled=not shared)
        axes.tick_params(labelleft=not shared)
    for axes in list(figure.axes)[len(panels) :]:
        axes.remove()
    names = [_plain(name) for name in handles]
    per_row = max(1, min(len(names), int(columns * width * 16 / (max(map(len, names), default=1) + 7))))
    lines = math.ceil(len(names) / per_row)
    figure.set_size_inches(columns * width, sum(heights) + 0.2 * lines)
    if names:
        figure.legend(handles.values(), names, loc="outside upper left", ncols=per_row)


def _series(
    axes: Any, one: Mapping[str, Any], looks: Mapping[str, Any], words: list[Any] | None, shift: float, width: float
) -> Any:
    """Draw a series; returns what stands for it in the legend. words: of the x axis. shift, width: of bars."""
    look = {"color": "#59636e", "dash": "solid", "symbol": "circle", "pattern": ""} | looks.get(
        str(one.get("look")), {}
    )
    look |= one.get("style") or {}
    kind, color = one["kind"], look["color"] if isinstance(look["color"], str) else look["color"][0]
    x = [words.index(value) + shift for value in one["x"]] if words else _numbers(one["x"])
    y = _numbers(one["y"])
    if one.get("low"):
        across = one.get("across")
        middle = x if across else y
        ends = [(m, m) if low is None or low >= high else (low, high)
                for low, high, m in zip(one["low"], one["high"], middle, strict=True)]  # fmt: skip
        lengths = [[m - low for (low, _), m in zip(ends, middle, strict=True)],
                   [high - m for (_, high), m in zip(ends, middle, strict=True)]]  # fmt: skip
        axes.errorbar(x, y, **{"xerr" if across else "yerr": lengths}, fmt="none", elinewidth=0.8, capsize=1.5,
                      ecolor="#1b1f24" if kind == "bar" else color, zorder=3)  # fmt: skip
    if kind == "bar":
        return axes.bar(x, y, width, color=color if not look["pattern"] else "white", edgecolor=color,
                        hatch=3 * look["pattern"], linewidth=0.8)  # fmt: skip
    symbol, is_open, _ = str(look["symbol"]).partition("-open")
    sizes = one.get("sizes")
    few = kind == "line" and len(x) <= FEW_POINTS
    marker = MARKERS.get(symbol, "o") if kind in SIZES or sizes or few else "none"
    dash = one.get("dash") or ("solid" if kind == "thin" else look["dash"])
    size = 0.4 * sizes if isinstance(sizes, int) else SIZES.get(kind, 4.0)
    [line] = axes.plot(
        x, y, color=color, marker=marker, markersize=size, alpha=ALPHAS.get(kind),
        markerfacecolor="white" if is_open else color, linewidth=WIDTHS.get(kind, 0.0),
        linestyle="none" if kind in ("dots", "pale") else DASHES.get(dash, "-"),
        drawstyle="steps-post" if kind == "steps" else "default",
        markevery=[i for i, size in enumerate(sizes) if size] if isinstance(sizes, list) else None,
    )  # fmt: skip
    return line


def _axis(axes: Any, name: str, of: Mapping[str, Any], words: list[Any] | None, *, titled: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

    axis = getattr(axes, f"{name}axis")
    limits = getattr(axes, f"set_{name}lim")
    if of.get("log"):
        getattr(axes, f"set_{name}scale")("log")
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    if of.get("share"):
        limits(-0.04, 1.06)
        axis.set_ticks([0, 0.25, 0.5, 0.75, 1])
        axis.set_major_formatter(PercentFormatter(1, 0))
    elif of.get("format"):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    if words is not None:
        axis.set_ticks(range(len(words)), [_plain(word) for word in words])
        if sum(len(str(word)) + 2 for word in words) > LETTERS:
            axes.tick_params(axis=name, labelrotation=30)
        axes.grid(False, axis=name)
    if ticks := of.get("ticks"):
        axis.set_ticks([at for at, _ in ticks], [_plain(text) for _, text in ticks])
    if span := of.get("range"):
        limits(*([10**end for end in span] if of.get("log") else span))
    low, high = getattr(axes, f"get_{name}lim")()
    if of.get("log") and not of.get("ticks") and high < 10 * low:  # no power of ten, which alone have labels
        axis.set_major_locator(MaxNLocator(4))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if titled:
        getattr(axes, f"set_{name}label")(_plain(of.get("title") or ""))


def _short(value: float) -> str:
    """The format `~s` of d3."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _plain(text: object) -> str:
    """Text that matplotlib does not read as mathematics."""
    return str(text).replace("$", r"\$")


def _numbers(values: Sequence[Any]) -> list[float]:
    return [math.nan if value is None else value for value in values]
