"""A shuffle by formula: a bijection for every size and key, with all orders equally likely."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from canonlm.data.permutation import key_of, permuted


def test_every_number_comes_up_once():
    for n in [*range(1, 130), 1000, 4096, 10_007]:
        assert sorted(permuted(i, n, key_of(n)) for i in range(n)) == list(range(n))


@given(n=st.integers(2, 2**62 - 1), seed=st.integers(0, 2**63 - 1), data=st.data())
@example(n=2**62 - 1, seed=0, data=None)
@example(n=(2**31 - 1) ** 2, seed=0, data=None)  # a square, and one more: a rounded root is off by one
@example(n=(2**31 - 1) ** 2 + 1, seed=0, data=None)
def test_large_permutations_are_in_range_and_distinct(n, seed, data):
    key = key_of(seed)
    some = [0, 1, n - 1] if data is None else data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50))
    result = [permuted(i, n, key) for i in some]
    assert all(0 <= i < n for i in result)
    assert len(set(result)) == len(set(some))


def chi_square(counts, expected):
    """The chi-square statistic, in standard deviations from its expected value."""
    freedom = len(counts) - 1
    return (sum((count - expected) ** 2 / expected for count in counts) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_all_orders_are_as_likely(n):
    keys = 200 * math.factorial(n) if n < 6 else 40_000
    seen = Counter(tuple(permuted(i, n, key_of("orders", s)) for i in range(n)) for s in range(keys))
    counts = [seen[order] for order in itertools.permutations(range(n))]
    assert abs(chi_square(counts, keys / len(counts))) < 3


def test_neighbours_are_separated():
    """The places of i and i + 1, in tenths: all hundred pairs are equally frequent. And numbers move far."""
    n, key = 100_003, key_of("neighbours")
    places = np.array([permuted(i, n, key) for i in range(n)])
    tenths = places * 10 // n
    assert abs(chi_square(np.bincount(tenths[:-1] * 10 + tenths[1:], minlength=100), (n - 1) / 100)) < 3
    assert abs(np.corrcoef(places, np.arange(n))[0, 1]) < 3 / math.sqrt(n)


def test_a_key_depends_on_all_its_parts():
    keys = {key_of(*parts) for parts in [(0, "a", 1), (0, "b", 1), (1, "a", 1), (0, "a", 2), (0, "a"), (0, "a1")]}
    assert len(keys) == 6
    orders = {tuple(permuted(i, 20, key) for i in range(20)) for key in keys}
    assert len(orders) == 6


def test_the_order_is_the_same_everywhere():
    """A run that is continued elsewhere, or years later, depends on it. (Computed with Python's integers.)"""
    assert [permuted(i, 10, key_of(0, "web", 0)) for i in range(10)] == [9, 8, 5, 3, 4, 0, 6, 7, 1, 2]
    assert permuted(123_456_789, 10**12, key_of(7, "code", 3)) == 852_817_862_583
