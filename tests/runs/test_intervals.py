"""Intervals against scipy, and their coverage: they contain the true value in 95 of 100 cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from canonlm.runs.intervals import spread_interval, t_factor, t_interval, wilson_interval


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
def test_nineteen_of_twenty_intervals_contain_the_true_value(count):
    draws = np.random.default_rng(count).normal(0.7, 0.1, (4000, count))
    held = [low <= 0.7 <= high for low, high in (t_interval(draw.tolist()) for draw in draws)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors of 4,000 trials


@pytest.mark.parametrize("count", [2, 3, 5, 8, 10, 30])
def test_the_interval_of_a_standard_deviation_is_that_of_scipy(count):
    values = np.random.default_rng(count).normal(3, 0.2, count)
    squares = np.var(values, ddof=1) * (count - 1)
    expected = np.sqrt(squares / stats.chi2.ppf([0.975, 0.025], count - 1))
    assert spread_interval(values.tolist()) == pytest.approx(tuple(expected), rel=1e-9)


def test_two_equal_numbers_have_an_interval_of_width_zero():
    assert t_interval([0.1, 0.1]) == (0.1, 0.1)


@given(total=st.integers(1, 5000), share=st.floats(0, 1))
def test_wilson_equals_scipy(total, share):
    correct = round(total * share)
    low, high = wilson_interval(correct / total, total)
    truth = stats.binomtest(correct, total).proportion_ci(0.95, "wilson")
    assert low == pytest.approx(truth.low, abs=1e-6)
    assert high == pytest.approx(truth.high, abs=1e-6)
    assert 0 <= low <= correct / total <= high <= 1
