"""The chart layer: plotly figures with one theme and one fixed look per architecture. No files and no HTML here.

An architecture is told apart twice: by colour (after Okabe & Ito, safe for colour-blind readers) and by line, marker
and bar pattern, so that a black-and-white print still reads. Text from runs is escaped, as plotly reads labels as HTML.
"""

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import plotly.graph_objects as go

from .runs import Run
from .summary import Architecture, slices_of
from .words import count_of, percent, slice_label, span

INK, MUTED, GRID, PAPER = "#1b1f24", "#59636e", "#e4e7eb", "#ffffff"
DARK = {  # every colour used in a figure → the same colour on a dark page
    INK: "#e8eaed", MUTED: "#9aa4af", GRID: "#2c3238", PAPER: "#14171a",
    "#0072b2": "#4fa8e8", "#d55e00": "#ff8f52", "#009e73": "#2fc99b", "#b8588f": "#eaa0cc",
    "#2f93cc": "#8fd3ff", "#b27a00": "#ffc24d", "#4b3fa7": "#a79bff", "#666666": "#bdbdbd",
}  # fmt: skip
FONT = '-apple-system, BlinkMacSystemFont, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif'
MAX_TRAIN_POINTS = 400


@dataclass(frozen=True)
class Look:
    color: str
    dash: str
    symbol: str
    pattern: str


LOOKS = {
    "llama": Look("#d55e00", "dash", "square-open", "/"),
    "llama+canon": Look("#0072b2", "solid", "circle", ""),
    "gla5": Look("#b27a00", "dash", "diamond-open", "\\"),
    "gla5+canon": Look("#4b3fa7", "solid", "diamond", ""),
    "gdn2": Look("#b8588f", "longdash", "triangle-up-open", "x"),
    "gdn2+canon": Look("#009e73", "solid", "triangle-up", ""),
    "mamba2": Look("#666666", "dashdot", "cross-open", "-"),
    "mamba2+canon": Look("#2f93cc", "solid", "cross", ""),
}


def looks(archs: Sequence[str]) -> dict[str, Look]:
    """Known architectures always look the same; others take what is free and of their kind (with Canon or without),
    then what is free, then repeat with another line."""
    free = [name for name in LOOKS if name not in archs]
    repeats = itertools.cycle(LOOKS.values())
    chosen = {}
    for arch in dict.fromkeys(archs):
        if arch in LOOKS:
            chosen[arch] = LOOKS[arch]
        elif free:
            name = next((name for name in free if ("+canon" in name) == ("+canon" in arch)), free[0])
            free.remove(name)
            chosen[arch] = LOOKS[name]
        else:
            chosen[arch] = replace(next(repeats), dash="longdashdot", pattern=".")
    return chosen


def learning_curves(
    architectures: Sequence[Architecture],
    chance: Mapping[str, float] | None = None,
    *,
    columns: int = 4,
    styles: Mapping[str, Look] | None = None,
) -> go.Figure:
    """One panel per slice: accuracy against training step at each best rate. Thin: single runs; bold: their mean."""
    shown = [a for a in architectures if a.best]
    styles = styles or looks([a.arch for a in shown])
    keys = slices_of(shown)
    titles = [slice_label(a.task, key) for a in shown[:1] for key in keys]
    last = max((row.step for a in shown if a.best for run in a.best.runs for row in run.evals), default=1)
    figure = _panels(titles, columns, last, _legend_rows(shown, columns <= 2, chance))
    named: set[str] = set()  # one legend entry each, and a click on it acts on every panel
    for number, key in enumerate(keys, 1):
        if chance and key in chance:
            figure.add_trace(go.Scatter(
                x=[0, last], y=[chance[key]] * 2, mode="lines", line={"color": MUTED, "width": 1.5, "dash": "dot"},
                name="guessing", legendgroup="guessing", showlegend="guessing" not in named, legendrank=2000,
                hovertemplate=f"guessing scores {percent(chance[key])}<extra></extra>", **_axes(number),
            ))  # fmt: skip
            named.add("guessing")
        for a in shown:
            for trace in _curves(a, key, titles[number - 1], styles[a.arch]):
                trace.update(showlegend=trace.mode != "lines" and a.arch not in named, **_axes(number))
                figure.add_trace(trace)
            named.add(a.arch)
    return figure


def final_bars(
    architectures: Sequence[Architecture],
    chance: Mapping[str, float] | None = None,
    *,
    narrow: bool = False,
    styles: Mapping[str, Look] | None = None,
) -> go.Figure:
    """Final accuracy per slice and architecture, each at its best rate, with the interval that `Spread` describes."""
    shown = [a for a in architectures if a.best]
    styles = styles or looks([a.arch for a in shown])
    keys = slices_of(shown)
    labels = [_safe(slice_label(a.task, key)) for a in shown[:1] for key in keys]
    bars = len(keys) * len(shown)
    figure = go.Figure(
        layout=_layout(330, _legend_rows(shown, narrow))
        | {"barmode": "group", "bargap": 1 - min(0.65, 0.08 * bars), "bargroupgap": 0.12}
    )
    for a in shown:
        assert a.best is not None
        spreads = [a.best.slices.get(key) for key in keys]
        look = styles[a.arch]
        hover = [f"<b>{_safe(a.arch)}</b>, {label}<br>{percent(s.mean)} ({span(s)}, {s.kind})<br>"
                 f"{count_of(s.runs, 'run')}, learning rate {a.best.lr:g}" if s else ""
                 for s, label in zip(spreads, labels, strict=True)]  # fmt: skip
        figure.add_trace(go.Bar(
            x=labels, y=[s.mean if s else None for s in spreads], name=_safe(a.arch), legendgroup=a.arch,
            marker={"color": look.color, "line": {"width": 1, "color": look.color},
                    "pattern": {"shape": look.pattern, "fgcolor": look.color, "fillmode": "replace", "size": 6}},
            error_y={"type": "data", "symmetric": False, "color": INK, "thickness": 1.2, "width": 4,
                     "array": [s.high - s.mean if s else 0 for s in spreads],
                     "arrayminus": [s.mean - s.low if s else 0 for s in spreads]},
            hovertext=hover, hovertemplate="%{hovertext}<extra></extra>",
        ))  # fmt: skip
    for number, key in enumerate(keys):
        if chance and key in chance:
            figure.add_shape(type="line", x0=number - 0.42, x1=number + 0.42, y0=chance[key], y1=chance[key],
                             line={"color": MUTED, "width": 1.5, "dash": "dot"})  # fmt: skip
    figure.update_layout(
        xaxis=_axis() | {"showgrid": False, "type": "category", "fixedrange": True, "domain": [0.0, 1.0]},
        yaxis=_axis() | {"range": [0, 1.06], "tickformat": ".0%", "dtick": 0.25, "fixedrange": True},
    )
    return figure


def loss_curves(
    architectures: Sequence[Architecture], *, narrow: bool = False, styles: Mapping[str, Look] | None = None
) -> go.Figure:
    """Training loss of every run at the best rates."""
    shown = [a for a in architectures if a.best]
    styles = styles or looks([a.arch for a in shown])
    figure = go.Figure(layout=_layout(330, _legend_rows(shown, narrow)))
    for a in shown:
        for number, run in enumerate(a.best.runs if a.best else ()):
            rows = run.train[:: max(1, math.ceil(len(run.train) / MAX_TRAIN_POINTS))]
            figure.add_trace(go.Scatter(
                x=[row.step for row in rows], y=[row.loss if math.isfinite(row.loss) else None for row in rows],
                mode="lines", line={"color": styles[a.arch].color, "width": 1.5, "dash": styles[a.arch].dash},
                opacity=0.8, name=_safe(a.arch), legendgroup=a.arch, showlegend=number == 0, hovertext=_safe(run.name),
                hovertemplate="<b>%{fullData.name}</b><br>step %{x:,}: loss %{y:.4g}<br>%{hovertext}<extra></extra>",
            ))  # fmt: skip
    figure.update_layout(
        xaxis=_axis()
        | {
            "title": {"text": "training step", "font": {"size": 12, "color": MUTED}},
            "tickformat": ",d",
            "domain": [0.0, 1.0],
        },
        yaxis=_axis()
        | {"title": {"text": "training loss", "font": {"size": 12, "color": MUTED}}, "rangemode": "tozero"},
    )
    return figure


def _curves(a: Architecture, key: str, title: str, look: Look) -> list[go.Scatter]:
    """Thin lines for single runs, then the bold one: their mean, or the run itself where there is only one."""
    runs = [run for run in (a.best.runs if a.best else ()) if any(key in row.slices for row in run.evals)]
    traces = []
    for run in runs if len(runs) > 1 else ():
        steps, shares, hover = _points(run, key, a, title)
        traces.append(go.Scatter(
            x=steps, y=shares, mode="lines", line={"color": look.color, "width": 1}, opacity=0.5, meta=run.name,
            name=_safe(a.arch), legendgroup=a.arch, hovertext=hover, hovertemplate="%{hovertext}<extra></extra>",
        ))  # fmt: skip
    if runs:
        steps, shares, hover = _mean(runs, key, a, title) if len(runs) > 1 else _points(runs[0], key, a, title)
        traces.append(go.Scatter(
            x=steps, y=shares, mode="lines+markers", line={"color": look.color, "width": 3, "dash": look.dash},
            marker={"symbol": look.symbol, "size": 7, "color": look.color}, name=_safe(a.arch), legendgroup=a.arch,
            meta="mean" if len(runs) > 1 else runs[0].name, hovertext=hover,
            hovertemplate="%{hovertext}<extra></extra>",
        ))  # fmt: skip
    return traces


def _points(run: Run, key: str, a: Architecture, title: str) -> tuple[list[int], list[float], list[str]]:
    rows = [row for row in run.evals if key in row.slices]
    hover = [f"<b>{_safe(a.arch)}</b>, {_safe(title)}<br>step {row.step:,}: {percent(row.slices[key].accuracy)} "
             f"({row.slices[key].correct:,} of {row.slices[key].total:,})<br>"
             f"seed {run.seed}, learning rate {run.lr:g}<br>{_safe(run.name)}" for row in rows]  # fmt: skip
    return [row.step for row in rows], [row.slices[key].accuracy for row in rows], hover


def _mean(runs: Sequence[Run], key: str, a: Architecture, title: str) -> tuple[list[int], list[float], list[str]]:
    """Only at steps at which every run was evaluated: a mean over changing runs would draw jumps that never were."""
    by_run = [{row.step: row.slices[key].accuracy for row in run.evals if key in row.slices} for run in runs]
    steps = sorted(set.intersection(*(set(shares) for shares in by_run)))
    means = [sum(shares[step] for shares in by_run) / len(runs) for step in steps]
    hover = [f"<b>{_safe(a.arch)}</b>, {_safe(title)}<br>step {step:,}: {percent(mean)}<br>"
             f"mean of {len(runs)} runs, learning rate {runs[0].lr:g}"
             for step, mean in zip(steps, means, strict=True)]  # fmt: skip
    return steps, means, hover


def _panels(titles: Sequence[str], columns: int, last_step: int, legend_rows: int) -> go.Figure:
    """Empty panels in rows of `columns`. Laid out here and not by plotly so that one set of traces fits two layouts."""
    columns = max(1, min(columns, len(titles)))
    rows = max(1, math.ceil(len(titles) / columns))
    top, bottom = 38 + 29 * legend_rows, 52
    height = (215 if rows == 1 else 205 * rows) + top + bottom
    gap_x, gap_y = (
        (0.035 if columns > 2 else 0.09) if columns > 1 else 0,
        62 / (height - top - bottom) if rows > 1 else 0,
    )
    wide, tall = (1 - gap_x * (columns - 1)) / columns, (1 - gap_y * (rows - 1)) / rows
    figure = go.Figure(layout=_layout(height) | {"margin": {"l": 46, "r": 8, "t": top, "b": bottom}})
    for number, title in enumerate(titles):
        row, column = divmod(number, columns)
        left, roof = column * (wide + gap_x), 1 - row * (tall + gap_y)
        name = "" if number == 0 else str(number + 1)
        lowest = number + columns >= len(titles)
        ticks = 5 if columns > 2 or len(titles) == 1 else 3
        x = _axis() | {"domain": [left, left + wide], "anchor": f"y{name}", "nticks": ticks, "tickformat": ",d",
                       "range": [-0.03 * last_step, 1.04 * last_step]}  # fmt: skip
        y = _axis() | {"domain": [max(0.0, roof - tall), roof], "anchor": f"x{name}", "range": [-0.04, 1.06],
                       "dtick": 0.25, "tickformat": ".0%", "showticklabels": column == 0}  # fmt: skip
        if lowest:
            x["title"] = {"text": "training step", "standoff": 8, "font": {"size": 12, "color": MUTED}}
        if number:
            x["matches"], y["matches"] = "x", "y"
        figure.update_layout({f"xaxis{name}": x, f"yaxis{name}": y})
        figure.add_annotation(text=f"<b>{_safe(title)}</b>", x=left, y=roof, xref="paper", yref="paper", xanchor="left",
                              yanchor="bottom", showarrow=False, font={"size": 13, "color": INK})  # fmt: skip
    return figure


def _axes(number: int) -> dict[str, str]:
    return {"xaxis": f"x{number if number > 1 else ''}", "yaxis": f"y{number if number > 1 else ''}"}


def _axis() -> dict[str, Any]:
    return {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "showline": False, "color": MUTED,
            "tickfont": {"size": 12}, "automargin": True}  # fmt: skip


def _legend_rows(shown: Sequence[Architecture], narrow: bool, chance: Mapping[str, float] | None = None) -> int:
    """How many lines the legend takes, as plotly does not make room for it."""
    return math.ceil((len(shown) + bool(chance)) / (2 if narrow else 6))


def _layout(height: int, legend_rows: int = 1) -> dict[str, Any]:
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 46, "r": 8, "t": 16 + 29 * legend_rows, "b": 40},
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": GRID, "align": "left", "font": {"color": INK, "size": 13}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "yref": "container",
                   "font": {"size": 14, "color": INK}, "itemsizing": "trace", "groupclick": "togglegroup"},
    }  # fmt: skip


def _safe(text: str) -> str:
    """Plotly shows a subset of HTML in every label; after this it shows the characters instead."""
    return html.escape(text, quote=False)
