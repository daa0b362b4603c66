"""The charts: plotly figures from summaries, for any task. No files and no HTML here.

What differs between tasks (slices of which scale, a measure or an accuracy, linear or logarithmic) is said by `words`;
a chart is handed keys, and asks `quantity` what they are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ..runs.rows import Evaluation, is_slice
from .runs import Run
from .summary import Architecture, Spread, at_most, by_seed, spread, spread_of, wilson
from .theme import INK, MUTED, Look, axes, axis, layout, legend_rows, looks, safe
from .words import number, percent, quantity, short

MAX_TRAIN_POINTS = 400
MAX_BARS_PER_NAME = 5  # a scale with more values than this is drawn as a line over them
GUESS = "guessing"
BOUND = "the most there is to store"
SHARE_AXIS = {"range": [-0.04, 1.06], "dtick": 0.25, "tickformat": ".0%"}
STEPS = "training step"


def learning_curves(
    architectures: Sequence[Architecture],
    keys: Sequence[str],
    chance: Mapping[str, float] | None = None,
    *,
    narrow: bool = False,
    styles: Mapping[str, Look] | None = None,
) -> go.Figure:
    """One panel per key (slices, or measures) against training step, at each best rate. Thin: single runs; bold: their
    mean. A single run on a slice has its binomial interval as whiskers."""
    shown = [a for a in architectures if a.best]
    styles = styles or looks([a.arch for a in shown])
    titles = [quantity(a.task, key).label for a in shown[:1] for key in keys]
    last = max((row.step for a in shown if a.best for run in a.best.runs for row in run.evals), default=1)
    bounds = {key: {number(bound): bound for a in shown for bound in _bounds(a, key)} for key in keys}
    levels = [GUESS] * any(key in (chance or {}) for key in keys) + [BOUND] * any(bounds.values())
    shares = all(is_slice(key) for key in keys)
    columns = (2 if narrow else 4) if shares else (1 if narrow else 2)
    figure = _panels(titles, columns, last, legend_rows([*(a.arch for a in shown), *levels], narrow), shares)
    named: set[str] = set()  # one legend entry each, and a click on it acts on every panel
    for panel, (key, title) in enumerate(zip(keys, titles, strict=True), 1):
        if chance and key in chance:
            hint = f"guessing scores {percent(chance[key])}"
            figure.add_trace(_level(GUESS, [0, last], [chance[key]] * 2, hint, "dot", named, panel))
        for text, bound in bounds[key].items():
            figure.add_trace(_level(BOUND, [0, last], [bound] * 2, f"at most {text} {title}", "dash", named, panel))
        drawn: list[float] = []
        for a in shown:
            for trace in _curves(a, key, title, styles[a.arch]):
                trace.update(showlegend=trace.mode != "lines" and a.arch not in named, **axes(panel))
                figure.add_trace(trace)
                drawn += trace.y
            named.add(a.arch)
        if not is_slice(key):
            log = quantity(shown[0].task, key).log
            figure.update_layout({f"yaxis{panel if panel > 1 else ''}": _extent(drawn, [*bounds[key].values()], log)})
    return figure


def final_chart(
    architectures: Sequence[Architecture],
    keys: Sequence[str],
    chance: Mapping[str, float] | None = None,
    *,
    narrow: bool = False,
    styles: Mapping[str, Look] | None = None,
) -> go.Figure:
    """Final accuracy per slice of one scale and architecture, each at its best rate, with the interval of `Spread`.

    Bars side by side; where a scale counts up through many values, a line per architecture instead.
    """
    shown = [a for a in architectures if a.best]
    styles = styles or looks([a.arch for a in shown])
    labels = [safe(quantity(a.task, key).label) for a in shown[:1] for key in keys]
    lines = len(keys) > MAX_BARS_PER_NAME and all(any(map(str.isdigit, key)) for key in keys)
    figure = go.Figure(
        layout=layout(330, legend_rows([a.arch for a in shown], narrow))
        | {"barmode": "group", "bargap": 1 - min(0.65, 0.08 * len(keys) * len(shown)), "bargroupgap": 0.12}
    )
    for a in shown:
        assert a.best is not None
        spreads = [a.best.slices.get(key) for key in keys]
        look = styles[a.arch]
        hover = [f"<b>{safe(a.arch)}</b>, {label}<br>{percent(s.mean)}<br>{_told(s, percent)}<br>"
                 f"learning rate {a.best.lr:g}" if s else ""
                 for s, label in zip(spreads, labels, strict=True)]  # fmt: skip
        common: dict[str, Any] = {
            "x": labels, "y": [s.mean if s else None for s in spreads], "name": safe(a.arch), "legendgroup": a.arch,
            "error_y": _whiskers(spreads, look.color if lines else INK),
            "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>",
        }  # fmt: skip
        figure.add_trace(go.Scatter(**_bold(look), **common) if lines else go.Bar(
            marker={"color": look.color, "line": {"width": 1, "color": look.color},
                    "pattern": {"shape": look.pattern, "fgcolor": look.color, "fillmode": "replace", "size": 6}},
            **common,
        ))  # fmt: skip
    for place, key in enumerate(keys):
        if chance and key in chance:
            figure.add_shape(type="line", x0=place - 0.42, x1=place + 0.42, y0=chance[key], y1=chance[key],
                             line={"color": MUTED, "width": 1.5, "dash": "dot"})  # fmt: skip
    figure.update_layout(
        xaxis=axis() | {"showgrid": False, "type": "category", "fixedrange": True, "domain": [0.0, 1.0]},
        yaxis=axis() | SHARE_AXIS | {"range": [0, 1.06], "fixedrange": True},
    )
    return figure


def size_curves(
    architectures: Sequence[Architecture], *, narrow: bool = False, styles: Mapping[str, Look] | None = None
) -> go.Figure:
    """The task's score at the end of training against the number of parameters, a line per family of architectures."""
    shown = [a for a in architectures if a.best and a.best.score and a.parameters]
    families = list(dict.fromkeys(a.family for a in shown))
    styles = styles or looks(families)
    score = shown[0].score
    say, label = quantity(shown[0].task, score).say, quantity(shown[0].task, score).label
    bounds = sorted({(a.parameters or 0, bound) for a in shown for bound in _bounds(a, score)})
    figure = go.Figure(layout=layout(360, legend_rows([*families, *([BOUND] if bounds else [])], narrow)))
    if bounds:
        hint = [f"{short(size)} parameters: at most {say(bound)} {label}" for size, bound in bounds]
        sizes, most = zip(*bounds, strict=True)
        figure.add_trace(_level(BOUND, sizes, most, hint, "dash", set(), 1))
    # Both axes logarithmic: there, the same bits among more parameters are a straight line. They show all runs; an
    # interval over two runs can be far longer and then leaves the chart.
    drawn = [value for a in shown if a.best and a.best.score for value in a.best.score.values]
    y: dict[str, Any] = _extent(drawn, [bound for _, bound in bounds], True) if score else SHARE_AXIS
    floor = 10 ** (y["range"][0] - 1) if y.get("type") == "log" else -math.inf
    for family in families:
        members = sorted((a for a in shown if a.family == family), key=lambda a: a.parameters or 0)
        found = [(a, a.best, a.best.score) for a in members if a.best and a.best.score]
        hover = [f"<b>{safe(a.arch)}</b><br>{say(s.mean)}<br>{_told(s, say)}<br>learning rate {best.lr:g}"
                 for a, best, s in found]  # fmt: skip
        look = styles[family]
        figure.add_trace(go.Scatter(
            x=[a.parameters for a, _, _ in found], y=[s.mean for _, _, s in found], **_bold(look),
            error_y=_whiskers([s for _, _, s in found], look.color, floor), name=safe(family),
            legendgroup=family, hovertext=hover, hovertemplate="%{hovertext}<extra></extra>",
        ))  # fmt: skip
    figure.update_layout(
        xaxis=axis("parameters") | {"type": "log", "dtick": "D2", "tickformat": "~s", "domain": [0.0, 1.0]},
        yaxis=axis(label) | y,
    )
    return figure


def loss_curves(
    architectures: Sequence[Architecture], *, narrow: bool = False, styles: Mapping[str, Look] | None = None
) -> go.Figure:
    """Training loss of every run at the best rates."""
    shown = [a for a in architectures if a.best]
    styles = styles or looks([a.arch for a in shown])
    figure = go.Figure(layout=layout(330, legend_rows([a.arch for a in shown], narrow)))
    for a in shown:
        for order, run in enumerate(a.best.runs if a.best else ()):
            rows = run.train[:: max(1, math.ceil(len(run.train) / MAX_TRAIN_POINTS))]
            figure.add_trace(go.Scatter(
                x=[row.step for row in rows], y=[row.loss if math.isfinite(row.loss) else None for row in rows],
                mode="lines", line={"color": styles[a.arch].color, "width": 1.5, "dash": styles[a.arch].dash},
                opacity=0.8, name=safe(a.arch), legendgroup=a.arch, showlegend=order == 0, hovertext=safe(run.name),
                hovertemplate="<b>%{fullData.name}</b><br>step %{x:,}: loss %{y:.4g}<br>%{hovertext}<extra></extra>",
            ))  # fmt: skip
    figure.update_layout(
        xaxis=axis(STEPS) | {"tickformat": ",d", "domain": [0.0, 1.0]},
        yaxis=axis("training loss") | {"rangemode": "tozero"},
    )
    return figure


def _curves(a: Architecture, key: str, title: str, look: Look) -> list[go.Scatter]:
    """Thin lines for single runs, then the bold one: their mean, or the run itself where there is only one."""
    runs = [run for run in (a.best.runs if a.best else ()) if any(row.value(key) is not None for row in run.evals)]
    common = {"name": safe(a.arch), "legendgroup": a.arch, "hovertemplate": "%{hovertext}<extra></extra>"}
    traces = []
    for run in runs if len(runs) > 1 else ():
        rows = _rows(run, key)
        traces.append(go.Scatter(
            x=[row.step for row, _ in rows], y=[value for _, value in rows], mode="lines", opacity=0.5, meta=run.name,
            line={"color": look.color, "width": 1}, hovertext=_hover(run, key, a, title), **common,
        ))  # fmt: skip
    if len(runs) > 1:
        steps, means, hover = _mean(runs, key, a, title)
        traces.append(go.Scatter(x=steps, y=means, meta="mean", hovertext=hover, **_bold(look), **common))
    elif runs:
        rows = _rows(runs[0], key)
        counts = [row.slices[key] for row, _ in rows if key in row.slices]
        traces.append(go.Scatter(
            x=[row.step for row, _ in rows], y=[value for _, value in rows], meta=runs[0].name, **_bold(look), **common,
            hovertext=_hover(runs[0], key, a, title),
            error_y=_whiskers([spread([count]) for count in counts], look.color) if counts else None,
        ))  # fmt: skip
    return traces


def _rows(run: Run, key: str) -> list[tuple[Evaluation, float]]:
    return [(row, value) for row in run.evals if (value := row.value(key)) is not None]


def _hover(run: Run, key: str, a: Architecture, title: str) -> list[str]:
    texts = []
    for row, value in _rows(run, key):
        said = quantity(a.task, key).say(value)
        if count := row.slices.get(key):
            low, high = map(percent, wilson(count))
            said += f" ({count.correct:,} of {count.total:,}; 95% interval {low} to {high})"
        texts.append(f"<b>{safe(a.arch)}</b>, {safe(title)}<br>step {row.step:,}: {said}<br>"
                     f"seed {run.seed}, learning rate {run.lr:g}<br>{safe(run.name)}")  # fmt: skip
    return texts


def _mean(runs: Sequence[Run], key: str, a: Architecture, title: str) -> tuple[list[int], list[float], list[str]]:
    """Only at steps at which every run was evaluated: a mean over changing runs would draw jumps that never were."""
    by_run = [(run.seed, {row.step: value for row, value in _rows(run, key)}) for run in runs]
    steps = sorted(set.intersection(*(set(values) for _, values in by_run)))
    seeds = [by_seed((seed, values[step]) for seed, values in by_run) for step in steps]
    spreads = [spread_of([*values.values()], is_slice(key)) for values in seeds]
    say = quantity(a.task, key).say
    hover = [f"<b>{safe(a.arch)}</b>, {safe(title)}<br>step {step:,}: {say(found.mean)}<br>{_told(found, say)}<br>"
             f"learning rate {runs[0].lr:g}" for step, found in zip(steps, spreads, strict=True)]  # fmt: skip
    return steps, [found.mean for found in spreads], hover


def _told(found: Spread, say: Callable[[float], str]) -> str:
    return safe(found.about(say)).replace("; ", "<br>")


def _bounds(a: Architecture, key: str) -> list[float]:
    """What the measure can reach with this architecture, where anything bounds it."""
    found = [at_most(run, key) for run in (a.best.runs if a.best and not is_slice(key) else ())]
    return [bound for bound in found[:1] if bound is not None and bound > 0]


def _bold(look: Look) -> dict[str, Any]:
    return {
        "mode": "lines+markers",
        "line": {"color": look.color, "width": 3, "dash": look.dash},
        "marker": {"symbol": look.symbol, "size": 7, "color": look.color},
    }


def _whiskers(spreads: Sequence[Spread | None], color: str, floor: float = -math.inf) -> dict[str, Any]:
    """`floor`: a value below the axis; no whisker goes further, as a logarithmic axis has no place for zero."""
    return {"type": "data", "symmetric": False, "color": color, "thickness": 1.2, "width": 4,
            "array": [s.high - s.mean if s else 0 for s in spreads],
            "arrayminus": [s.mean - max(s.low, floor) if s else 0 for s in spreads]}  # fmt: skip


def _level(
    name: str, x: Sequence[float], y: Sequence[float], hint: str | Sequence[str], dash: str, named: set[str], panel: int
) -> go.Scatter:
    """A thin line to compare with; `named` are the names that the legend has already."""
    trace = go.Scatter(
        x=list(x), y=list(y), mode="lines", line={"color": MUTED, "width": 1.5, "dash": dash}, name=name,
        legendgroup=name, showlegend=name not in named, legendrank=2000, hovertext=safe(hint) if isinstance(hint, str)
        else [safe(text) for text in hint], hovertemplate="%{hovertext}<extra></extra>", **axes(panel),
    )  # fmt: skip
    named.add(name)
    return trace


def _extent(values: Sequence[float], bounds: Sequence[float], log: bool) -> dict[str, Any]:
    """The range of a measure's axis. A bound far above everything is left outside: it would flatten the curves."""
    top = max(values, default=0)
    top = max([top, *(bound for bound in bounds if bound <= 3 * top)])
    if log and min(values, default=0) > 0:
        low, high = math.log10(min(values)), math.log10(top)
        room = 0.06 * max(high - low, 0.5)
        return {
            "type": "log",
            "range": [low - room, high + room],
            "tickformat": "~g",
            "dtick": 1 if high - low > 1.5 else "D2",
        }
    return {"range": [min(0.0, 1.06 * min(values, default=0)), 1.1 * top or 1]}


def _panels(titles: Sequence[str], columns: int, last_step: int, rows_of_legend: int, shares: bool) -> go.Figure:
    """Empty panels in rows of `columns`. Laid out here and not by plotly so that one set of traces fits two layouts.

    `shares`: all panels hold shares and have the same axis, which is labelled on the left only.
    """
    columns = max(1, min(columns, len(titles)))
    rows = max(1, math.ceil(len(titles) / columns))
    top, bottom = 38 + 29 * rows_of_legend, 52
    height = (215 if rows == 1 else 205 * rows) + top + bottom
    gap_x = 0 if columns == 1 else 0.035 if columns > 2 and shares else 0.09
    gap_y = 62 / (height - top - bottom) if rows > 1 else 0
    wide, tall = (1 - gap_x * (columns - 1)) / columns, (1 - gap_y * (rows - 1)) / rows
    figure = go.Figure(layout=layout(height) | {"margin": {"l": 46, "r": 8, "t": top, "b": bottom}})
    for place, title in enumerate(titles):
        row, column = divmod(place, columns)
        left, roof = column * (wide + gap_x), 1 - row * (tall + gap_y)
        name = "" if place == 0 else str(place + 1)
        lowest = place + columns >= len(titles)
        ticks = 5 if columns > 2 or len(titles) == 1 else 3
        x = axis(STEPS if lowest else "") | {
            "domain": [left, left + wide], "anchor": f"y{name}", "nticks": ticks, "tickformat": ",d",
            "range": [-0.03 * last_step, 1.04 * last_step]}  # fmt: skip
        y = axis() | {"domain": [max(0.0, roof - tall), roof], "anchor": f"x{name}"}
        if shares:
            y |= SHARE_AXIS | {"showticklabels": column == 0}
        if place:
            x["matches"] = "x"
            y |= {"matches": "y"} if shares else {}
        figure.update_layout({f"xaxis{name}": x, f"yaxis{name}": y})
        figure.add_annotation(text=f"<b>{safe(title)}</b>", x=left, y=roof, xref="paper", yref="paper", xanchor="left",
                              yanchor="bottom", showarrow=False, font={"size": 13, "color": INK})  # fmt: skip
    return figure
