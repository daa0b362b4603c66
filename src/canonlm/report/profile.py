"""What a profile shows: scores, comparisons with the first architecture, when tasks were solved, what it cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..experiments import grid
from ..experiments.outcomes import Outcome, accuracy
from ..experiments.profile import SCALE, runs_of
from ..experiments.schema import Experiment, Setting
from ..launch.plan import tokens_of
from ..runs.rows import primary, slice_key
from ..runs.statistics import Comparison, compare, seeds_needed
from ..train.build import build_model
from ..train.flops import flops_per_token
from .runs import load_run
from .summary import Spread, spread_of
from .words import count_of, listed, percent, points, sentence

SOLVED = (0.5, 0.99)
"""Accuracies at which a task counts as half solved and as solved."""


@dataclass(frozen=True)
class Speed:
    """What a finished run noted of its machine. memory_gb: of the process, at most."""

    tokens_per_s: float | None
    memory_gb: float | None


@dataclass(frozen=True)
class Arm:
    """An architecture on a task. names, outcomes: of its finished fresh runs, in the order of their seeds. failed: how
    many runs have failed for good. waiting: are others still to come? flops: forward and backward, of one token.
    minutes: of one step, at the median speed."""

    arch: str
    rate: float | None
    at_edge: bool
    names: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    failed: int
    waiting: bool
    score: Spread | None
    parameters: int
    flops: float
    tokens_per_s: float | None
    memory_gb: float | None
    minutes: float | None

    def solved_at(self, threshold: float, slices: Sequence[str]) -> list[int | None]:
        """By run: the first evaluated step with that accuracy; None where there was none."""
        return [
            next((row.step for row in outcome.evals if accuracy(row, slices) >= threshold), None)
            for outcome in self.outcomes
        ]


@dataclass(frozen=True)
class TaskProfile:
    """chance: what guessing scores. comparisons: of each architecture but the first with the first; None while either
    has no run."""

    task: str
    label: str
    slices: tuple[str, ...]
    chance: float
    steps: int
    rates: tuple[float, ...]
    arms: tuple[Arm, ...]
    comparisons: tuple[Comparison | None, ...]


@dataclass(frozen=True)
class Profile:
    """seeds: of each architecture, as planned. needed: how many of them a verdict takes. done: of the runs."""

    title: str
    archs: tuple[str, ...]
    tasks: tuple[TaskProfile, ...]
    seeds: int
    needed: int
    quick: bool
    matched: bool
    done: int
    total: int


def profiled(experiment: Experiment, outcomes: grid.Outcomes, speeds: Mapping[str, Speed]) -> Profile:
    """Of an experiment of `canonlm.experiments.profile`. outcomes: of finished runs by name, None for one that failed;
    speeds: of some of them."""
    panels = experiment.panels(SCALE)
    archs = panels[0].arms
    pairs = len(panels) * (len(archs) - 1)
    runs = runs_of(experiment, outcomes)
    settings = experiment.settings.values()
    return Profile(
        experiment.title,
        tuple(archs),
        tuple(_task(experiment, panel.settings[0], panel.arms, archs, outcomes, speeds, pairs) for panel in panels),
        max(_seeds(setting) for setting in settings),
        seeds_needed(pairs),
        all(setting.choose_on == "test" for setting in settings),
        experiment.match is not None,
        sum(run.name in outcomes for run in runs),
        len(runs),
    )


def speeds_of(out: Path, names: Sequence[str]) -> dict[str, Speed]:
    """Of the finished runs among these, from their folders."""
    found = {}
    for name in names:
        run = load_run(out / "runs" / name)
        memory = [row.memory_gb for row in run.train if row.memory_gb is not None]
        if run.result is not None:
            found[name] = Speed(run.result.tokens_per_s, max(memory, default=None))
    return found


def _seeds(setting: Setting) -> int:
    return setting.tuning_seeds if setting.choose_on == "test" else max(setting.looks)


def _task(
    experiment: Experiment,
    name: str,
    named: Sequence[str],
    archs: Sequence[str],
    outcomes: grid.Outcomes,
    speeds: Mapping[str, Speed],
    pairs: int,
) -> TaskProfile:
    setting = experiment.settings[name]
    config = grid.tuning_runs(experiment, grid.Point(name, named[0], None, None))[0].config
    task = config.built_task
    assert task is not None
    slices = tuple(setting.slices or primary(slice_key(where) for where in task.slices()))
    chances = [task.chance(where) for where in task.slices() if slice_key(where) in slices]
    arms = tuple(
        _arm(experiment, grid.Point(name, arch, None, None), label, slices, outcomes, speeds)
        for arch, label in zip(named, archs, strict=True)
    )
    comparisons = tuple(
        _compared(arm, arms[0], slices, setting, pairs) if arm.outcomes and arms[0].outcomes else None
        for arm in arms[1:]
    )
    rates = grid.rates_of(setting, None)
    chance = sum(chances) / len(chances)
    return TaskProfile(
        setting.task, sentence(setting.task), slices, chance, config.train.steps, rates, arms, comparisons
    )


def _compared(arm: Arm, first: Arm, slices: Sequence[str], setting: Setting, pairs: int) -> Comparison:
    sides = arm.outcomes, first.outcomes
    ours, theirs = ({key: [each.final.slices[key].accuracy for each in side] for key in slices} for side in sides)
    questions = min(each.final.slices[key].total for side in sides for each in side for key in slices)
    return compare(ours, theirs, questions, pairs=pairs, two_state=setting.two_state)


def _arm(
    experiment: Experiment,
    point: grid.Point,
    label: str,
    slices: Sequence[str],
    outcomes: grid.Outcomes,
    speeds: Mapping[str, Speed],
) -> Arm:
    setting = experiment.settings[point.setting]
    rate = grid.tuned(experiment, point, outcomes)
    runs = grid.reported(experiment, point, outcomes, _seeds(setting))
    tried = {run.name for run in (*grid.tuning_runs(experiment, point), *runs)}
    done = {run.name: outcome for run in runs if (outcome := outcomes.get(run.name))}
    config = grid.tuning_runs(experiment, point)[0].config
    model = build_model(config, "meta")
    known = [speeds[name] for name in done if name in speeds]
    tokens_per_s = _median([each.tokens_per_s for each in known])
    return Arm(
        label,
        rate,
        grid.at_edge(experiment, point, rate),
        tuple(done),
        tuple(done.values()),
        sum(name in outcomes and outcomes[name] is None for name in tried),
        not tried <= outcomes.keys(),
        _score(list(done.values()), slices, setting),
        model.num_parameters,
        flops_per_token(model, config.data.seq_len),
        tokens_per_s,
        max((each.memory_gb for each in known if each.memory_gb is not None), default=None),
        tokens_of(config) / config.train.steps / tokens_per_s / 60 if tokens_per_s else None,
    )


def _score(done: Sequence[Outcome], slices: Sequence[str], setting: Setting) -> Spread | None:
    if not done:
        return None
    questions = min(sum(outcome.final.slices[key].total for key in slices) for outcome in done)
    values = [accuracy(outcome.final, slices) for outcome in done]
    return spread_of(values, questions, two_state=setting.two_state)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# -- in words ---------------------------------------------------------------------------------------------------------


def headlines(profile: Profile) -> list[str]:
    """One sentence for each architecture but the first: on which tasks it is better. Then what is not sure."""
    if len(profile.archs) == 1:
        return [f"{profile.archs[0]} alone: nothing is compared."]
    lines = [_headline(profile, place) for place in range(len(profile.archs) - 1)]
    if profile.seeds == 1:
        lines.append("One seed proves nothing: another one may turn each of these around.")
    elif profile.seeds < profile.needed:
        pairs = count_of(len(profile.tasks) * (len(profile.archs) - 1), "comparison")
        lines.append(
            f"Nothing is decided: with {pairs}, a verdict needs {profile.needed} seeds of each architecture, and this "
            f"has {profile.seeds}."
        )
    return lines


def _headline(profile: Profile, place: int) -> str:
    arch, first = profile.archs[place + 1], profile.archs[0]
    compared = [(task.label, task.comparisons[place]) for task in profile.tasks]
    results = [(label, each) for label, each in compared if each is not None]
    if not results:
        return f"{arch} against {first}: no task is done yet."
    missing = f" ({len(results)} of {len(compared)} tasks are done)" if len(results) < len(compared) else ""
    if profile.seeds < profile.needed:
        higher, lower = ([label for label, each in results if sign * each.gap > 0] for sign in (1, -1))
        return f"{arch} against {first}: so far higher on {_names(higher)}, lower on {_names(lower)}{missing}."
    groups: dict[str, list[str]] = {"better on": [], "worse on": [], "no difference shown on": [], "undecided on": []}
    words = {"higher": "better on", "lower": "worse on", "alike": "no difference shown on"}
    for label, each in results:
        groups[words[each.state] if each.seeds >= profile.needed else "undecided on"].append(label)
    told = [f"{words} {_names(labels)}" for words, labels in groups.items() if labels or words != "undecided on"]
    return f"{arch} against {first}: {', '.join(told)}{missing}."


def _names(labels: Sequence[str]) -> str:
    return listed(labels) if labels else "none"


def verdicts(profile: Profile) -> list[str]:
    """A sentence for each task and architecture but the first; of a single architecture, its score; of single seeds, a
    line for each task."""
    if len(profile.archs) == 1:
        return [_alone(task) for task in profile.tasks]
    if profile.seeds == 1:
        return [f"{task.label}: {', '.join(_single(arm) for arm in task.arms)}." for task in profile.tasks]
    return [
        f"{task.label}: {_verdict(profile, task.arms[place + 1], task.arms[0], result)}"
        for place in range(len(profile.archs) - 1)
        for task in profile.tasks
        for result in [task.comparisons[place]]
    ]


def _alone(task: TaskProfile) -> str:
    arm = task.arms[0]
    if arm.score is None:
        return f"{task.label}: {_missing(arm)}."
    interval = f" [{percent(arm.score.low)}, {percent(arm.score.high)}]" if arm.score.low < arm.score.high else ""
    seeds = count_of(arm.score.runs, "seed")
    return f"{task.label}: {percent(arm.score.mean)}{interval}, {seeds}; guessing scores {percent(task.chance)}."


def _single(arm: Arm) -> str:
    return f"{arm.arch} {_missing(arm) if arm.score is None else percent(arm.score.mean)}"


def _missing(*arms: Arm) -> str:
    failed = [arm.arch for arm in arms if arm.failed and not arm.waiting]
    return f"every run of {listed(failed)} failed" if failed else "not trained yet"


def _verdict(profile: Profile, arm: Arm, first: Arm, result: Comparison | None) -> str:
    if result is None or arm.score is None or first.score is None:
        return f"{_missing(*(each for each in (arm, first) if each.score is None))}."
    seeds = f"{count_of(result.seeds, 'seed')} each"
    gap = f"{_plain(abs(result.gap))} points"
    if result.seeds <= 2:
        values = [
            f"{each.arch} {' and '.join(map(percent, each.score.values[:2]))}" for each in (arm, first) if each.score
        ]
        return f"{'; '.join(values)}: undecided."
    better, worse, low, high = arm, first, result.low, result.high
    if result.gap < 0:
        better, worse, low, high = first, arm, -result.high, -result.low
    interval = f"[{_plain(low)}, {_plain(high)}]"
    if result.seeds < profile.needed and gap == "0.0 points":
        return f"{arm.arch} and {first.arch} are level {interval}, {seeds}: undecided."
    if result.seeds < profile.needed:
        return f"{better.arch} is ahead of {worse.arch} by {gap} {interval}, {seeds}: undecided."
    if result.state == "alike":
        return (
            f"no difference shown between {arm.arch} and {first.arch}: {_plain(result.gap)} points "
            f"[{_plain(result.low)}, {_plain(result.high)}], {seeds}."
        )
    if not result.on_average:
        return (
            f"the runs of {better.arch} score higher than those of {worse.arch}, by {gap} {interval}, {seeds}; "
            "that the mean is higher is not shown."
        )
    return f"{better.arch} beats {worse.arch} by {gap} {interval}, {seeds}."


def _plain(difference: float) -> str:
    return points(difference).lstrip("+")


def caveats(profile: Profile) -> list[str]:
    """What a careful reader would hold against the comparison."""
    lines = [
        "These are tiny models, trained for minutes: an order at this size need not hold at another size, or after "
        "more steps.",
    ]
    if profile.quick:
        lines.append("Quick: one rate for all, and a third of the training.")
    else:
        lines.append(
            "Rates were chosen by one tuning seed each, on a validation split; the numbers are of other seeds, on the "
            "test split. Equal seeds share data and questions."
        )
    arms = [(task, arm) for task in profile.tasks for arm in task.arms]
    if edges := [f"{arm.arch} on {task.label} ({arm.rate:g})" for task, arm in arms if arm.at_edge]:
        lines.append(f"Rates at the edge of the three that were tried: {listed(edges)}.")
    if failed := [f"{arm.failed} of {arm.arch} on {task.label}" for task, arm in arms if arm.failed]:
        lines.append(f"Runs that failed and are left out: {listed(failed)}.")
    if profile.seeds >= profile.needed and len(profile.archs) > 1:
        lines.append("More seeds, added after this verdict was read, would make wrong verdicts more frequent.")
    if not profile.matched and len(profile.archs) > 1:
        lines.append(
            "Architectures differ in parameters and in FLOPs, as the costs show; --match parameters evens out."
        )
    lines.append("Speeds were measured while other runs shared the machine.")
    return lines
