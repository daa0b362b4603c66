"""The numbers of a profile: scores, comparisons with the first architecture, steps until tasks are solved, costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from canonlm.experiments import grid
from canonlm.experiments.outcomes import Outcome, accuracy
from canonlm.experiments.profile import SCALE, runs_of
from canonlm.experiments.schema import Experiment, Setting
from canonlm.launch.plan import tokens_of
from canonlm.runs.folder import Recorded, read_config, recorded
from canonlm.runs.rows import Evaluation, evaluation, primary, slice_key
from canonlm.runs.seed_statistics import Comparison, Spread, compare, seeds_needed, spread_of
from canonlm.runs.task_info import TaskInfo
from canonlm.train.build import build_model
from canonlm.train.flops import flops_per_token

SOLVED = (0.5, 0.99)
"""Accuracies at which a task counts as half solved and as solved."""


@dataclass(frozen=True)
class Speed:
    """Speed and memory of a finished run, as it logged them. memory_gb: the peak of the process."""

    tokens_per_s: float | None
    memory_gb: float | None


@dataclass(frozen=True)
class Arm:
    """An architecture on a task. names, outcomes: of its finished fresh runs, in the order of their seeds. failed: how
    many runs have failed for good. waiting: whether others are still to come. flops: forward and backward, per token.
    minutes: per step, at the median speed."""

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
        """For each run: the first evaluated step with that accuracy, or None."""
        return [outcome.first_step(slices, threshold) for outcome in self.outcomes]


@dataclass(frozen=True)
class TaskProfile:
    """chance: what guessing scores. comparisons: of each architecture but the first with the first; None while either
    has no run."""

    task: TaskInfo
    label: str
    slices: tuple[str, ...]
    chance: float
    steps: int
    rates: tuple[float, ...]
    arms: tuple[Arm, ...]
    comparisons: tuple[Comparison | None, ...]


@dataclass(frozen=True)
class Profile:
    """seeds: of each architecture, as planned. needed: how many a verdict takes. done, total: numbers of runs."""

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
    """The profile of an experiment of `canonlm.experiments.profile`. outcomes: of finished runs by name, None for one
    that failed. speeds: of some of them."""
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
    """Speed and memory of the finished runs among these, by name, from their folders."""
    speeds = {}
    for name in names:
        folder = out / "runs" / name
        run = Recorded[Evaluation](**recorded(folder, read_config(folder), evaluation, []))
        memory = [row.memory_gb for row in run.train if row.memory_gb is not None]
        if run.result is not None:
            speeds[name] = Speed(run.result.tokens_per_s, max(memory, default=None))
    return speeds


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
    label = setting.task[:1].upper() + setting.task[1:]
    return TaskProfile(TaskInfo(setting.task), label, slices, chance, config.train.steps, rates, arms, comparisons)


def _compared(arm: Arm, first: Arm, slices: Sequence[str], setting: Setting, pairs: int) -> Comparison:
    sides = arm.outcomes, first.outcomes
    ours, theirs = ({key: [each.final.answers(key).accuracy for each in side] for key in slices} for side in sides)
    questions = min(each.final.answers(key).total for side in sides for each in side for key in slices)
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
    tried = {run.name for run in (*grid.tuning_runs(experiment, point, outcomes), *runs)}
    done = {run.name: outcome for run in runs if (outcome := outcomes.get(run.name))}
    config = grid.tuning_runs(experiment, point)[0].config
    model = build_model(config, "meta")
    known = [speeds[name] for name in done if name in speeds]
    tokens_per_s = _median([each.tokens_per_s for each in known])
    return Arm(
        label,
        rate,
        grid.at_edge(experiment, point, rate, outcomes),
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
    questions = min(sum(outcome.final.answers(key).total for key in slices) for outcome in done)
    values = [accuracy(outcome.final, slices) for outcome in done]
    return spread_of(values, questions, two_state=setting.two_state)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
