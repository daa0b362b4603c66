"""The numbers of a profile: scores, comparisons with the first architecture, steps until tasks are solved, costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from canonlm.experiments import grid
from canonlm.experiments.outcomes import first_step
from canonlm.experiments.profile import SCALE, runs_of
from canonlm.experiments.schema import Experiment, Setting
from canonlm.runs.load import Run, tokens_of
from canonlm.runs.rows import primary, slice_key
from canonlm.runs.seed_statistics import Comparison, Spread, seeds_needed
from canonlm.runs.summary import Rate, compared, median_speed, rate_of
from canonlm.runs.task_info import TaskInfo

SOLVED = (0.5, 0.99)
"""Accuracies at which a task counts as half solved and as solved."""


@dataclass(frozen=True)
class Arm:
    """An architecture on a task. rate: its finished fresh runs at the chosen learning rate; None until one is chosen.
    failed: how many runs have failed for good. waiting: whether others are still to come. flops: forward and backward,
    per token."""

    arch: str
    rate: Rate | None
    at_edge: bool
    failed: int
    waiting: bool
    parameters: int
    flops: float

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.rate.runs if self.rate else ()

    @property
    def score(self) -> Spread | None:
        return self.rate.score if self.rate else None

    @property
    def tokens_per_s(self) -> float | None:
        """The median over the runs."""
        return median_speed(self.runs)

    @property
    def memory_gb(self) -> float | None:
        """The peak of the process."""
        rows = [row.memory_gb for run in self.runs for row in run.train if row.memory_gb is not None]
        return max(rows, default=None)

    @property
    def minutes(self) -> float | None:
        """Per step, at the median speed."""
        speed, tokens = self.tokens_per_s, tokens_of(self.runs[0].config, 1) if self.runs else None
        return tokens / speed / 60 if tokens and speed else None

    def solved_at(self, threshold: float, slices: Sequence[str]) -> list[int | None]:
        """For each run: the first evaluated step with that accuracy, or None."""
        return [first_step(run, slices, threshold) for run in self.runs]


@dataclass(frozen=True)
class TaskProfile:
    """chance: what guessing scores. comparisons: of each architecture but the first with the first; None while either
    has no run."""

    task: TaskInfo
    label: str
    slices: tuple[str, ...]
    chance: float
    steps: int
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


def profiled(experiment: Experiment, outcomes: grid.Outcomes) -> Profile:
    """The profile of an experiment of `canonlm.experiments.profile`. outcomes: finished runs by name, None for one that
    failed."""
    panels = experiment.panels(SCALE)
    archs = panels[0].arms
    pairs = len(panels) * (len(archs) - 1)
    runs = runs_of(experiment, outcomes)
    settings = experiment.settings.values()
    return Profile(
        experiment.title,
        tuple(archs),
        tuple(_task(experiment, panel.settings[0], panel.arms, archs, outcomes, pairs) for panel in panels),
        max(_seeds(setting) for setting in settings),
        seeds_needed(pairs),
        all(setting.choose_on == "test" for setting in settings),
        experiment.match is not None,
        sum(run.name in outcomes for run in runs),
        len(runs),
    )


def _seeds(setting: Setting) -> int:
    return setting.tuning_seeds if setting.choose_on == "test" else max(setting.looks)


def _task(
    experiment: Experiment,
    name: str,
    named: Sequence[str],
    archs: Sequence[str],
    outcomes: grid.Outcomes,
    pairs: int,
) -> TaskProfile:
    setting = experiment.settings[name]
    config = grid.tuning_runs(experiment, grid.Point(name, named[0], None, None))[0].config
    task = config.built_task
    assert task is not None
    slices = tuple(setting.slices or primary(slice_key(where) for where in task.slices()))
    chances = [task.chance(where) for where in task.slices() if slice_key(where) in slices]
    arms = tuple(
        _arm(experiment, grid.Point(name, arch, None, None), label, outcomes)
        for arch, label in zip(named, archs, strict=True)
    )
    first = arms[0].rate
    comparisons = tuple(
        compared(arm.rate, first, slices, pairs=pairs, two_state=setting.two_state)
        if arm.rate and first and arm.runs and first.runs else None
        for arm in arms[1:]
    )  # fmt: skip
    chance = sum(chances) / len(chances)
    label = setting.task[:1].upper() + setting.task[1:]
    return TaskProfile(TaskInfo(setting.task), label, slices, chance, config.train.steps, arms, comparisons)


def _arm(experiment: Experiment, point: grid.Point, label: str, outcomes: grid.Outcomes) -> Arm:
    from canonlm.train.build import build_model  # imports torch, which pages do not need
    from canonlm.train.flops import flops_per_token

    setting = experiment.settings[point.setting]
    rate = grid.tuned(experiment, point, outcomes)
    planned = grid.reported(experiment, point, outcomes, _seeds(setting))
    tuning = grid.tuning_runs(experiment, point, outcomes)
    tried = {run.name for run in (*tuning, *planned)}
    done = [run for each in planned if (run := outcomes.get(each.name))]
    model = build_model(tuning[0].config, "meta")
    score, *others = setting.slices or [""]
    assert not others, "the score of a profile is that of one slice, or of all of the primary scale"
    return Arm(
        label,
        None if rate is None else rate_of(label, rate, done, score, setting.two_state),
        grid.at_edge(experiment, point, rate, outcomes),
        sum(name in outcomes and outcomes[name] is None for name in tried),
        not tried <= outcomes.keys(),
        model.num_parameters,
        flops_per_token(model, tuning[0].config.data.seq_len),
    )
