"""The page of a profile: the answer first, then what it rests on."""

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from canonlm.core.user_code import LIBRARIES
from canonlm.experiments.profile_results import HALF, SOLVED, Arm, Profile, TaskProfile, Versus
from canonlm.report.blocks import Block, Cell, caveat, cell, chart, fold, page, spread_cell, table
from canonlm.report.format import count_of, number, percent, points, quantity, sentence
from canonlm.report.profile import NOT_KNOWN, caveats, factor, growth, headlines, noise, planned, verdicts
from canonlm.report.profile_charts import curves, scores, solved
from canonlm.report.theme import looks
from canonlm.runs.identity import short, short_bytes

INTERVALS = "Intervals: 95 %, of the mean over seeds, for three seeds or more"
SCORES = f"Score after training, by task. {INTERVALS}. Pale dots: single seeds. The dotted line: what guessing scores."
NUMBERS = (
    f"{INTERVALS}. Differences are in points. Each interval of a score stands alone; those of differences hold for "
    "all pairs of the page together, and those of speeds do by themselves, at one share of right answers. Half right: "
    f"how many times faster half of them are right. Solved: runs that end with at least {percent(SOLVED)} right. Up "
    "to: the hardest kind of question of which the mean is at least that, as is that of all easier ones. Other seeds: "
    "the first architecture against itself."
)
NUMBERS_UNTIL = (
    "The intervals of speeds hold for all pairs of the page together. Get there: runs with as much right at any "
    "evaluation. Other seeds: the first architecture against itself."
)
MATCHED = (
    "The mean score after as many steps, training FLOPs or seconds as the architecture that ends with the fewest has; "
    "at the last evaluation before that. Equal parameters or states: --match."
)
TUNING = (
    "Chosen by tuning seeds on a validation split. Sensitivity: the points that are lost there at a rate beside the "
    "best one, on the worse side. With --until, a tuning score is the share of right answers at the end plus the share "
    "of the steps that were not needed."
)
SOLVING = (
    "Share of seeds with that much of the answers right at any evaluation so far, by step. A seed that never "
    "got there is censored: its line ends with a marker below 100 %, which says nothing about later steps."
)
BY_STEP = "Score during training, against steps. Thin lines: single seeds. Bold lines: their mean."
BY_TIME = "The same against minutes of training, at the median speed of the architecture's runs, without evaluations."


def html(profile: Profile, command: str) -> str:
    """One self-contained page. command: the one that made it."""
    lines = headlines(profile)
    answers = max(1, len(profile.archs) - 1) + profile.quick
    limits = [*lines[answers:], *caveats(profile)]
    blocks: list[Block] = [
        *({"answer": line} for line in lines[:answers]),
        *({"text": line} for line in growth(profile)),
        _numbers(profile),
        *([] if profile.until else [chart("profile", SCORES, scores(profile))]),
        *caveat(limits),
        *fold("Task by task", [{"list": verdicts(profile)}]),
        *fold("How much is noise, and what these seeds can show",
              [{"list": lines} for lines in (noise(profile), planned(profile)) if lines]),
        *fold("At equal steps, FLOPs and seconds", _matched(profile)),
        *fold("What else limits this comparison", [{"list": limits[1:]}]),
        *fold("When a task is solved", [chart("solved", SOLVING, solved(profile)), _solved(profile)],
              opened=bool(profile.until)),
        *fold("Scores during training", [chart("steps", BY_STEP, curves(profile, by_time=False)),
                                        chart("time", BY_TIME, curves(profile, by_time=True))]),
        *fold("What it costs", _costs(profile)),
        *fold("Learning rates", [_tuning(profile), {"note": TUNING}]),
        *fold("Every reported run", [_runs(profile)]),
        *fold("What each task asks, and how to read the numbers",
              [{"list": _about(profile)}, {"text": NUMBERS_UNTIL if profile.until else NUMBERS}]),
        *fold("Run it again", [{"code": command}]),
    ]  # fmt: skip
    return page(profile.title, _facts(profile), blocks, looks(profile.archs))


def _facts(profile: Profile) -> list[str]:
    return [
        f"{profile.done} of {count_of(profile.total, 'run')} done",
        count_of(len(profile.archs), "architecture"),
        count_of(len({task.name for task in profile.tasks}), "task"),
        *([count_of(sizes, "size")] if (sizes := len({task.size for task in profile.tasks})) > 1 else []),
        f"{count_of(profile.seeds, 'seed')} each",
        *(["quick"] if profile.quick else []),
        *([f"until {percent(profile.until)} are right"] if profile.until else []),
        *([f"{profile.matched.replace(',', ' and ')} matched to {profile.archs[0]}"] if profile.matched else []),
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


def _matched(profile: Profile) -> list[Block]:
    if len(profile.archs) < 2 or profile.until:  # runs that have ended would have had more right later
        return []
    per_step = (lambda arm: 1.0, lambda arm: arm.flops, lambda arm: arm.minutes)

    def cells(task: TaskProfile, arm: Arm) -> list[Cell]:
        columns: list[Cell] = []
        for cost in per_step:
            costs = [cost(each) for each in task.arms]
            mine = cost(arm)
            known = [each for each in costs if each is not None]
            score = None
            if mine is not None and len(known) == len(costs):
                score = arm.score_within(task.steps * min(known) / mine + 1e-9, task.slices)
            columns.append("–" if score is None else percent(score))
        return columns

    head = ["task", "architecture", "equal steps", "equal FLOPs", "equal seconds"]
    return [table(head, _rows(profile, cells), kind="models"), {"note": MATCHED}]


def _tuning(profile: Profile) -> Block:
    say = "{:.2f}".format if profile.until else percent

    def cells(task: TaskProfile, arm: Arm) -> list[Cell]:
        rate = "–" if arm.rate is None else f"{arm.rate.lr:g}"
        lost = "–" if arm.sensitivity is None or profile.until else f"{100 * arm.sensitivity:.1f}"
        tried = ", ".join(f"{lr:g}: {say(mean(scores))}" for lr, scores in sorted(arm.tuning.items())) or "–"
        return [cell(rate, "at the edge" if arm.at_edge else ""), lost, tried]

    return table(["task", "architecture", "learning rate", "sensitivity", "tuning scores"], _rows(profile, cells),
                 kind="models")  # fmt: skip


def _solved(profile: Profile) -> Block:
    def cells(task: TaskProfile, arm: Arm) -> list[Cell]:
        columns: list[Cell] = []
        for threshold in profile.shares:
            steps = arm.solved_at(threshold, task.slices)
            passed = sorted(step for step in steps if step is not None)
            text = ", ".join(f"{step:,}" for step in passed) or "–"
            columns.append(cell(text, f"{len(passed)} of {count_of(len(steps), 'seed')}" if steps else ""))
        versus = task.comparisons[task.arms.index(arm) - 1] if arm is not task.arms[0] else None
        speeds = [versus.speeds[share] if versus else None for share in profile.shares]
        return [*columns, *("–" if speed is None else factor(speed) for speed in speeds), f"{task.steps:,}"]

    shares = [percent(share).replace(".0%", "%").replace("%", " %") for share in profile.shares]
    head = ["task", "architecture", *(f"steps to {share}" for share in shares),
            *(f"times as fast, {share}" for share in shares), "all steps"]  # fmt: skip
    return table(head, _rows(profile, cells), kind="models")


def _costs(profile: Profile) -> list[Block]:
    def cells(task: TaskProfile, arm: Arm) -> list[Cell]:
        memory = "–" if arm.memory_gb is None else f"{number(arm.memory_gb)} GB"
        minutes = "–" if arm.trained is None else f"{arm.trained:.1f}"
        first = task.arms[0]
        ratio = ""
        if arm is not first and arm.tokens_per_s and first.tokens_per_s:
            ratio = f"{arm.tokens_per_s / first.tokens_per_s:.2f} of {first.arch}"
        sizes = cell(short(arm.parameters), arm.adjusted), short_bytes(arm.state_bytes), short(arm.flops)
        return [*sizes, cell(short(arm.tokens_per_s), ratio), memory, minutes]

    head = ["task", "architecture", "parameters", "bytes of state", "FLOPs per token", "tokens/s", "memory",
            "minutes of training"]  # fmt: skip
    note = (
        "Bytes of state: what the model keeps of one window to continue it. FLOPs: forward and backward. Memory: the "
        "peak of the process; on a CPU, including torch itself. Minutes: of the steps that the runs took, on average."
    )
    if any(arm.arch.partition(":")[0] in LIBRARIES for task in profile.tasks for arm in task.arms):
        note += " Of recurrences in models from outside, FLOPs are those of projections and convolutions only."
    return [table(head, _rows(profile, cells), kind="models"), {"note": note}]


def _numbers(profile: Profile) -> Block:
    """The first table: speed, final score, and what share of runs solve the task; with `until`, only speed, and what
    share of runs get there."""
    rows: list[list[Cell]] = []
    marks: list[str] = []
    first, much = profile.archs[0], "half" if profile.share == HALF else percent(profile.share)
    ends = ["get there"] if profile.until else ["score", "solved", "up to"]
    against = [f"{what}, against {first}" for what in (f"{much} right", "points")][: 1 if profile.until else 2]
    head = ["task", "architecture", *against, *ends, "chance"]
    for task in profile.tasks:
        for place, arm in enumerate(task.arms):
            versus = task.comparisons[place - 1] if place else None
            best = not profile.until and arm.score and percent(arm.score.mean) == _best(task)
            rows.append([task.label if place == 0 else "", arm.arch, *_against(versus, profile)[: len(against)],
                         *_ends(task, arm, profile.until), percent(task.chance)])  # fmt: skip
            marks.append("best" if best else "")
        if task.itself is not None:
            columns = _against(task.itself, profile)[: len(against)]
            rows.append(["", f"{first}, other seeds", *columns, *[""] * len(ends), ""])
            marks.append("aside")
    return table(head, rows, marks, kind="models")


def _ends(task: TaskProfile, arm: Arm, until: float | None) -> list[Cell]:
    if until:
        steps = arm.solved_at(until, task.slices)
        return [f"{len(steps) - steps.count(None)} of {len(steps)}" if steps else "–"]
    score = spread_cell(arm.score, quantity(task.task, ""), arm.score.runs if arm.score else 0)
    solving, hardest = arm.solving(task.slices), arm.hardest(task.slices)
    level = f"then {percent(mean(solving))}" if 0 < len(solving) < len(arm.runs) else ""
    solved = cell(f"{len(solving)} of {len(arm.runs)}", level) if arm.runs else "–"
    upto = quantity(task.task, hardest).label if hardest else "–" if hardest is None else "none"
    return [score, solved, upto]


def _against(versus: Versus | None, profile: Profile) -> list[Cell]:
    """Times as fast, and points."""
    if versus is None:
        return ["–", "–"]
    speed, result = versus.speeds[profile.share], versus.end
    gap = cell(points(result.gap), " to ".join(map(points, result.safe)) if result.seeds > 2 else "")
    if versus.standing != "differ":
        gap = cell("–", versus.standing)
    times: Cell = "–"
    if speed is not None:
        number, _, ends = factor(speed).partition(" [")
        times = cell(
            number if number == NOT_KNOWN else f"{number} times",
            f"{ends.rstrip(']').replace(', ', ' to ')}" if ends else "",
        )
    return [times, gap]


def _best(task: TaskProfile) -> str | None:
    """The highest score, as the page shows it; None if no two shown scores differ."""
    means = [arm.score.mean for arm in task.arms if arm.score]
    return percent(max(means)) if len(set(map(percent, means))) > 1 else None


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
