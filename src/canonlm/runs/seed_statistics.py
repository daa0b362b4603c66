"""Statistics over a few seeds: intervals, and tests that hold for the distributions of real runs.

A seed is one observation: more answers of one run measure that run better, not its architecture. Scores of runs are
often in one of two states (a task is solved, or it is not). Then a few seeds may agree by luck, and their variance is
meaningless. So variances have a floor, two-state slices have a bound without assumptions (Gaffke), tests permute runs
as units, and no verdict comes from fewer than five seeds. `benchmarks/verdicts.py` simulates all of it.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

LEVEL = 0.05
Z = 1.959964  # standard errors to each side of a normal number
MIN_SEEDS = 5
"""The min number of seeds for a verdict."""
SEEDS_OF_INTERVAL = 3
"""The min number of seeds for an interval of a mean."""
MIN_GAP = 0.01
"""The min difference that counts: one point of 100."""

DESIGN = 1.9
"""Variance of a run's accuracy, in units of p (1 - p) / questions: questions come in clusters that share an example."""

DRAWS = 20_000
"""Draws of weights for Gaffke's bound."""

ENUMERATED, SAMPLED = 20_000, 9_999
"""The max number of labellings of runs that are all tried; if there are more, SAMPLED of them are drawn."""


@dataclass(frozen=True)
class Spread:
    """The mean of `values`, one per run (per seed, where seeds were run more than once), with its 95 % interval.

    The interval comes from the differences between seeds. One or two runs have none; then low and high are the mean.
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
    if len(values) >= SEEDS_OF_INTERVAL:
        is_two_state = two_state and questions is not None
        low, high = gaffke_interval(values) if is_two_state else t_interval(values, questions)
    return Spread(mean, low, high, tuple(values))


def by_seed(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """One number per seed, from (seed, value) of runs: the mean, as repeats of a seed do not repeat the experiment."""
    values_by_seed: dict[int, list[float]] = {}
    for seed, value in values:
        values_by_seed.setdefault(seed, []).append(value)
    return {seed: statistics.mean(repeats) for seed, repeats in values_by_seed.items()}


def floored_variance(values: Sequence[float], questions: int | None) -> float:
    """The variance of one seed's accuracy, with a floor: the variance from its questions alone, and one point.

    questions: of a run; None: the values are not accuracies, so their variance has no floor.
    """
    variance = float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
    if questions is None:
        return variance
    share = (questions * float(np.mean(values)) + 2) / (questions + 4)
    return max(variance, DESIGN * share * (1 - share) / questions, MIN_GAP**2)


def t_interval(values: Sequence[float], questions: int | None = None) -> tuple[float, float]:
    """95 % interval of the mean of two or more normal numbers. questions: of a run, if the numbers are accuracies, with
    a min variance and an interval in [0, 1]."""
    count = len(values)
    if questions is None:
        mean, half = statistics.mean(values), t_factor(count) * statistics.stdev(values) / math.sqrt(count)
        return mean - half, mean + half
    mean, half = float(np.mean(values)), t_factor(count) * math.sqrt(floored_variance(values, questions) / count)
    return max(0.0, mean - half), min(1.0, mean + half)


def gaffke_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of numbers in [0, 1], whatever their distribution: Gaffke's bound on each side.

    The seeds, and one unseen value of 0 (or 1), get weights drawn uniformly from the simplex; the bounds are the 2.5 %
    and 97.5 % quantiles of the weighted means.
    """
    weights = _simplex(len(values) + 1)
    low, high = (weights @ np.array([*sorted(values), beyond]) for beyond in (0.0, 1.0))
    return max(0.0, float(np.quantile(low, LEVEL / 2))), min(1.0, float(np.quantile(high, 1 - LEVEL / 2)))


@cache
def _simplex(size: int) -> Values:
    return np.random.default_rng(0).dirichlet(np.ones(size), DRAWS)


def difference_interval(
    ours: Sequence[float], theirs: Sequence[float], questions: int | None, *, two_state: bool
) -> tuple[float, float]:
    """95 % interval of mean(ours) - mean(theirs): Newcombe's combination of Gaffke's bounds on two-state slices, else
    Welch's with floored variances."""
    gap = float(np.mean(ours) - np.mean(theirs))
    if two_state:
        (low, high), (other_low, other_high) = gaffke_interval(ours), gaffke_interval(theirs)
        mean, other = float(np.mean(ours)), float(np.mean(theirs))
        return gap - math.hypot(mean - low, other_high - other), gap + math.hypot(high - mean, other - other_low)
    error, degrees = _welch(ours, theirs, questions)
    half = t_factor(degrees + 1) * error
    return (gap - half, gap + half) if questions is None else (max(-1.0, gap - half), min(1.0, gap + half))


def welch_p(ours: Sequence[float], theirs: Sequence[float], questions: int | None) -> float:
    """Welch's test, two-sided, with floored variances."""
    (error, degrees), gap = _welch(ours, theirs, questions), abs(float(np.mean(ours) - np.mean(theirs)))
    if error == 0:
        return float(gap == 0)
    return 1 - t_probability(gap / error, degrees)


def _welch(ours: Sequence[float], theirs: Sequence[float], questions: int | None) -> tuple[float, int]:
    """The standard error of the difference of means, and degrees of freedom, rounded down."""
    parts = [(floored_variance(values, questions) / len(values), len(values)) for values in (ours, theirs)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0, 1
    degrees = total**2 / sum(part**2 / (count - 1) for part, count in parts)
    return math.sqrt(total), max(1, int(degrees + 1e-9))


def permutation_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Permutation test of the difference of means, two-sided: the share of labellings with one at least as large."""
    return float(max_t_p(np.array([ours]), np.array([theirs]))[0])


def max_t_p(ours: Values, theirs: Values) -> Values:
    """Adjusted p of every slice (`[slices, seeds]` each): step-down max-T over permutations of whole runs.

    T is |difference of means| over the standard deviation of all values of the slice. Ties count, with a relative
    tolerance.
    """
    pooled = np.concatenate([ours, theirs], axis=1)
    count, total = ours.shape[1], pooled.shape[1]
    labels = _labellings(count, total)
    spread = pooled.std(axis=1)
    spread = np.where(spread < 1e-12, np.inf, spread)
    sums = pooled @ labels.T  # [slices, labellings]
    totals = pooled.sum(axis=1, keepdims=True)
    t = np.abs(sums / count - (totals - sums) / (total - count)) / spread[:, None]
    order = np.argsort(-t[:, 0], kind="stable")
    adjusted, worst = np.ones(len(order)), 0.0
    for rank, index in enumerate(order):
        largest = t[order[rank:]].max(axis=0)
        worst = max(worst, float((largest >= t[index, 0] * (1 - 1e-9) - 1e-12).mean()))
        adjusted[index] = worst
    return adjusted


@cache
def _labellings(count: int, total: int) -> Values:
    """`[labellings, runs]`, 1 where a run is ours; the first is the real one."""
    first = np.zeros((1, total))
    first[0, :count] = 1
    if math.comb(total, count) <= ENUMERATED:
        rows = np.zeros((math.comb(total, count), total))
        for row, chosen in zip(rows, itertools.combinations(range(total), count), strict=True):
            row[list(chosen)] = 1
        return rows  # combinations begin with 0 … count - 1
    drawn = np.random.default_rng(0).permuted(np.repeat(first, SAMPLED, axis=0), axis=1)
    return np.concatenate([first, drawn])


@dataclass(frozen=True)
class Comparison:
    """The comparison of two architectures on a page with several pairs.

    state: "higher" or "lower" (ours against theirs: their runs differ), "alike" (no significant difference),
    "undecided" (too few seeds), "spread" (of one architecture: gap is the standard deviation over its seeds). seeds:
    the number used of each. gap, low, high: of the mean scores. slices: those on which the runs differ, with the sign.
    on_average: whether the interval of the mean excludes 0.
    """

    state: str
    seeds: int
    gap: float
    low: float
    high: float
    slices: Mapping[str, int]
    on_average: bool

    @property
    def more_seeds(self) -> int:
        """The min number of further seeds of each for a verdict; 0 if there are enough."""
        return max(0, MIN_SEEDS - self.seeds)


def seeds_needed(pairs: int, level: float = LEVEL) -> int:
    """The min number of seeds of each architecture with which one of `pairs` comparisons can be significant: with n
    runs each, the smallest p-value of the permutation test is 2 / C(2n, n)."""
    seeds = MIN_SEEDS
    while pairs * 2 / math.comb(2 * seeds, seeds) > level:
        seeds += 1
    return seeds


def compare(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    questions: int | None,
    *,
    pairs: int = 1,
    two_state: bool = True,
    level: float = LEVEL,
) -> Comparison:
    """Compare accuracies of seeds by slice, in the order of seeds. Both sides use as many seeds as the smaller one has.

    First the score, the mean over slices: both the exact permutation test and Welch's test with floored variances must
    reject at level / pairs, and the gap must be at least a point. Only then the slices: each needs max-T over slices,
    times pairs, Welch's test with Holm's correction, and a point.

    questions: of one run and slice; None: the values are not accuracies, so variances have no floor, and no gap is too
    small. pairs: how many comparisons the page makes. two_state: whether a run either solves the task or does not.
    level: the probability with which any of the comparisons may be wrong.
    ValueError: no slice in common, or no seed.
    """
    keys = [key for key in ours if key in theirs]
    if not keys:
        raise ValueError("no slice in common")
    seeds = min(len(each[key]) for key in keys for each in (ours, theirs))
    if seeds < 1:
        raise ValueError("no seed")
    a, b = (np.array([list(each[key])[:seeds] for key in keys], dtype=float) for each in (ours, theirs))
    mine, other = a.mean(axis=0).tolist(), b.mean(axis=0).tolist()
    gap = float(np.mean(mine) - np.mean(other))
    if seeds < 2:
        return Comparison("undecided", seeds, gap, -math.inf, math.inf, {}, False)
    total = None if questions is None else questions * len(keys)
    low, high = difference_interval(mine, other, total, two_state=two_state and questions is not None)
    if seeds < MIN_SEEDS:
        return Comparison("undecided", seeds, gap, low, high, {}, False)
    p = max(permutation_p(mine, other), welch_p(mine, other, total))
    if pairs * p > level or abs(gap) < _smallest(questions):
        return Comparison("alike", seeds, gap, low, high, {}, False)
    return Comparison(
        "higher" if gap > 0 else "lower",
        seeds,
        gap,
        low,
        high,
        _slices(keys, a, b, questions, pairs, level),
        low > 0 or high < 0,
    )


def spread_over_seeds(values: Sequence[float]) -> Comparison:
    """The standard deviation of one architecture over seeds, with a 95 % interval."""
    seeds = len(values)
    if seeds < 2:
        return Comparison("undecided", seeds, 0.0, 0.0, math.inf, {}, False)
    low, high = spread_interval(values)
    state = "spread" if seeds >= MIN_SEEDS else "undecided"
    return Comparison(state, seeds, float(np.std(values, ddof=1)), low, high, {}, False)


def _smallest(questions: int | None) -> float:
    return 0.0 if questions is None else MIN_GAP


def _slices(
    keys: Sequence[str], a: Values, b: Values, questions: int | None, pairs: int, level: float
) -> dict[str, int]:
    permuted = max_t_p(a, b) * pairs
    single = np.array([welch_p(*rows, questions) for rows in zip(a, b, strict=True)]) * pairs
    holm, worst = np.ones(len(keys)), 0.0
    for rank, index in enumerate(np.argsort(single, kind="stable")):
        worst = max(worst, float(single[index]) * (len(keys) - rank))
        holm[index] = worst
    gaps = a.mean(axis=1) - b.mean(axis=1)
    significant = (permuted <= level) & (holm <= level) & (np.abs(gaps) >= _smallest(questions))
    signs: Any = np.sign(gaps)
    return {key: int(signs[index]) for index, key in enumerate(keys) if significant[index]}


def best_rate(scores: Mapping[float, tuple[int, float]]) -> float:
    """The learning rate with the most runs, of these the one with the highest mean score, of equal ones the smallest.
    scores: the number of runs that have a score, and its mean, by rate."""
    return max(scores, key=lambda rate: (*scores[rate], -rate))


@cache
def winners_bias(rates: int) -> float:
    """How much better the best of `rates` equally good learning rates looks than it is, in standard errors of its mean,
    if it is chosen on the seeds that are shown: the expected maximum of `rates` standard normal numbers."""
    normal, step = statistics.NormalDist(), 1 / 64
    points = np.arange(-8, 8, step).tolist()
    return sum(step * x * rates * normal.pdf(x) * normal.cdf(x) ** (rates - 1) for x in points)


@cache
def t_factor(count: int) -> float:
    """The half width of the 95 % interval of a mean of `count` >= 2 normal numbers, in standard errors: the 97.5 %
    quantile of Student's t with `count` − 1 degrees of freedom."""
    degrees, low, high = count - 1, 0.0, 13.0  # 12.7 for one degree, falling to 1.96
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < 0.95 else (low, middle)
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


def spread_interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval of the standard deviation of two or more normal numbers."""
    degrees, squares = len(values) - 1, statistics.variance(values) * (len(values) - 1)
    low, high = (math.sqrt(squares / _chi_square(p, degrees)) for p in (0.975, 0.025))
    return low, high


@cache
def _chi_square(p: float, degrees: int) -> float:
    """Quantile of the chi-square distribution."""
    low, high = 0.0, 10.0 * degrees + 20
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _chi_square_probability(middle, degrees) < p else (low, middle)
    return high


def _chi_square_probability(x: float, degrees: int) -> float:
    """Probability of a value below x; a finite sum (Abramowitz and Stegun 26.4.4, 26.4.5)."""
    half = x / 2
    first = 0.5 if degrees % 2 else 0.0
    terms = (half ** (k + first) / math.gamma(k + first + 1) for k in range(degrees // 2))
    start = math.erf(math.sqrt(half)) if degrees % 2 else 1.0
    return start - math.exp(-half) * sum(terms)
