"""The charts of runs on tasks, as data that `web/chart.js` draws; the format is described at its top.

What differs between tasks (slices of which scale, a measure or an accuracy, linear or logarithmic) is in `words`;
a chart gets keys, and `quantity` describes them.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from canonlm.report.format import (
    Quantity,
    count_of,
    hint_of,
    number,
    percent,
    quantity,
    scale_words,
    score_label,
    slice_label,
    span,
)
from canonlm.runs.groups import Group, by_run
from canonlm.runs.identity import short
from canonlm.runs.load import Run
from canonlm.runs.rows import Evaluation, is_slice
from canonlm.runs.seed_statistics import Spread, by_seed
from canonlm.runs.summary import Architecture, at_most, wilson

Chart = dict[str, Any]
Series = dict[str, Any]

MAX_TRAIN_POINTS = 400
MAX_BARS_PER_NAME = 5  # a scale with more values than this is drawn as a line over them
GUESS = "chance"
BOUND = "maximum: everything stored"
TRAINED = "the largest of training"
STEPS = "training step"


def series_of(kind: str, arch: str, points: Sequence[tuple[Any, Any]], **more: Any) -> Series:
    """A series in the look of an architecture. points: (x, y)."""
    x, y = zip(*points, strict=True) if points else ((), ())
    return {"panel": 0, "kind": kind, "name": arch, "look": arch, "x": list(x), "y": list(y)} | more


def learning_curves(archs: Sequence[Architecture], keys: Sequence[str], chance: Mapping[str, float]) -> Chart:
    """A panel per key (slices, or measures) against training step, at each best rate. Thin: single runs; bold: their
    mean, or the run itself where there is only one."""
    shown = [a for a in archs if a.best]
    last = max((row.step for a in shown if a.best for run in a.best.runs for row in run.evals), default=1)
    panels, series = [], []
    for place, key in enumerate(keys):
        column = quantity(shown[0].task, key)
        bounds = {number(bound): bound for a in shown for bound in _bounds(a, key)}
        if key in chance:
            hint = f"guessing scores {percent(chance[key])}"
            series.append(level(GUESS, [0, last], [chance[key]] * 2, hint, "dot", place))
        for text, bound in bounds.items():
            series.append(level(BOUND, [0, last], [bound] * 2, f"at most {text} {column.label}", "dash", place))
        curves = [one | {"panel": place} for a in shown for one in _curves(a, key, column)]
        drawn = [value for one in curves for value in one["y"]]
        y = {"share": True} if is_slice(key) else _extent(drawn, [*bounds.values()], column.log)
        panels.append({"title": column.label, "x": steps_axis(last), "y": y})
        series += curves
    return {"columns": 4 if all(map(is_slice, keys)) else 2, "panels": panels, "series": series}


def unfinished_curves(runs: Sequence[Run], groups: Sequence[Group], keys: Sequence[str]) -> Chart:
    """A panel per slice, and in each a line per run, as far as it has come."""
    last, group_of = max((run.steps or run.last_step for run in runs), default=1), by_run(groups)
    series = [
        series_of("line", group_of[run.name].name, [(row.step, value) for row, value in _values(run, key)],
                  panel=place, run=run.name,
                  hover=[f"{run.name}\nstep {row.step:,}: {percent(value)}" for row, value in _values(run, key)])
        for place, key in enumerate(keys)
        for run in runs
    ]  # fmt: skip
    panels = [{"title": slice_label(runs[0].task, key), "x": steps_axis(last), "y": {"share": True}} for key in keys]
    return {"panels": panels, "series": series}


def final_chart(
    archs: Sequence[Architecture], keys: Sequence[str], chance: Mapping[str, float], largest: float | None = None
) -> Chart:
    """Final accuracy per slice of one scale and architecture, each at its best rate: bars side by side, or for a scale
    with many numeric values a line per architecture. largest: of a scale of sizes (the number in a key such as `n=32`),
    the largest size of training, which is marked on the axis of sizes."""
    shown = [a for a in archs if a.best]
    labels = [quantity(a.task, key).label for a in shown[:1] for key in keys]
    sizes = [float(key.partition("=")[2]) for key in keys] if largest else []
    places: Sequence[Any] = sizes or labels
    lines = bool(sizes) or (len(keys) > MAX_BARS_PER_NAME and all(any(map(str.isdigit, key)) for key in keys))
    series: list[Series] = []
    if largest:
        series.append(level(TRAINED, [largest] * 2, [0, 1], f"training has at most {largest:g}", "solid", 0))
    for a in shown:
        assert a.best is not None
        spreads = [a.best.slices.get(key) for key in keys]
        hover = [f"{a.arch}, {label}\n{_about(s, percent, a.best.lr)}" if s else ""
                 for s, label in zip(spreads, labels, strict=True)]  # fmt: skip
        points = [(x, s.mean if s else None) for s, x in zip(spreads, places, strict=True)]
        series.append(series_of("bold" if lines else "bar", a.arch, points, hover=hover, **whiskers(spreads)))
    if guessed := [(x, chance[key]) for key, x in zip(keys, places, strict=True) if key in chance]:
        x, y = zip(*guessed, strict=True)
        series.append(level(GUESS, x, y, "guessing", "dot", 0) if sizes else {
            "panel": 0, "kind": "dots", "name": GUESS, "style": {"symbol": "line-ew-open"}, "sizes": 30,
            "x": x, "y": y, "hover": "guessing",
        })  # fmt: skip
    axis: dict[str, Any] = {"words": True}
    if sizes:
        ticks = [[size, f"{size:g}"] for size in sizes]
        axis = {"title": scale_words(shown[0].task, keys[0]).by, "log": max(sizes) >= 8 * min(sizes), "ticks": ticks}
    panels = [{"title": "", "x": axis, "y": {"share": True}}]
    return {"panels": panels, "series": series, **({"height": 280} if sizes else {})}


def size_curves(archs: Sequence[Architecture], by: str = "parameters") -> Chart:
    """The task's score at the end of training against the number of parameters, or by="state_bytes"; a line per family
    of architectures."""
    shown = [a for a in archs if a.best and a.best.score and getattr(a, by)]
    score = shown[0].score
    say, label = quantity(shown[0].task, score).say, score_label(shown[0].task, score)
    series: list[Series] = []
    bounds = sorted({(a.parameters or 0, bound) for a in shown for bound in _bounds(a, score)})
    if by != "parameters":
        bounds = []
    if bounds:
        hint = [f"{short(size)} parameters: at most {say(bound)} {label}" for size, bound in bounds]
        sizes, limits = zip(*bounds, strict=True)
        series.append(level(BOUND, sizes, limits, hint, "dash", 0))
    # Both axes are logarithmic, so that the same bits among more parameters are a straight line. They show all runs; an
    # interval over two runs can be far longer, and then leaves the chart.
    drawn = [value for a in shown if a.best and a.best.score for value in a.best.score.values]
    y: dict[str, Any] = {"share": True}
    if score and not is_slice(score):
        y = _extent(drawn, [bound for _, bound in bounds], True)
    floor = 10 ** (y["range"][0] - 1) if y.get("log") else -math.inf
    for family in dict.fromkeys(a.family for a in shown):
        members = sorted((a for a in shown if a.family == family), key=attrgetter(by))
        points = [(a, a.best, a.best.score) for a in members if a.best and a.best.score]
        spreads = [spread for _, _, spread in points]
        hover = [f"{a.arch}\n{_about(spread, say, best.lr)}" for a, best, spread in points]
        means = [(getattr(a, by), spread.mean) for a, _, spread in points]
        series.append(series_of("bold", family, means, hover=hover, **whiskers(spreads, floor)))
    x = {"title": by.replace("state_bytes", "bytes of state"), "format": "~s"}
    x |= _extent([getattr(a, by) for a in shown], [], True)
    return {"height": 280, "panels": [{"title": "", "x": x, "y": {"title": label, **y}}], "series": series}


def loss_curves(archs: Sequence[Architecture]) -> Chart:
    """Training loss of every run at the best rates."""
    series = []
    for a in archs:
        for run in a.best.runs if a.best else ():
            rows = run.train[:: max(1, math.ceil(len(run.train) / MAX_TRAIN_POINTS))]
            points = [(row.step, row.loss if math.isfinite(row.loss) else None) for row in rows]
            more = {"run": run.name, "hover": run.name, "tip": "step %{x:,}: loss %{y:.4g}"}
            series.append(series_of("line", a.arch, points, **more))
    last = max((step for one in series for step in one["x"]), default=1)
    return {"height": 280, "panels": [{"title": "", "x": steps_axis(last), "y": {"title": "training loss"}}],
            "series": series}  # fmt: skip


def steps_axis(last: float, title: str = STEPS, *, linked: bool = True) -> dict[str, Any]:
    """The axis of training steps, from zero to `last`. linked: all panels zoom together."""
    return {"title": title, "range": [-0.03 * last, 1.04 * last], "linked": linked}


def level(
    name: str, x: Sequence[float], y: Sequence[float], hint: str | Sequence[str], dash: str, panel: int
) -> Series:
    """A thin reference line."""
    return {"panel": panel, "kind": "level", "name": name, "dash": dash, "x": list(x), "y": list(y), "hover": hint}


def whiskers(spreads: Sequence[Spread | None], floor: float = -math.inf) -> dict[str, Any]:
    """The ends of intervals, None if there is none, cut at `floor`: a logarithmic axis has no zero."""
    return {"low": [max(s.low, floor) if s and s.low < s.high else None for s in spreads],
            "high": [s.high if s and s.low < s.high else None for s in spreads]}  # fmt: skip


def _curves(a: Architecture, key: str, column: Quantity) -> Iterator[Series]:
    """Thin lines for single runs, then the bold one."""
    runs = [run for run in (a.best.runs if a.best else ()) if any(row.value(key) is not None for row in run.evals)]
    for run in runs:
        rows, hover = _values(run, key), []
        for row, value in rows:
            text = column.say(value)
            if count := row.slices.get(key):
                low, high = map(percent, wilson(count))
                text += f" ({count.correct:,} of {count.total:,}; 95% interval {low} to {high})"
            where = f"seed {run.seed}, learning rate {run.lr:g}\n{run.name}"
            hover.append(f"{a.arch}, {column.label}\nstep {row.step:,}: {text}\n{where}")
        points = [(row.step, value) for row, value in rows]
        yield series_of("thin" if len(runs) > 1 else "bold", a.arch, points, run=run.name, hover=hover)
    if len(runs) > 1:
        # At steps at which every run was evaluated: a mean over changing runs has jumps that no run has.
        by_run = [(run.seed, {row.step: value for row, value in _values(run, key)}) for run in runs]
        means, hover = [], []
        for step in sorted(set.intersection(*(set(values) for _, values in by_run))):
            values = by_seed((seed, values[step]) for seed, values in by_run).values()
            means.append((step, statistics.mean(values)))
            about = f"mean of {count_of(len(values), 'run')}: {span(min(values), max(values), column.say)}"
            text = f"step {step:,}: {column.say(means[-1][1])}\n{about}\nlearning rate {runs[0].lr:g}"
            hover.append(f"{a.arch}, {column.label}\n{text}")
        yield series_of("bold", a.arch, means, run="mean", hover=hover)


def _values(run: Run, key: str) -> list[tuple[Evaluation, float]]:
    return [(row, value) for row in run.evals if (value := row.value(key)) is not None]


def _about(spread: Spread, say: Callable[[float], str], lr: float) -> str:
    return f"{say(spread.mean)}\n{hint_of(spread, say)}".replace("; ", "\n") + f"\nlearning rate {lr:g}"


def _bounds(a: Architecture, key: str) -> list[float]:
    """The bound of the measure for this architecture, if there is one."""
    bounds = [at_most(run, key) for run in (a.best.runs if a.best and not is_slice(key) else ())]
    return [bound for bound in bounds[:1] if bound is not None and bound > 0]


def _extent(values: Sequence[float], bounds: Sequence[float], log: bool) -> dict[str, Any]:
    """The range of a measure's axis. A bound far above everything is left out: it would flatten the curves."""
    top = max(values, default=0)
    top = max([top, *(bound for bound in bounds if bound <= 3 * top)])
    if log and min(values, default=0) > 0:
        low, high = math.log10(min(values)), math.log10(top)
        room = 0.06 * max(high - low, 0.5)
        return {"log": True, "range": [low - room, high + room]}
    low = min(0.0, 1.06 * min(values, default=0))
    return {"range": [low, 1.1 * top if top > 0 else -0.06 * low or 1]}
