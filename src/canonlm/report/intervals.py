"""Intervals that hold a number in 95 of 100 cases, if what they assume is so."""

import math
import statistics
from collections.abc import Sequence
from functools import cache

Z = 1.959964  # standard errors to each side of a normal number
ANY = (-math.inf, math.inf)


def t_interval(values: Sequence[float], within: tuple[float, float] = ANY) -> tuple[float, float]:
    """Of the mean that two or more normal numbers were drawn around; `within` is what a mean can be."""
    mean, half = statistics.mean(values), t_factor(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return max(within[0], mean - half), min(within[1], mean + half)


@cache
def t_factor(count: int) -> float:
    """By how many standard errors the 95 % interval of a mean of `count` normal numbers goes to each side: the 97.5 %
    quantile of Student's t with `count` − 1 degrees of freedom. Needs two numbers."""
    degrees, low, high = count - 1, 0.0, 13.0  # 12.7 for one degree, falling to 1.96
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < 0.95 else (low, middle)
    return high


def wilson_interval(share: float, total: int, z: float = Z) -> tuple[float, float]:
    """Of a share of `total` answers (Wilson, 1927): sensible also at 0 and at 1."""
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # at 0 and 1 the bound is exactly the share; rounding must not push it past
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def newcombe_interval(share: float, total: int, other: float, other_total: int) -> tuple[float, float]:
    """Of the difference share − other of two shares, each of so many answers (Newcombe, 1998, method 10)."""
    (low, high), (other_low, other_high) = wilson_interval(share, total), wilson_interval(other, other_total)
    gap = share - other
    return gap - math.hypot(share - low, other_high - other), gap + math.hypot(high - share, other - other_low)


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
