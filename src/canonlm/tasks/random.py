"""The random numbers behind every sample: pure functions of (seed, split, window, j), in numba.

A stream is a SplitMix64 generator (Steele, Lea, Flood 2014): its i-th word is mix(start + i * gamma), with a start and
an odd gamma of its own, both hashed from the key. `mix` is a bijection and gamma is odd, so one stream does not repeat
itself within 2**64 words. Two streams can share single words, as any random sequences do. To share two words in a row
they need the same gamma (subtract the two positions), which has probability 2**-63 per pair, and starts that line up.
The split is part of the key, so no split continues another.

Functions pass the state as two plain integers (`state, gamma`), not as an array, so that it stays in registers.
Bounded draws are exact (Lemire 2019, multiply and reject), so the distributions below have no modulo bias.
"""

import operator

import numpy as np

from canonlm.core.errors import expected, unknown
from canonlm.core.numba_cache import njit

TRAIN, VALID, TEST, VALIDATION = 1, 2, 3, 4  # the splits in the key of a stream
SPLITS = {"train": TRAIN, "valid": VALID, "test": TEST, "validation": VALIDATION}
GRADED = (TEST, VALIDATION)
"""Splits with the test distribution: settings are chosen on `validation`, so that `test` stays unseen. `valid` has the
training distribution."""

_U = np.uint64
_GOLDEN, _MIX1, _MIX2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)
_GAMMA_SALT = _U(0xD1B54A32D192ED03)
_S27, _S30, _S31, _S32, _S11, _ONE = _U(27), _U(30), _U(31), _U(32), _U(11), _U(1)
_LOW = _U(0xFFFFFFFF)


def check_split(split: str) -> int:
    """The number of a split in the key of a stream."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return SPLITS[split]


def check_count(key: str, value: object, min: int = 0) -> int:
    """A seed, an index or a count as an int; ValueError unless it is an integer in [min, 2**63)."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(value, bool) or not min <= number < 2**63:
        raise expected(key, f"an integer from {min} to 2**63 - 1", value)
    return number


@njit(cache=True)
def mix(z):
    """SplitMix64's bijection of 64 bits (Stafford's variant 13), shifted so that 0 is not a fixed point."""
    z = z + _GOLDEN
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@njit(cache=True)
def stream(seed, split, window, j):
    """(state, gamma) of one instance. Each step is a bijection of its input, so no two j of a window collide."""
    key = mix(mix(_U(seed)))  # twice, or seed 1 of split 2 would be seed 2 of split 1
    key = mix(key ^ mix(_U(split)))
    key = mix(key ^ mix(_U(window)))
    key = mix(key ^ mix(_U(j)))
    return key, mix(key ^ _GAMMA_SALT) | _ONE


@njit(cache=True)
def below(state, gamma, n):
    """(state, i): i uniform on 0..n-1, for 1 <= n <= 2**32."""
    bound = _U(n)
    state = state + gamma
    product = (mix(state) >> _S32) * bound
    if product & _LOW < bound:  # only such a value may have to be rejected, for equal probabilities
        floor = (_LOW + _ONE) % bound
        while product & _LOW < floor:
            state = state + gamma
            product = (mix(state) >> _S32) * bound
    return state, np.int64(product >> _S32)


@njit(cache=True)
def one_of(state, gamma, values):
    """(state, value): each of the values (rows of an array) is equally likely."""
    state, which = below(state, gamma, len(values))
    return state, values[which]


@njit(cache=True)
def two_below(state, gamma, n, m):
    """(state, i, j): independent, uniform on 0..n-1 and 0..m-1, from the two halves of one word."""
    a, b = _U(n), _U(m)
    while True:
        state = state + gamma
        word = mix(state)
        first = (word >> _S32) * a
        second = (word & _LOW) * b
        if first & _LOW >= a and second & _LOW >= b:
            break
        if first & _LOW >= (_LOW + _ONE) % a and second & _LOW >= (_LOW + _ONE) % b:
            break
    return state, np.int64(first >> _S32), np.int64(second >> _S32)


@njit(cache=True)
def shuffle(state, gamma, items, n, first):
    """Fisher-Yates: items[:first] becomes a uniform ordered sample of items[:n]; first = n shuffles them all.

    One word gives four draws. In a 32-bit half x, the high part of x * a is a draw below a, and the low part
    times b gives a draw below b; together they are one draw below a * b, so one rejection test covers both.
    """
    i = 0
    while i + 4 <= first and n - i <= 65536:
        a, b, c, d = _U(n - i), _U(n - i - 1), _U(n - i - 2), _U(n - i - 3)
        state = state + gamma
        word = mix(state)
        pa = (word >> _S32) * a
        pb = (pa & _LOW) * b
        pc = (word & _LOW) * c
        pd = (pc & _LOW) * d
        if (pb & _LOW < a * b or pd & _LOW < c * d) and (
            pb & _LOW < (_LOW + _ONE) % (a * b) or pd & _LOW < (_LOW + _ONE) % (c * d)
        ):
            continue
        _swap(items, i, i + np.int64(pa >> _S32))
        _swap(items, i + 1, i + 1 + np.int64(pb >> _S32))
        _swap(items, i + 2, i + 2 + np.int64(pc >> _S32))
        _swap(items, i + 3, i + 3 + np.int64(pd >> _S32))
        i += 4
    while i < first:
        state, j = below(state, gamma, n - i)
        _swap(items, i, i + j)
        i += 1
    return state


@njit(cache=True)
def unshuffle(items, first):
    """Undo `shuffle(…, items, n, first)` of items that were 0, 1, 2, … before, in `first` steps instead of n."""
    for i in range(first):
        if items[i] >= first:
            items[items[i]] = items[i]
    for i in range(first):
        items[i] = i


@njit(cache=True)
def _swap(items, i, j):
    kept = items[i]
    items[i] = items[j]
    items[j] = kept


@njit(cache=True)
def draw_index(state, gamma, cumulative):
    """(state, i): i with probability cumulative[i] - cumulative[i-1] (float64, to 2**-53), by inversion."""
    state = state + gamma
    u = np.float64(mix(state) >> _S11) * 2.0**-53
    low, high = 0, len(cumulative) - 1
    while low < high:
        middle = (low + high) >> 1
        if u < cumulative[middle]:
            high = middle
        else:
            low = middle + 1
    return state, low
