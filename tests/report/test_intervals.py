"""Intervals against scipy, and against what they promise: to hold the truth in 95 of 100 cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from canonlm.report.intervals import newcombe_interval, t_factor, t_interval, wilson_interval


def test_t_factors_are_those_of_scipy():
    counts = range(2, 301)
    assert [t_factor(count) for count in counts] == pytest.approx(stats.t.ppf(0.975, [n - 1 for n in counts]), abs=1e-9)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_the_interval_of_a_mean_is_that_of_scipy(values):
    low, high = t_interval(values)
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    assert low == pytest.approx(np.mean(values) - half, abs=1e-6)
    assert high == pytest.approx(np.mean(values) + half, abs=1e-6)
    middle = sum(t_interval(values)) / 2
    assert t_interval(values, (middle, middle)) == (middle, middle)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_nineteen_of_twenty_intervals_hold_the_truth(count):
    draws = np.random.default_rng(count).normal(0.7, 0.1, (4000, count))
    held = [low <= 0.7 <= high for low, high in (t_interval(draw.tolist()) for draw in draws)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors of 4,000 trials


def test_two_equal_numbers_have_an_interval_without_width():
    assert t_interval([0.1, 0.1]) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [((56, 70), (48, 80), 0.0524, 0.3339), ((9, 10), (3, 10), 0.1705, 0.8090), ((10, 10), (0, 10), 0.6075, 1.0),
     ((0, 10), (0, 10), -0.2775, 0.2775)],
)  # fmt: skip
def test_intervals_of_differences_as_their_author_tabulates_them(one, other, low, high):
    """Newcombe (1998), table II, method 10."""
    found = newcombe_interval(one[0] / one[1], one[1], other[0] / other[1], other[1])
    assert found == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@given(total=st.integers(1, 500), other_total=st.integers(1, 500), share=st.floats(0, 1), other=st.floats(0, 1))
def test_a_difference_turned_round_is_the_other_interval(total, other_total, share, other):
    low, high = newcombe_interval(share, total, other, other_total)
    assert newcombe_interval(other, other_total, share, total) == (pytest.approx(-high), pytest.approx(-low))
    assert -1 - 1e-12 <= low <= share - other <= high <= 1 + 1e-12
    assert wilson_interval(share, total)[1] >= share
