"""The next runs of experiments: a pure function of the outcomes of finished runs."""

from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path

from canonlm.experiments.grid import Outcomes, Point, fresh_run, points, tuned, tuning_runs
from canonlm.experiments.schema import Experiment
from canonlm.experiments.verdicts import undecided_at
from canonlm.launch.grid import PlannedRun


def plan(
    experiments: Iterable[Experiment], scale: str, out: Path, outcomes: Outcomes, only: Collection[str] = ()
) -> list[PlannedRun]:
    """All runs that can start or are done, each once: tuning runs, then fresh seeds of points with a chosen rate, one
    seed of all architectures at a time. only: see `grid.points`."""
    runs: dict[str, PlannedRun] = {}
    for experiment in experiments:
        chosen = {point: tuned(experiment, point, outcomes) for point in points(experiment, scale, only)}
        seeds = {point: _seeds_of(experiment, scale, point, outcomes) for point in chosen}
        trained = [run for point in chosen for run in tuning_runs(experiment, point, outcomes)]
        for seed in range(max(seeds.values(), default=0)):
            for point, rate in chosen.items():
                if rate is not None and seed < seeds[point]:
                    trained.append(fresh_run(experiment, point, rate, seed))
        for name, config in trained:
            runs.setdefault(name, PlannedRun(name, out / "runs" / name, config))
    return list(runs.values())


def _seeds_of(experiment: Experiment, scale: str, point: Point, outcomes: Outcomes) -> int:
    """The number of fresh seeds that a point needs: that of the first look, or of the next one if an undecided claim
    compares it."""
    looks = sorted(experiment.settings[point.setting].looks)
    numbers = looks[:1]
    for before, after in pairwise(looks):
        if point in undecided_at(experiment, scale, before, outcomes):
            numbers.append(after)
    return max(numbers, default=0)
