"""The page of a profile: the answer first, then what it rests on."""

from collections.abc import Callable, Mapping
from typing import Any

from canonlm.experiments.profile_results import SOLVED, Arm, Profile, TaskProfile
from canonlm.report.blocks import Block, Cell, caveat, cell, chart, fold, page, spread_cell, table
from canonlm.report.format import count_of, percent, quantity, sentence
from canonlm.report.profile import caveats, headlines, verdicts
from canonlm.report.profile_charts import curves, scores, solved
from canonlm.report.theme import looks
from canonlm.runs.identity import short

INTERVALS = "Intervals: 95 %, of the mean over seeds, for three seeds or more"
SCORES = f"Score after training, by task. {INTERVALS}. Pale dots: single seeds. The dotted line: what guessing scores."
NUMBERS = f"{INTERVALS}. Differences are in points. Each interval stands alone; verdicts account for their number."
SOLVING = (
    "Share of seeds with half, and 99 %, of the answers right at any evaluation so far, by step. A seed that never got "
    "there is censored: its line ends with a marker below 100 %, which says nothing about later steps."
)
BY_STEP = "Score during training, against steps. Thin lines: single seeds. Bold lines: their mean."
BY_TIME = "The same against minutes of training, at the median speed of the architecture's runs, without evaluations."


def html(profile: Profile, command: str) -> str:
    """One self-contained page. command: the one that made it."""
    answer, *unsure = headlines(profile)
    limits = [*unsure, *caveats(profile)]
    blocks: list[Block] = [
        {"answer": answer},
        _numbers(profile),
        chart("profile", SCORES, scores(profile)),
        *caveat(limits),
        *fold("Task by task", [{"list": verdicts(profile)}]),
        *fold("What else limits this comparison", [{"list": limits[1:]}]),
        *fold("When a task is solved", [chart("solved", SOLVING, solved(profile)), _solved(profile)]),
        *fold("Scores during training", [chart("steps", BY_STEP, curves(profile, by_time=False)),
                                        chart("time", BY_TIME, curves(profile, by_time=True))]),
        *fold("What it costs", _costs(profile)),
        *fold("Every reported run", [_runs(profile)]),
        *fold("What each task asks, and how to read the numbers", [{"list": _about(profile)}, {"text": NUMBERS}]),
        *fold("Run it again", [{"code": command}]),
    ]  # fmt: skip
    return page(profile.title, _facts(profile), blocks, looks(profile.archs))


def _facts(profile: Profile) -> list[str]:
    return [
        f"{profile.done} of {count_of(profile.total, 'run')} done",
        count_of(len(profile.archs), "architecture"),
        count_of(len(profile.tasks), "task"),
        f"{count_of(profile.seeds, 'seed')} each",
        *(["quick"] if profile.quick else []),
        *([f"parameters matched to {profile.archs[0]}"] if profile.matched else []),
    ]


def _about(profile: Profile) -> list[str]:
    items = []
    for task in profile.tasks:
        kinds = [quantity(task.task, key).label for key in task.slices]
        over = f", averaged over {', '.join(kinds)}" if len(kinds) > 1 else f" ({kinds[0]})"
        items.append(f"{task.label}: {task.task.score.share}{over}. {task.task.words.about}")
    return items


def _rows(profile: Profile, cells: Callable[[TaskProfile, Arm], list[Cell]]) -> list[list[Cell]]:
    return [
        [task.label if place == 0 else "", arm.arch, *cells(task, arm)]
        for task in profile.tasks
        for place, arm in enumerate(task.arms)
    ]


def _solved(profile: Profile) -> Block:
    def cells(task: TaskProfile, arm: Arm) -> list[Cell]:
        columns: list[Cell] = []
        for threshold in SOLVED:
            steps = arm.solved_at(threshold, task.slices)
            passed = sorted(step for step in steps if step is not None)
            text = ", ".join(f"{step:,}" for step in passed) or "–"
            columns.append(cell(text, f"{len(passed)} of {count_of(len(steps), 'seed')}" if steps else ""))
        return [*columns, f"{task.steps:,}"]

    head = ["task", "architecture", "steps to 50 %", "steps to 99 %", "all steps"]
    return table(head, _rows(profile, cells), kind="models")


def _costs(profile: Profile) -> list[Block]:
    def cells(task: TaskProfile, arm: Arm) -> list[Cell]:
        memory = "–" if arm.memory_gb is None else f"{arm.memory_gb:.2g} GB"
        minutes = "–" if arm.minutes is None else f"{arm.minutes * task.steps:.1f}"
        first = task.arms[0]
        ratio = ""
        if arm is not first and arm.tokens_per_s and first.tokens_per_s:
            ratio = f"{arm.tokens_per_s / first.tokens_per_s:.2f} of {first.arch}"
        return [short(arm.parameters), short(arm.flops), cell(short(arm.tokens_per_s), ratio), memory, minutes]

    head = ["task", "architecture", "parameters", "FLOPs per token", "tokens/s", "memory", "minutes of training"]
    note = "FLOPs: forward and backward. Memory: the peak of the process; on a CPU, including torch itself."
    return [table(head, _rows(profile, cells), kind="models"), {"note": note}]


def _numbers(profile: Profile) -> Block:
    def cells(task: TaskProfile, arm: Arm) -> list[Cell]:
        first = task.arms[0]
        result = task.comparisons[task.arms.index(arm) - 1] if arm is not first else None
        gap: Cell = "–"
        if result is not None:
            interval = f"{100 * result.low:+.1f} to {100 * result.high:+.1f}" if result.seeds > 2 else ""
            gap = cell(f"{100 * result.gap:+.1f}".replace("-", "−"), interval.replace("-", "−"))
        rate = "–" if arm.rate is None else f"{arm.rate.lr:g}"
        score = spread_cell(arm.score, quantity(task.task, ""), arm.score.runs if arm.score else 0)
        return [score, gap, str(len(arm.runs)), cell(rate, "at the edge" if arm.at_edge else ""),
                percent(task.chance)]  # fmt: skip

    head = ["task", "architecture", "score", f"against {profile.archs[0]}", "seeds", "learning rate", "chance"]
    best = [arm.score and arm.score.mean == _best(task) for task in profile.tasks for arm in task.arms]
    marks = ["best" if each else "" for each in best]
    return table(head, _rows(profile, cells), marks, kind="models")


def _best(task: TaskProfile) -> float | None:
    """The highest score; None if no two scores differ."""
    means = {arm.score.mean for arm in task.arms if arm.score}
    return max(means) if len(means) > 1 else None


def _runs(profile: Profile) -> Block:
    rows: list[list[Cell]] = [
        [run.name, f"{run.evals[-1].step:,}", _slices(task, run.final.slices)]
        for task in profile.tasks
        for arm in task.arms
        for run in arm.runs
    ]
    return table(["run", "steps", "right answers, by kind of question"], rows, kind="words")


def _slices(task: TaskProfile, slices: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{sentence(quantity(task.task, key).label)} {count.correct:,} of {count.total:,}"
        for key, count in slices.items()
    )
