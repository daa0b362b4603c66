"""The charts of a profile, as data that `web/chart.js` draws."""

from collections.abc import Iterator
from statistics import mean
from typing import Any

from canonlm.experiments.outcomes import accuracy
from canonlm.experiments.profile_results import Arm, Profile, TaskProfile
from canonlm.report.charts import GUESS, Chart, Series, level, series_of, steps_axis
from canonlm.report.format import count_of, hint_of, number, percent

ROW, GAP = 18, 20  # pixels per architecture, and between tasks


def scores(profile: Profile) -> Chart:
    """A row of dots for each task: mean and interval, single seeds pale, the score of guessing as a short line."""
    archs = profile.archs
    band = ROW * len(archs) + GAP
    middles = [-band * place for place in range(len(profile.tasks))]
    series: list[Series] = []
    for place, arch in enumerate(archs):
        offset = ROW * ((len(archs) - 1) / 2 - place)
        shown = [
            (middle + offset, task.arms[place].score, task.label)
            for middle, task in zip(middles, profile.tasks, strict=True)
        ]
        done = [(y, score, label) for y, score, label in shown if score]
        seeds = [(y, value, label) for y, score, label in done if score.runs > 1 for value in score.values]
        pale = [f"{arch}, {label}, one seed: {percent(value)}" for _, value, label in seeds]
        hover = [f"{arch}, {label}\n{percent(score.mean)}\n{hint_of(score, percent)}" for _, score, label in done]
        ends = {"low": [score.low for _, score, _ in done], "high": [score.high for _, score, _ in done]}
        single, means = [(value, y) for y, value, _ in seeds], [(score.mean, y) for y, score, _ in done]
        series.append(series_of("pale", arch, single, across=True, unnamed=True, hover=pale))
        series.append(series_of("dots", arch, means, across=True, hover=hover, **ends))
    half = ROW * len(archs) / 2 + 3
    chances = [(middle, task.chance) for middle, task in zip(middles, profile.tasks, strict=True)]
    x = [value for _, chance in chances for value in (chance, chance, None)]
    y = [value for middle, _ in chances for value in (middle - half, middle + half, None)]
    hint = [text for _, chance in chances for text in [f"guessing scores {percent(chance)}"] * 3]
    series.append({"panel": 0, "kind": "level", "name": GUESS, "dash": "dot", "x": x, "y": y, "hover": hint})
    ticks = [(middle, f"{task.label}  ") for middle, task in zip(middles, profile.tasks, strict=True)]
    rows = {"ticks": ticks, "even": True, "range": [middles[-1] - band / 2, band / 2]}
    panel = {"title": "", "x": {"share": True}, "y": rows}
    return {"height": band * len(profile.tasks), "panels": [panel], "series": series}


def solved(profile: Profile) -> Chart:
    """For each task a panel for each of `profile.shares`: how many of the seeds have got as much right, by step."""
    panels: list[dict[str, Any]] = []
    series: list[Series] = []
    for task in profile.tasks:
        for threshold in profile.shares:
            for arm in task.arms:
                if arm.runs:
                    series.append(_survival(task, arm, threshold) | {"panel": len(panels)})
            title = f"{task.label}, {percent(threshold)}".replace(".0%", "%")
            panels.append({"title": title, "x": steps_axis(task.steps, linked=_equal(profile)), "y": {"share": True}})
    return {"columns": len(profile.shares), "panels": panels, "series": series}


def _equal(profile: Profile) -> bool:
    return len({task.steps for task in profile.tasks}) == 1


def _survival(task: TaskProfile, arm: Arm, threshold: float) -> Series:
    """A step up for each seed that reaches the threshold; the others are censored at the end, with a marker."""
    passed = sorted(step for step in arm.solved_at(threshold, task.slices) if step is not None)
    seeds = len(arm.runs)
    last = max(run.evals[-1].step for run in arm.runs)
    missing = seeds - len(passed)
    censored = f"{missing} of {count_of(seeds, 'seed')} not in {last:,} steps: censored" if missing else ""
    hints = ["", *(f"step {step:,}: {place} of {seeds}" for place, step in enumerate(passed, 1)), censored]
    points = [(0, 0.0), *((step, place / seeds) for place, step in enumerate(passed, 1)), (last, len(passed) / seeds)]
    sizes = [0] * (len(points) - 1) + [9 if missing else 0]
    return series_of("steps", arm.arch, points, sizes=sizes, hover=[f"{arm.arch}\n{hint}" for hint in hints])


def curves(profile: Profile, *, by_time: bool) -> Chart:
    """A panel for each task: the score while training, against steps or against minutes. Thin: single seeds."""
    panels, series = [], []
    for panel, task in enumerate(profile.tasks):
        minutes = [(arm.minutes or 0) * run.final.step for arm in task.arms for run in arm.runs]
        last = max(minutes, default=0) or 1.0 if by_time else float(task.steps)
        hint = f"guessing scores {percent(task.chance)}"
        series.append(level(GUESS, [0, last], [task.chance] * 2, hint, "dot", panel))
        for arm in task.arms:
            unit = arm.minutes if by_time else 1
            if arm.runs and unit:
                series += [one | {"panel": panel} for one in _curves(task, arm, unit, by_time)]
        x = steps_axis(last, "minutes", linked=False) if by_time else steps_axis(last, linked=_equal(profile))
        panels.append({"title": task.label, "x": x, "y": {"share": True}})
    return {"columns": 3, "panels": panels, "series": series}


def _curves(task: TaskProfile, arm: Arm, unit: float, by_time: bool) -> Iterator[Series]:
    by_run = [{row.step: accuracy(row, task.slices) for row in run.evals} for run in arm.runs]
    steps = sorted(set.intersection(*map(set, by_run)))  # the same in all runs, unless a stream ends
    for run, values in zip(arm.runs, by_run, strict=True):
        if len(by_run) > 1:
            points = [(step * unit, value) for step, value in values.items()]
            yield series_of("thin", arm.arch, points, run=run.name, hover=f"{arm.arch}\n{run.name}")
    means = [mean(values[step] for values in by_run) for step in steps]
    at = [f"{number(step * unit)} min (step {step:,})" if by_time else f"step {step:,}" for step in steps]
    hover = [f"{arm.arch}\n{t}: {percent(value)}" for t, value in zip(at, means, strict=True)]
    points = [(step * unit, value) for step, value in zip(steps, means, strict=True)]
    yield series_of("bold", arm.arch, points, run="mean", hover=hover)
