"""95 % confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from functools import cache

Z = 1.959964  # standard errors to each side of a normal number
ANY = (-math.inf, math.inf)


def t_interval(values: Sequence[float], within: tuple[float, float] = ANY) -> tuple[float, float]:
    """Interval of the mean of two or more normal numbers; `within`: the range of possible means."""
    mean, half = statistics.mean(values), t_factor(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return max(within[0], mean - half), min(within[1], mean + half)


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
