"""The charts of runs on tasks, as data that `web/chart.js` draws; its first lines say what a chart consists of.

What differs between tasks (slices of which scale, a measure or an accuracy, linear or logarithmic) is in `words`;
a chart gets keys, and `quantity` describes them.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..runs.load import Run
from ..runs.rows import Evaluation, is_slice
from ..runs.spread import Spread, by_seed
from .groups import grouped, name_of
from .summary import Architecture, at_most, wilson
from .words import count_of, hint_of, number, percent, quantity, score_label, short, slice_label, span

Chart = dict[str, Any]
Series = dict[str, Any]

MAX_TRAIN_POINTS = 400
MAX_BARS_PER_NAME = 5  # a scale with more values than this is drawn as a line over them
GUESS = "guessing"
BOUND = "the most there is to store"
STEPS = "training step"


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
        curves = [one | {"panel": place} for a in shown for one in _curves(a, key, column.label)]
        drawn = [value for one in curves for value in one["y"]]
        y = {"share": True} if is_slice(key) else _extent(drawn, [*bounds.values()], column.log)
        panels.append({"title": column.label, "x": steps_axis(last), "y": y})
        series += curves
    return {"columns": 4 if all(map(is_slice, keys)) else 2, "panels": panels, "series": series}


def unfinished_curves(runs: Sequence[Run], keys: Sequence[str]) -> Chart:
    """A panel per slice, and in each a line per run, as far as it has come."""
    groups = grouped(runs)
    last = max((run.steps or run.last_step for run in runs), default=1)
    series: list[Series] = []
    for place, key in enumerate(keys):
        for run in runs:
            rows = _rows(run, key)
            series.append({
                "panel": place, "kind": "line", "name": name_of(groups, run), "look": name_of(groups, run),
                "run": run.name, "tip": "step %{x:,}: %{y:.1%}", "hover": run.name,
                "x": [row.step for row, _ in rows], "y": [value for _, value in rows],
            })  # fmt: skip
    panels = [{"title": slice_label(runs[0].task, key), "x": steps_axis(last), "y": {"share": True}} for key in keys]
    return {"panels": panels, "series": series}


def final_chart(archs: Sequence[Architecture], keys: Sequence[str], chance: Mapping[str, float]) -> Chart:
    """Final accuracy per slice of one scale and architecture, each at its best rate, with the interval of `Spread`.

    Bars side by side; where a scale counts up through many values, a line per architecture instead.
    """
    shown = [a for a in archs if a.best]
    labels = [quantity(a.task, key).label for a in shown[:1] for key in keys]
    lines = len(keys) > MAX_BARS_PER_NAME and all(any(map(str.isdigit, key)) for key in keys)
    series: list[Series] = []
    for a in shown:
        assert a.best is not None
        spreads = [a.best.slices.get(key) for key in keys]
        hover = [f"{a.arch}, {label}\n{_about(s, percent)}\nlearning rate {a.best.lr:g}" if s else ""
                 for s, label in zip(spreads, labels, strict=True)]  # fmt: skip
        series.append({
            "panel": 0, "kind": "bold" if lines else "bar", "name": a.arch, "look": a.arch, "x": labels,
            "y": [s.mean if s else None for s in spreads], **whiskers(spreads), "hover": hover,
        })  # fmt: skip
    if guessed := [(label, chance[key]) for key, label in zip(keys, labels, strict=True) if key in chance]:
        series.append({
            "panel": 0, "kind": "dots", "name": GUESS, "style": {"symbol": "line-ew-open"}, "sizes": 30,
            "x": [label for label, _ in guessed], "y": [share for _, share in guessed], "hover": "guessing",
        })  # fmt: skip
    return {"panels": [{"title": "", "x": {"words": True}, "y": {"share": True}}], "series": series}


def size_curves(archs: Sequence[Architecture]) -> Chart:
    """The task's score at the end of training against the number of parameters, a line per family of architectures."""
    shown = [a for a in archs if a.best and a.best.score and a.parameters]
    score = shown[0].score
    say, label = quantity(shown[0].task, score).say, score_label(shown[0].task, score)
    series: list[Series] = []
    bounds = sorted({(a.parameters or 0, bound) for a in shown for bound in _bounds(a, score)})
    if bounds:
        hint = [f"{short(size)} parameters: at most {say(bound)} {label}" for size, bound in bounds]
        sizes, limits = zip(*bounds, strict=True)
        series.append(level(BOUND, sizes, limits, hint, "dash", 0))
    # Both axes logarithmic: there, the same bits among more parameters are a straight line. They show all runs; an
    # interval over two runs can be far longer and then leaves the chart.
    drawn = [value for a in shown if a.best and a.best.score for value in a.best.score.values]
    y: dict[str, Any] = {"share": True}
    if score and not is_slice(score):
        y = _extent(drawn, [bound for _, bound in bounds], True)
    floor = 10 ** (y["range"][0] - 1) if y.get("log") else -math.inf
    for family in dict.fromkeys(a.family for a in shown):
        members = sorted((a for a in shown if a.family == family), key=lambda a: a.parameters or 0)
        points = [(a, a.best, a.best.score) for a in members if a.best and a.best.score]
        series.append({
            "panel": 0, "kind": "bold", "name": family, "look": family,
            "x": [a.parameters for a, _, _ in points], "y": [s.mean for _, _, s in points],
            **whiskers([s for _, _, s in points], floor),
            "hover": [f"{a.arch}\n{_about(s, say)}\nlearning rate {best.lr:g}" for a, best, s in points],
        })  # fmt: skip
    x = {"title": "parameters", "log": True, "format": "~s"}
    return {"height": 280, "panels": [{"title": "", "x": x, "y": {"title": label, **y}}], "series": series}


def loss_curves(archs: Sequence[Architecture]) -> Chart:
    """Training loss of every run at the best rates."""
    series = []
    for a in archs:
        for run in a.best.runs if a.best else ():
            rows = run.train[:: max(1, math.ceil(len(run.train) / MAX_TRAIN_POINTS))]
            series.append({
                "panel": 0, "kind": "line", "name": a.arch, "look": a.arch, "run": run.name, "hover": run.name,
                "tip": "step %{x:,}: loss %{y:.4g}", "x": [row.step for row in rows],
                "y": [row.loss if math.isfinite(row.loss) else None for row in rows],
            })  # fmt: skip
    x, y = {"title": STEPS, "format": ",d"}, {"title": "training loss"}
    return {"height": 280, "panels": [{"title": "", "x": x, "y": y}], "series": series}


def steps_axis(last: float, title: str = STEPS, *, linked: bool = True) -> dict[str, Any]:
    """From zero to `last`. linked: all panels zoom together."""
    return {"title": title, "range": [-0.03 * last, 1.04 * last], "linked": linked}


def level(
    name: str, x: Sequence[float], y: Sequence[float], hint: str | Sequence[str], dash: str, panel: int
) -> Series:
    """A thin line to compare with."""
    return {"panel": panel, "kind": "level", "name": name, "dash": dash, "x": list(x), "y": list(y), "hover": hint}


def whiskers(spreads: Sequence[Spread | None], floor: float = -math.inf) -> dict[str, Any]:
    """The ends of intervals, None where there is none. `floor`: no whisker goes below, as a logarithmic axis has no
    place for zero."""
    return {"low": [max(s.low, floor) if s and s.low < s.high else None for s in spreads],
            "high": [s.high if s and s.low < s.high else None for s in spreads]}  # fmt: skip


def _curves(a: Architecture, key: str, title: str) -> Iterator[Series]:
    """Thin lines for single runs, then the bold one."""
    runs = [run for run in (a.best.runs if a.best else ()) if any(row.value(key) is not None for row in run.evals)]
    for run in runs:
        rows = _rows(run, key)
        yield {
            "kind": "thin" if len(runs) > 1 else "bold", "name": a.arch, "look": a.arch, "run": run.name,
            "x": [row.step for row, _ in rows], "y": [value for _, value in rows], "hover": _hover(run, key, a, title),
        }  # fmt: skip
    if len(runs) > 1:
        steps, means, hover = _mean(runs, key, a, title)
        yield {"kind": "bold", "name": a.arch, "look": a.arch, "run": "mean", "x": steps, "y": means, "hover": hover}


def _rows(run: Run, key: str) -> list[tuple[Evaluation, float]]:
    return [(row, value) for row in run.evals if (value := row.value(key)) is not None]


def _hover(run: Run, key: str, a: Architecture, title: str) -> list[str]:
    texts = []
    for row, value in _rows(run, key):
        text = quantity(a.task, key).say(value)
        if count := row.slices.get(key):
            low, high = map(percent, wilson(count))
            text += f" ({count.correct:,} of {count.total:,}; 95% interval {low} to {high})"
        texts.append(f"{a.arch}, {title}\nstep {row.step:,}: {text}\n"
                     f"seed {run.seed}, learning rate {run.lr:g}\n{run.name}")  # fmt: skip
    return texts


def _mean(runs: Sequence[Run], key: str, a: Architecture, title: str) -> tuple[list[int], list[float], list[str]]:
    """The mean at steps at which every run was evaluated: a mean over changing runs has jumps that no run has."""
    by_run = [(run.seed, {row.step: value for row, value in _rows(run, key)}) for run in runs]
    steps = sorted(set.intersection(*(set(values) for _, values in by_run)))
    seeds = [by_seed((seed, values[step]) for seed, values in by_run) for step in steps]
    say = quantity(a.task, key).say
    means = [statistics.mean(values.values()) for values in seeds]
    hover = [f"{a.arch}, {title}\nstep {step:,}: {say(mean)}\n"
             f"mean of {count_of(len(values), 'run')}: {span(min(values.values()), max(values.values()), say)}\n"
             f"learning rate {runs[0].lr:g}"
             for step, mean, values in zip(steps, means, seeds, strict=True)]  # fmt: skip
    return steps, means, hover


def _about(spread: Spread, say: Callable[[float], str]) -> str:
    return f"{say(spread.mean)}\n{hint_of(spread, say)}".replace("; ", "\n")


def _bounds(a: Architecture, key: str) -> list[float]:
    """The bound of the measure for this architecture, if there is one."""
    bounds = [at_most(run, key) for run in (a.best.runs if a.best and not is_slice(key) else ())]
    return [bound for bound in bounds[:1] if bound is not None and bound > 0]


def _extent(values: Sequence[float], bounds: Sequence[float], log: bool) -> dict[str, Any]:
    """The range of a measure's axis. A bound far above everything is left outside: it would flatten the curves."""
    top = max(values, default=0)
    top = max([top, *(bound for bound in bounds if bound <= 3 * top)])
    if log and min(values, default=0) > 0:
        low, high = math.log10(min(values)), math.log10(top)
        room = 0.06 * max(high - low, 0.5)
        return {"log": True, "range": [low - room, high + room]}
    return {"range": [min(0.0, 1.06 * min(values, default=0)), 1.1 * top or 1]}
