"""How much faster one architecture learns than another: ratios of the steps to a score, where some runs never reach it.

A run that ends before it reaches the score is censored: all that is known is that it needs more steps. The factor
between two architectures is the one by which the steps of the faster one are multiplied, before both are cut at the
same step, so that a run of one is as likely to be the earlier as a run of the other (Gehan, 1965). Its interval goes
from the first factor at which the earlier runs are not improbably many to the last, whatever the distributions of
steps: the share of pairs of runs in which ours is earlier deviates from one half at most as the mean of independent
coins does, one for each run of the smaller group (Hoeffding, 1963, section 5). A permutation test assumes that steps
have one distribution: where all runs of one take 300 steps, and those of the other 200 or 400, it finds a difference in
38 % of cases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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

    The estimate is the middle of the factors at which both are earlier equally often, or nearly. every: the number of
    steps between evaluations: a run may have reached the score that much earlier than it was seen to, so the interval
    goes down to the factor at which all of theirs did, and up to the one at which all of ours did.
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
    leads = {each: _lead(a * _inside(*each), b, end * min(1.0, _inside(*each))) for each in ranges}
    likely = {each for each in ranges if _chance(abs(leads[each]), min(len(a), len(b))) > level}
    # Ours are the earlier ones at smaller factors, and the later ones at larger ones.
    first, low = (min(each[0] for each in ranges if leads[each] <= 0 or each in kept) for kept in (set(), likely))
    last, high = (max(each[1] for each in ranges if leads[each] >= 0 or each in kept) for kept in (set(), likely))
    factor = math.sqrt(first) * math.sqrt(last)
    few = sum(reached) < min(len(a), len(b)) and not 0 < factor < math.inf and (low, high) == (0, math.inf)
    return None if few else Speed(factor, low, high, reached)


def equal_speed_p(ours: Steps, theirs: Steps, end: float) -> float:
    """The exact permutation test, two-sided, of equal distributions of the steps to a score."""
    a, b = (np.array([math.inf if step is None else step for step in steps], dtype=float) for steps in (ours, theirs))
    known = _cut(np.concatenate([a, b]), end)
    later = (known[:, None] > known[None]).sum(1) - (known[:, None] < known[None]).sum(1)
    statistics = np.abs(labellings(len(a), len(known)) @ later)
    return float((statistics >= statistics[0] - 1e-9).mean())


def _inside(low: float, high: float) -> float:
    """A factor between two."""
    if low == 0:
        return high / 2
    return 2 * low if high == math.inf else math.sqrt(low * high)


def _cut(steps: NDArray[np.float64], end: float) -> NDArray[np.float64]:
    """In units of `end`, and 2 for later ones. Rounded, as a factor makes steps equal."""
    shares = np.round(steps / end, 9)
    return np.where(shares > 1, 2.0, shares)


def _lead(a: NDArray[np.float64], b: NDArray[np.float64], end: float) -> float:
    """The share of pairs of runs in which ours is earlier, minus one half. Ties count half."""
    ours, theirs = _cut(a, end)[:, None], _cut(b, end)[None]
    return (int((ours < theirs).sum()) - int((ours > theirs).sum())) / (2 * ours.size * theirs.size)


@cache
def _chance(lead: float, runs: int) -> float:
    """The max probability of a lead so large, or larger, if both are equally likely to be earlier. runs: of the group
    with fewer. No convex function of the share, such as (share − u)+, has a larger mean than with that many coins; this
    is the smallest of the bounds that follow for all u."""
    coins = [(heads / runs, math.comb(runs, heads) / 2**runs) for heads in range(runs + 1)]
    share = 0.5 + lead
    bounds = (
        sum(probability * max(0.0, each - u) for each, probability in coins) / (share - u)
        for u, _ in coins
        if u < share - 1e-12
    )
    return min(1.0, 2 * min(bounds))
