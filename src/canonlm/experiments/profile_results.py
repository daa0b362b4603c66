"""The numbers of a profile: how much faster each architecture learns than the first, how much better it is in the end,
how surely, at what cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Literal

from canonlm.experiments import grid
from canonlm.experiments.outcomes import accuracy, evaluated_every, first_step, score
from canonlm.experiments.profile import AGAIN, SCALE, label_of, runs_of
from canonlm.experiments.schema import Experiment, Panel, Setting
from canonlm.runs.groups import write_changes
from canonlm.runs.load import Run, tokens_of
from canonlm.runs.rows import primary, slice_key
from canonlm.runs.seed_statistics import LEVEL, Comparison, Spread, min_seeds, seeds_for, visible_gap
from canonlm.runs.speed import Speed, speed_factor
from canonlm.runs.summary import Rate, compared, median_speed, rate_of
from canonlm.runs.task_info import TaskInfo

HALF, SOLVED, ALL = 0.5, 0.9, 0.99
THRESHOLDS = (HALF, SOLVED, ALL)
"""Accuracies to which steps are counted. A run that ends with at least SOLVED counts as one that solves the task."""
CHANCE_MARGIN = 0.02
"""A score at most this far above that of guessing counts as chance."""
USEFUL = 0.1
"""The difference for which a number of seeds is planned: ten points."""

Standing = Literal["differ", "one at chance", "both at chance", "both saturated"]


@dataclass(frozen=True)
class Arm:
    """An architecture on a task. rate: its finished fresh runs at the chosen learning rate; None until one is chosen.
    tuning: the scores of the tuning runs, by rate. failed: how many runs have failed for good. waiting: whether others
    are still to come. flops: forward and backward, per token. state_bytes: of one window; None if not known.
    adjusted: what `--match` changed."""

    arch: str
    rate: Rate | None
    tuning: Mapping[float, tuple[float, ...]]
    at_edge: bool
    failed: int
    waiting: bool
    parameters: int
    flops: float
    state_bytes: int | None = None
    adjusted: str = ""

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

    @property
    def trained(self) -> float | None:
        """The minutes of all steps that a run took, the mean over the runs, at the median speed."""
        return self.minutes * mean(run.final.step for run in self.runs) if self.minutes else None

    @property
    def sensitivity(self) -> float | None:
        """How much is lost by the rate next to the best one, on the side where more is lost, in tuning runs."""
        if self.rate is None or self.rate.lr not in self.tuning or len(self.tuning) < 2:
            return None
        rates = sorted(self.tuning)
        place = rates.index(self.rate.lr)
        beside = [rates[other] for other in (place - 1, place + 1) if 0 <= other < len(rates)]
        return mean(self.tuning[self.rate.lr]) - min(mean(self.tuning[rate]) for rate in beside)

    def solved_at(self, threshold: float, slices: Sequence[str]) -> list[int | None]:
        """For each run: the first evaluated step with that accuracy, or None."""
        return [first_step(run, slices, threshold) for run in self.runs]

    def solving(self, slices: Sequence[str]) -> list[float]:
        """The scores of the runs that end with at least SOLVED."""
        return [end for run in self.runs if (end := accuracy(run.final, slices)) >= SOLVED]

    def hardest(self, slices: Sequence[str]) -> str | None:
        """The last slice, in the order of difficulty, up to which all have a mean of at least SOLVED; "" if none."""
        if not self.rate or not self.runs:
            return None
        last = ""
        for key in slices:
            if mean(self.rate.values(key)) < SOLVED:
                break
            last = key
        return last

    def score_within(self, steps: float, slices: Sequence[str]) -> float | None:
        """The mean score at the last evaluation of each run within that many steps; None before the first one."""
        rows = [[row for row in run.evals if row.step <= steps] for run in self.runs]
        return mean(accuracy(each[-1], slices) for each in rows) if rows and all(rows) else None


@dataclass(frozen=True)
class Versus:
    """An architecture against the first one. end: their final scores; undecided until all planned seeds are there, and
    if they are fewer than verdicts on the page need. speeds: how many times faster it reaches each of
    `Profile.shares`; None where too few runs do. standing: what a difference of the final scores means."""

    end: Comparison
    speeds: Mapping[float, Speed | None]
    standing: Standing


@dataclass(frozen=True)
class TaskProfile:
    """size: of the models, where the profile has several. chance: what guessing scores. comparisons: of each
    architecture but the first with the first; None while either has no run. itself: the first one with other seeds
    against itself, which shows how much is noise; None if these seeds are not trained. visible, needed: the difference
    that the planned seeds would show if further runs are like the tuning runs (infinite if they are fewer than a
    verdict needs), and the number of seeds for one of USEFUL (None: more than 1,000), the larger one of all pairs; both
    None before tuning and with `until`."""

    task: TaskInfo
    name: str
    size: str | None
    slices: tuple[str, ...]
    chance: float
    steps: int
    arms: tuple[Arm, ...]
    comparisons: tuple[Versus | None, ...]
    itself: Versus | None
    visible: float | None
    needed: int | None

    @property
    def label(self) -> str:
        return self.name if self.size is None else f"{self.name} ({self.size})"


@dataclass(frozen=True)
class Profile:
    """seeds: of each architecture, as planned. needed: how many a verdict takes. done, total: numbers of runs."""

    title: str
    archs: tuple[str, ...]
    tasks: tuple[TaskProfile, ...]
    seeds: int
    needed: int
    quick: bool
    matched: str  # what is equal by `--match`; "" without it
    until: float | None
    done: int
    total: int

    @property
    def share(self) -> float:
        """The share of right answers whose speed counts first."""
        return self.until or HALF

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of right answers to which steps are counted."""
        return shares_until(self.until)


def profiled(experiment: Experiment, outcomes: grid.Outcomes) -> Profile:
    """The profile of an experiment of `canonlm.experiments.profile`. outcomes: finished runs by name, None for one that
    failed."""
    panels = [panel for panel in experiment.panels(SCALE) if not panel.settings[0].endswith(AGAIN)]
    archs = panels[0].arms
    pairs = len(panels) * (len(archs) - 1)
    runs = runs_of(experiment, outcomes)
    settings = experiment.settings.values()
    return Profile(
        experiment.title,
        tuple(archs),
        tuple(_task(experiment, panel, archs, outcomes, pairs) for panel in panels),
        max(_seeds(setting) for setting in settings),
        min_seeds(pairs),
        all(setting.choose_on == "test" for setting in settings),
        experiment.match_by if experiment.match else "",
        experiment.settings[panels[0].settings[0]].until,
        sum(run.name in outcomes for run in runs),
        len(runs),
    )


def _seeds(setting: Setting) -> int:
    return setting.tuning_seeds if setting.choose_on == "test" else max(setting.looks)


def _task(
    experiment: Experiment, panel: Panel, archs: Sequence[str], outcomes: grid.Outcomes, pairs: int
) -> TaskProfile:
    [name], named, size = panel.settings, panel.arms, (*panel.sizes, None)[0]
    setting = experiment.settings[name]
    config = grid.tuning_runs(experiment, grid.Point(name, named[0], None, size))[0].config
    task = config.built_task
    assert task is not None
    slices = tuple(setting.slices or primary(slice_key(where) for where in task.slices()))
    chances = [task.chance(where) for where in task.slices() if slice_key(where) in slices]
    chance = sum(chances) / len(chances)
    first, *others = (
        _arm(experiment, grid.Point(name, arch, None, size), label, outcomes)
        for arch, label in zip(named, archs, strict=True)
    )
    itself = None
    if name + AGAIN in experiment.settings:
        again = _arm(experiment, grid.Point(name + AGAIN, named[0], None, size), archs[0], outcomes)
        itself = _versus(again, first, slices, chance, pairs, setting)
    visible, needed = None, None
    if setting.until is None:  # else final scores say nothing
        visible, needed = _planned(first, others, _seeds(setting), max(1, pairs))
    return TaskProfile(
        TaskInfo(setting.task),
        label_of(name),
        size,
        slices,
        chance,
        config.train.steps,
        (first, *others),
        tuple(_versus(arm, first, slices, chance, pairs, setting) for arm in others),
        itself,
        visible,
        needed,
    )


def shares_until(until: float | None) -> tuple[float, ...]:
    """THRESHOLDS; of runs that end with a share right, those below it, and it: such a run might have had more right in
    later steps, so nothing is known of higher ones."""
    return THRESHOLDS if until is None else (*(share for share in THRESHOLDS if share < until), until)


def _versus(arm: Arm, first: Arm, slices: Sequence[str], chance: float, pairs: int, setting: Setting) -> Versus | None:
    if not (arm.rate and first.rate and arm.runs and first.runs and arm.score and first.score):
        return None
    runs = *arm.runs, *first.runs
    last, every = max(run.evals[-1].step for run in runs), max(map(evaluated_every, runs))
    speeds = {
        share: speed_factor(
            arm.solved_at(share, slices), first.solved_at(share, slices), last, LEVEL / pairs, every=every
        )
        for share in shares_until(setting.until)
    }
    means = arm.score.mean, first.score.mean
    guessing = sum(each <= chance + CHANCE_MARGIN for each in means)
    standing: Standing = ("differ", "one at chance", "both at chance")[guessing]
    if min(means) >= ALL:
        standing = "both saturated"
    end = compared(arm.rate, first.rate, slices, pairs=pairs)
    if end.seeds < max(_seeds(setting), min_seeds(pairs)):  # runs that failed leave a selection
        end = replace(end, state="undecided", slices={})
    return Versus(end, speeds, standing)


def _planned(first: Arm, others: Sequence[Arm], seeds: int, pairs: int) -> tuple[float | None, int | None]:
    tuned = [arm.tuning.get(arm.rate.lr) if arm.rate else None for arm in (first, *others)]
    if not others or not all(tuned):
        return None, None
    reference, *rest = (list(values or ()) for values in tuned)
    level, enough = LEVEL / pairs, seeds >= min_seeds(pairs)
    visible = max(visible_gap(values, reference, seeds, level) if enough else math.inf for values in rest)
    needed = [seeds_for(values, reference, USEFUL, level) for values in rest]
    return visible, None if None in needed else max(each for each in needed if each is not None)


def _arm(experiment: Experiment, point: grid.Point, label: str, outcomes: grid.Outcomes) -> Arm:
    from canonlm.train.build import build_model  # imports torch, which pages do not need
    from canonlm.train.flops import flops_per_token

    setting = experiment.settings[point.setting]
    rate = grid.tuned(experiment, point, outcomes)
    planned = grid.reported(experiment, point, outcomes, _seeds(setting))
    tuning = grid.tuning_runs(experiment, point, outcomes)
    tried = {run.name for run in (*tuning, *planned)}
    done = [run for each in planned if (run := outcomes.get(each.name))]
    scores: dict[float, tuple[float, ...]] = {}
    for each in tuning:
        if setting.choose_on != "test" and (run := outcomes.get(each.name)):
            scores[run.lr] = (*scores.get(run.lr, ()), score(run, setting, each.config.train.steps))
    model = build_model(tuning[0].config, "meta")
    state = model.state(tuning[0].config.data.seq_len)
    key, *others = setting.slices or [""]
    assert not others, "the score of a profile is that of one slice, or of all of the primary scale"
    return Arm(
        label,
        None if rate is None else rate_of(label, rate, done, key),
        scores,
        grid.at_edge(experiment, point, rate, outcomes),
        sum(name in outcomes and outcomes[name] is None for name in tried),
        not tried <= outcomes.keys(),
        model.num_parameters,
        flops_per_token(model, tuning[0].config.data.seq_len),
        None if state is None else state.total,
        write_changes(tuning[0].config.model.matched),
    )
