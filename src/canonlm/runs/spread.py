"""Numbers of several runs: their mean with its interval, and one number per seed."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canonlm.runs.intervals import t_interval
from canonlm.runs.statistics import mean_interval

MIN_SEEDS = 3
"""The min number of seeds for an interval."""


@dataclass(frozen=True)
class Spread:
    """The mean of `values`, one per run (per seed, where seeds were run more than once), with its 95 % interval.

    The interval comes from the differences between seeds (`canonlm.runs.statistics.mean_interval`). One or two runs
    have no interval; then low and high are the mean.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def runs(self) -> int:
        return len(self.values)

    @property
    def kind(self) -> str:
        """The kind of interval, with the number of runs."""
        over = "one run" if self.runs == 1 else f"{self.runs} runs"
        return f"95% interval over {over}" if self.low < self.high else over


def spread_of(values: Sequence[float], questions: int | None = None, *, two_state: bool = True) -> Spread:
    """The spread of any numbers, one per run. questions: per run, if the numbers are accuracies. two_state: see
    `canonlm.tasks.Score`."""
    mean = statistics.mean(values)
    low, high = mean, mean
    if len(values) >= MIN_SEEDS:
        if questions is None:
            low, high = t_interval(values)
        else:
            low, high = mean_interval(values, questions, two_state=two_state)
    return Spread(mean, low, high, tuple(values))


def by_seed(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """One number per seed, from (seed, value) of runs: the mean, as repeats of a seed do not repeat the experiment."""
    values_by_seed: dict[int, list[float]] = {}
    for seed, value in values:
        values_by_seed.setdefault(seed, []).append(value)
    return {seed: statistics.mean(repeats) for seed, repeats in values_by_seed.items()}
