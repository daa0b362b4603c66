"""How much faster one architecture learns than another: ratios of the steps to a score, where some runs never reach it.

A run that ends before it reaches the score is censored: all that is known is that it needs more steps. The factor f
between two architectures is that by which all steps of the faster one are shorter. Its interval has every f that an
exact permutation test does not reject, after the faster one's steps are multiplied by f and both are cut at the same
step (Gehan's generalised Wilcoxon test, 1965). Nothing is assumed about the distribution of steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from canonlm.runs.seed_statistics import LEVEL, labellings

Steps = Sequence[float | None]
"""The steps of each run to a score; None for a run that has not reached it."""


@dataclass(frozen=True)
class Speed:
    """How many times faster than theirs ours reach a score: an estimate with its 95 % interval. `high` is inf where
    theirs may never reach it, and so is `factor` where no run of theirs does; `low` and `factor` are 0 the other way
    round. reached: the numbers of runs that reach the score, ours and theirs."""

    factor: float
    low: float
    high: float
    reached: tuple[int, int]


def speed_factor(ours: Steps, theirs: Steps, end: float, level: float = LEVEL, *, every: float = 0) -> Speed | None:
    """The factor between two architectures that were trained for `end` steps; None if the runs say nothing about it, as
    too few reach the score.

    The estimate is the middle of the factors with the largest p-value. every: the number of steps between evaluations:
    a run may have reached the score that much earlier than it was seen to, so the interval goes down to the factor at
    which all of theirs did, and up to the one at which all of ours did.
    """
    speed = _factor(ours, theirs, end, level)
    if speed is None or not every:
        return speed
    lowest = _factor(ours, _earlier(theirs, every), end, level)
    highest = _factor(_earlier(ours, every), theirs, end, level)
    low, high = lowest.low if lowest else 0.0, highest.high if highest else math.inf
    return Speed(speed.factor, min(low, speed.low), max(high, speed.high), speed.reached)


def _earlier(steps: Steps, every: float) -> Steps:
    return [None if step is None else max(1.0, step - every) for step in steps]


def _factor(ours: Steps, theirs: Steps, end: float, level: float) -> Speed | None:
    reached = sum(step is not None for step in ours), sum(step is not None for step in theirs)
    if not any(reached):
        return None
    a, b = (np.array([math.inf if step is None else step for step in steps], dtype=float) for steps in (ours, theirs))
    # The order of the runs changes only where a factor makes two steps equal, or a step equal to the end.
    finite, other = a[np.isfinite(a)], b[np.isfinite(b)]
    borders = {*(other[:, None] / finite).ravel().tolist(), *(end / finite).tolist(), *(other / end).tolist()}
    edges = [0.0, *sorted(borders), math.inf]
    ranges = [(edge, edge) for edge in edges[1:-1]] + list(pairwise(edges))
    p = {each: _p(a * _inside(*each), b, end * min(1.0, _inside(*each))) for each in ranges}
    kept = [each for each in ranges if p[each] > level]
    best = [each for each in kept if p[each] >= max(p.values()) - 1e-12]
    low, high = min(first for first, _ in best), max(last for _, last in best)
    if low == 0 and high == math.inf:
        return None
    ends = min(first for first, _ in kept), max(last for _, last in kept)
    return Speed(math.sqrt(low) * math.sqrt(high), *ends, reached)


def equal_speed_p(ours: Steps, theirs: Steps, end: float) -> float:
    """The permutation test of equal distributions of the steps to a score."""
    a, b = (np.array([math.inf if step is None else step for step in steps], dtype=float) for steps in (ours, theirs))
    return _p(a, b, end)


def _inside(low: float, high: float) -> float:
    """A factor between two."""
    if low == 0:
        return high / 2
    return 2 * low if high == math.inf else math.sqrt(low * high)


def _p(a: NDArray[np.float64], b: NDArray[np.float64], end: float) -> float:
    """Permutation test, two-sided, of equal distributions of steps that are cut after `end`."""
    steps = np.round(np.concatenate([a, b]) / end, 9)  # a factor makes steps equal
    known = np.where(steps > 1, math.inf, steps)
    with np.errstate(invalid="ignore"):
        later = (known[:, None] > known[None]).sum(1) - (known[:, None] < known[None]).sum(1)
    labels = labellings(len(a), len(steps))
    statistics = np.abs(labels @ later)
    return float((statistics >= statistics[0] - 1e-9).mean())
