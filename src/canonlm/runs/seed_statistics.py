"""Statistics over a few seeds: intervals that hold for the distributions of real runs.

A seed is one observation: more answers of one run measure that run better, not its architecture. Scores of runs are
often in one of two states (a task is solved, or it is not). Then a few seeds may agree by luck, and their variance is
meaningless. So every interval has two readings. The *safe* one holds whatever the distribution of runs is (Gaffke's
bound): seven runs that agree do not rule out that a third of all runs fails. The *normal* one holds if further runs
differ as these do (Student's t). Verdicts need the safe one. `benchmarks/verdicts.py` simulates all of it.

Measures other than accuracies have no bounds, so both of their readings are the normal one.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

LEVEL = 0.05
Z = 1.959964  # standard errors to each side of a normal number
MIN_SEEDS = 5
"""The min number of seeds for a verdict; see `min_seeds`."""
SEEDS_OF_INTERVAL = 3
"""The min number of seeds for an interval of a mean."""

DESIGN = 1.9
"""Variance of a run's accuracy, in units of p (1 - p) / questions: questions come in clusters that share an example."""
MIN_DEVIATION = 0.01
"""The min standard deviation of a run's accuracy: one point of 100."""

ONE_SIDED = 0.7
"""With this share of the level, a verdict is false in at most 5 % of cases at 5 to 10 seeds if all runs solve a task or
do not, with equal means and any probability (by enumeration at most 4.4 %; with a share of 0.75, 5.8 %)."""

HALVINGS = 40
"""Halvings of the range of scores, 0 to 1, in which a bound is sought."""
MANY = 100
"""For as many numbers, numba computes a bound: it takes a second to load, and a thousand numbers take that long."""


class Interval(NamedTuple):
    low: float
    high: float

    def __neg__(self) -> "Interval":
        return Interval(-self.high, -self.low)


@dataclass(frozen=True)
class Spread:
    """The mean of `values`, one per run (per seed, where seeds were run more than once), with its 95 % interval.

    low, high: the safe interval. One or two runs have none; then both are the mean. normal: the other reading.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]
    normal: Interval

    @property
    def runs(self) -> int:
        return len(self.values)

    @property
    def kind(self) -> str:
        """The kind of interval, with the number of runs."""
        over = "one run" if self.runs == 1 else f"{self.runs} runs"
        return f"95% interval over {over}" if self.low < self.high else over


def spread_of(values: Sequence[float], questions: int | None = None) -> Spread:
    """The spread of any numbers, one per run. questions: per run, if the numbers are accuracies."""
    mean = statistics.mean(values)
    safe = normal = Interval(mean, mean)
    if len(values) >= SEEDS_OF_INTERVAL:
        normal = t_interval(values, questions)
        safe = normal if questions is None else gaffke_interval(values)
    return Spread(mean, *safe, tuple(values), normal)


def by_seed(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """One number per seed, from (seed, value) of runs: the mean, as repeats of a seed do not repeat the experiment."""
    values_by_seed: dict[int, list[float]] = {}
    for seed, value in values:
        values_by_seed.setdefault(seed, []).append(value)
    return {seed: statistics.mean(repeats) for seed, repeats in values_by_seed.items()}


# -- one architecture -------------------------------------------------------------------------------------------------


def floored_variance(values: Sequence[float], questions: int | None) -> float:
    """The variance of one seed's accuracy, with a floor: the variance from its questions alone, and one point.

    questions: of a run; None: the values are not accuracies, so their variance has no floor.
    """
    variance = float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
    if questions is None:
        return variance
    share = (questions * float(np.mean(values)) + 2) / (questions + 4)
    return max(variance, DESIGN * share * (1 - share) / questions, MIN_DEVIATION**2)


def t_interval(values: Sequence[float], questions: int | None = None) -> Interval:
    """95 % interval of the mean of two or more normal numbers. questions: of a run, if the numbers are accuracies, with
    a min variance and an interval in [0, 1]."""
    count = len(values)
    if questions is None:
        mean, half = statistics.mean(values), t_factor(count) * statistics.stdev(values) / math.sqrt(count)
        return Interval(mean - half, mean + half)
    mean, half = float(np.mean(values)), t_factor(count) * math.sqrt(floored_variance(values, questions) / count)
    return Interval(max(0.0, mean - half), min(1.0, mean + half))


def gaffke_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """1 − level interval of the mean of numbers in [0, 1], whatever their distribution: Gaffke's bound on each side.

    The seeds, and one unseen value of 0 (or 1), get weights drawn uniformly from the simplex; the bounds are the
    level / 2 and 1 − level / 2 quantiles of the weighted means. Of n equal values, the lower bound is their mean
    times (level / 2)^(1/n).
    """
    scores = [float(value) for value in values]
    return Interval(_lower_bound(scores, level / 2), 1 - _lower_bound([1 - score for score in scores], level / 2))


def _lower_bound(values: Sequence[float], level: float) -> float:
    """The level quantile of the mean of `values` and 0 with weights drawn uniformly from the simplex."""
    numbers, low, high = np.array(values), 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above, below = numbers[numbers >= middle] - middle, np.append(middle, middle - numbers[numbers < middle])
        few = len(numbers) < MANY
        share = _share_below(above.tolist(), below.tolist()) if few else _compiled()(above, below)
        low, high = (middle, high) if share < level else (low, middle)
    return low


def _share_below(above: Any, below: Any) -> float:
    """The probability that this mean is below a number: the part of a simplex on one side of a plane, by the recursion
    of Varsi (1973). Each of its steps is a mean of two numbers, so it loses no digits. above, below: the distances of
    the numbers on each side of it."""
    shares = [0.0] * len(above)
    last = 1.0
    for distance_below in below:
        last = 1.0
        for i, distance in enumerate(above):
            last = shares[i] = (distance * shares[i] + distance_below * last) / (distance + distance_below)
    return last


@cache
def _compiled() -> Callable[[Values, Values], float]:
    from canonlm.core.numba_cache import njit

    return njit(cache=True)(_share_below)


# -- two architectures ------------------------------------------------------------------------------------------------


def safe_difference(
    ours: Sequence[float], theirs: Sequence[float], questions: int | None, level: float = LEVEL
) -> Interval:
    """1 − level interval of mean(ours) - mean(theirs), whatever the distributions of accuracies: Newcombe's combination
    of Gaffke's bounds. Each bound is one-sided at ONE_SIDED * level: that both are wrong in the same direction is rare.
    Of other numbers, the normal interval."""
    if questions is None:
        return normal_difference(ours, theirs, None, level)
    mine, other = float(np.mean(ours)), float(np.mean(theirs))
    (low, high), (other_low, other_high) = (gaffke_interval(values, 2 * ONE_SIDED * level) for values in (ours, theirs))
    gap = mine - other
    return Interval(gap - math.hypot(mine - low, other_high - other), gap + math.hypot(high - mine, other - other_low))


def normal_difference(
    ours: Sequence[float], theirs: Sequence[float], questions: int | None, level: float = LEVEL
) -> Interval:
    """1 − level interval of mean(ours) - mean(theirs) of normal numbers with unequal variances: Welch's, with floored
    variances. questions: of a run, if the numbers are accuracies."""
    gap = float(np.mean(ours) - np.mean(theirs))
    error, degrees = _welch(ours, theirs, questions)
    half = t_factor(degrees + 1, level) * error
    return (
        Interval(gap - half, gap + half) if questions is None else Interval(max(-1.0, gap - half), min(1.0, gap + half))
    )


def _welch(ours: Sequence[float], theirs: Sequence[float], questions: int | None) -> tuple[float, int]:
    """The standard error of the difference of means, and degrees of freedom, rounded down."""
    parts = [(floored_variance(values, questions) / len(values), len(values)) for values in (ours, theirs)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0, 1
    degrees = total**2 / sum(part**2 / (count - 1) for part, count in parts)
    return math.sqrt(total), max(1, int(degrees + 1e-9))


State = Literal["higher", "lower", "open", "undecided"]
STATES: Mapping[int, State] = {1: "higher", 0: "open", -1: "lower"}
"""By the sign of an interval."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two architectures on a page with several pairs.

    state: "higher" or "lower" (ours against theirs: the safe interval excludes 0), "open" (it does not), "undecided"
    (too few seeds). seeds: the number of the one with fewer. gap: of the mean scores. safe, normal: its intervals, so
    wide that all pairs of the page hold at the page's level. slices: those that differ, with the sign.
    """

    state: State
    seeds: int
    gap: float
    safe: Interval
    normal: Interval
    slices: Mapping[str, int]


def compare(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    questions: int | None,
    *,
    pairs: int = 1,
    level: float = LEVEL,
) -> Comparison:
    """Compare accuracies of seeds by slice, in the order of seeds. All seeds count, also where one side has more.

    The score is the mean over slices. Slices are judged only if the scores differ, each at level / (pairs · slices).
    questions: of one run and slice; None: the values are not accuracies. pairs: how many comparisons the page makes.
    level: the probability with which any of the comparisons may be wrong.
    ValueError: no slice in common, or no seed.
    """
    keys = [key for key in ours if key in theirs]
    if not keys:
        raise ValueError("no slice in common")
    a, b = (_by_slice(each, keys) for each in (ours, theirs))
    seeds = min(a.shape[1], b.shape[1])
    if seeds < 1:
        raise ValueError("no seed")
    mine, other = a.mean(axis=0).tolist(), b.mean(axis=0).tolist()
    gap = float(np.mean(mine) - np.mean(other))
    if seeds < 2:
        none = Interval(-math.inf, math.inf)
        return Comparison("undecided", seeds, gap, none, none, {})
    total = None if questions is None else questions * len(keys)
    safe = safe_difference(mine, other, total, level / pairs)
    normal = normal_difference(mine, other, total, level / pairs)
    if seeds < MIN_SEEDS:
        return Comparison("undecided", seeds, gap, safe, normal, {})
    if (state := STATES[_sign(safe)]) == "open":
        return Comparison(state, seeds, gap, safe, normal, {})
    of_slices = {
        key: _sign(safe_difference(row.tolist(), other_row.tolist(), questions, level / pairs / len(keys)))
        for key, row, other_row in zip(keys, a, b, strict=True)
    }
    differing = {key: sign for key, sign in of_slices.items() if sign}
    return Comparison(state, seeds, gap, safe, normal, differing)


def compare_ratios(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    questions: int | None = None,
    *,
    pairs: int = 1,
    level: float = LEVEL,
) -> Comparison:
    """The comparison of positive numbers other than accuracies, as ratios: gap is mean(ours) / mean(theirs) - 1. Its
    interval is Fieller's, in which the mean of theirs is as uncertain as that of ours; unbounded where that is not
    clearly above 0."""
    plain = compare(ours, theirs, None, pairs=pairs, level=level)
    mine, other = (_by_slice(each, list(each)).mean(axis=0) for each in (ours, theirs))
    a, b = float(mine.mean()), float(other.mean())
    interval = Interval(-math.inf, math.inf)
    if plain.seeds >= 2:
        of_a, of_b = (float(np.var(each, ddof=1)) / len(each) for each in (mine, other))
        scaled = other * (a / b if b else 1.0)  # to the size of ours, as in a - r b, which the interval is about
        t = t_factor(_welch(mine.tolist(), scaled.tolist(), None)[1] + 1, level / pairs)
        square, middle, constant = b**2 - t**2 * of_b, a * b, a**2 - t**2 * of_a
        if square > 0:
            half = math.sqrt(max(0.0, middle**2 - square * constant))
            interval = Interval((middle - half) / square - 1, (middle + half) / square - 1)
    state = plain.state if plain.state == "undecided" else STATES[_sign(interval)]
    return Comparison(state, plain.seeds, a / b - 1 if b else 0.0, interval, interval, {})


def _by_slice(values: Mapping[str, Sequence[float]], keys: Sequence[str]) -> Values:
    """`[slices, seeds]`; where a slice has fewer seeds than others, of each as many."""
    seeds = min(len(values[key]) for key in keys)
    return np.array([list(values[key])[:seeds] for key in keys], dtype=float)


def _sign(interval: Interval) -> int:
    """1 or -1 where the interval excludes 0, else 0."""
    return int(interval.low > 0) - int(interval.high < 0)


def visible_gap(ours: Sequence[float], theirs: Sequence[float], seeds: int, level: float = LEVEL) -> float:
    """The smallest difference of accuracies that `seeds` runs of each would show, if further runs are like these."""
    a, b = (np.resize(np.array(values, dtype=float), seeds).tolist() for values in (ours, theirs))
    safe, gap = safe_difference(a, b, 1, level), float(np.mean(a) - np.mean(b))
    return gap - safe.low if gap >= 0 else safe.high - gap


def seeds_for(ours: Sequence[float], theirs: Sequence[float], gap: float, level: float = LEVEL) -> int | None:
    """The number of runs of each that would show a difference of `gap`, if further runs are like these; None for more
    than 1,000."""
    few, many = MIN_SEEDS, 1_000
    if visible_gap(ours, theirs, many, level) > gap:
        return None
    while few < many:
        middle = (few + many) // 2
        few, many = (few, middle) if visible_gap(ours, theirs, middle, level) <= gap else (middle + 1, many)
    return few


@cache
def min_seeds(pairs: int) -> int:
    """The min number of seeds for a verdict on a page of `pairs` comparisons. Fewer show no difference, even if all
    runs of one are right and none of the other, and not that one is faster, even if each of its runs is."""
    level, many = LEVEL / max(1, pairs), itertools.count(MIN_SEEDS)
    shown = (n for n in many if safe_difference([1.0] * n, [0.0] * n, 1, level).low > 0)
    return next(n for n in shown if 2 ** (1 - n) <= level)  # of speed: see `canonlm.runs.speed`


ENUMERATED, SAMPLED = 20_000, 9_999
"""The max number of labellings of runs that are all tried; if there are more, SAMPLED of them are drawn."""


@cache
def labellings(count: int, total: int) -> Values:
    """`[labellings, runs]` for a permutation test, 1 where a run is one of `count`; the first is the real one."""
    first = np.zeros((1, total))
    first[0, :count] = 1
    if math.comb(total, count) <= ENUMERATED:
        rows = np.zeros((math.comb(total, count), total))
        for row, chosen in zip(rows, itertools.combinations(range(total), count), strict=True):
            row[list(chosen)] = 1
        return rows  # combinations begin with 0 … count - 1
    drawn = np.random.default_rng(0).permuted(np.repeat(first, SAMPLED, axis=0), axis=1)
    return np.concatenate([first, drawn])


def permutation_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Exact permutation test, two-sided, of equal distributions, by the difference of means."""
    values = np.array([*ours, *theirs], dtype=float)
    labels = labellings(len(ours), len(values))
    gaps = np.abs(labels @ values / len(ours) - (1 - labels) @ values / len(theirs))
    return float((gaps >= gaps[0] - 1e-12).mean())


def holm(ps: Sequence[float]) -> list[float]:
    """p-values that hold for all of these tests together (Holm, 1979), in the same order."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = largest
    return adjusted


# -- rates and quantiles ----------------------------------------------------------------------------------------------


def best_rate(scores: Mapping[float, tuple[int, float, float]]) -> float:
    """The learning rate with the most runs, of these the one with the highest mean score, of equal ones that with the
    lowest loss, and the smallest of those. scores: by rate, the number of runs that have a score, its mean, and the
    negated mean loss. (Where all rates solve a task, the smallest one alone would be the slowest learner.)"""
    return max(scores, key=lambda rate: (*scores[rate], -rate))


@cache
def winners_bias(rates: int) -> float:
    """How much better the best of `rates` equally good learning rates looks than it is, in standard errors of its mean,
    if it is chosen on the seeds that are shown: the expected maximum of `rates` standard normal numbers."""
    normal, step = statistics.NormalDist(), 1 / 64
    points = np.arange(-8, 8, step).tolist()
    return sum(step * x * rates * normal.pdf(x) * normal.cdf(x) ** (rates - 1) for x in points)


@cache
def t_factor(count: int, level: float = LEVEL) -> float:
    """The half width of the 1 − level interval of a mean of `count` >= 2 normal numbers, in standard errors: the
    1 − level / 2 quantile of Student's t with `count` − 1 degrees of freedom."""
    degrees, low, high = count - 1, 0.0, 1 / level  # of one degree, about 0.64 / level
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < 1 - level else (low, middle)
    return high


def wilson_interval(share: float, total: float, z: float = Z) -> tuple[float, float]:
    """Interval of a share of `total` answers (Wilson, 1927), also sensible at 0 and 1."""
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # at 0 and 1 the bound is exactly the share; rounding must not push it past
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def t_probability(t: float, degrees: int) -> float:
    """Probability of |T| ≤ t, a finite sum for odd degrees and one for even (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
