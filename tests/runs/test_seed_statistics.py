"""Intervals and tests from few seeds: exact values, and error rates on runs with known distributions."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from canonlm.runs import seed_statistics
from canonlm.runs.seed_statistics import spread_interval, t_factor, t_interval, wilson_interval

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("simulated_pages", ROOT / "benchmarks" / "verdicts.py")
simulated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated)

SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=6)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([1, 1, 1], 0.292, 1),
        ([1] * 5, 0.478, 1),
        ([0, 0, 0], 0, 0.708),
        ([0.58, 0.60, 0.62], 0.175, 0.883),
    ],
)
def test_gaffkes_bound(values, low, high):
    assert seed_statistics.gaffke_interval(values) == pytest.approx((low, high), abs=0.01)


@pytest.mark.parametrize("rates", [1, 2, 3, 4, 8])
def test_the_best_of_equal_rates_looks_better_than_it_is(rates):
    chosen = np.random.default_rng(rates).normal(size=(40_000, rates)).max(axis=1)
    assert seed_statistics.winners_bias(rates) == pytest.approx(chosen.mean(), abs=4 * chosen.std() / 200)


@given(values=SHARES)
@settings(deadline=None, max_examples=30)
def test_gaffkes_bound_is_an_interval_around_the_mean_and_mirrors(values):
    low, high = seed_statistics.gaffke_interval(values)
    assert 0 <= low <= np.mean(values) + 1e-9
    assert np.mean(values) - 1e-9 <= high <= 1
    mirrored = seed_statistics.gaffke_interval([1 - value for value in values])
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=0.02)


def by_brute_force(ours, theirs):
    """The share of all relabellings of the runs whose means are at least as far apart."""
    runs, count = [*ours, *theirs], len(ours)
    gap = abs(np.mean(ours) - np.mean(theirs))
    gaps = []
    for chosen in itertools.combinations(range(len(runs)), count):
        mine = [runs[i] for i in chosen]
        rest = [runs[i] for i in range(len(runs)) if i not in chosen]
        gaps.append(abs(np.mean(mine) - np.mean(rest)))
    return np.mean(np.array(gaps) >= gap * (1 - 1e-9) - 1e-12)


@given(ours=SHARES, theirs=SHARES)
@settings(deadline=None, max_examples=40)
def test_permutation_test_equals_brute_force(ours, theirs):
    if max(ours + theirs) - min(ours + theirs) < 1e-6:
        assert seed_statistics.permutation_p(ours, theirs) == 1
    else:
        assert seed_statistics.permutation_p(ours, theirs) == pytest.approx(by_brute_force(ours, theirs), abs=1e-9)


@pytest.mark.parametrize(("seeds", "smallest"), [(3, 0.1), (4, 2 / 70), (5, 2 / 252), (6, 2 / 924)])
def test_the_smallest_p(seeds, smallest):
    assert seed_statistics.permutation_p([1.0] * seeds, [0.0] * seeds) == pytest.approx(smallest)


def test_max_t_accounts_for_all_slices():
    """By brute force: the share of all labellings whose largest T reaches the slice's."""
    rng = np.random.default_rng(3)
    ours, theirs = rng.random((3, 4)), rng.random((3, 4)) - np.array([[0.8], [0.3], [0.0]])
    together = np.concatenate([ours, theirs], axis=1)

    def t(columns):
        mine = together[:, columns].mean(axis=1)
        rest = np.delete(together, columns, axis=1).mean(axis=1)
        return np.abs(mine - rest) / together.std(axis=1)

    every = np.array([t(list(columns)) for columns in itertools.combinations(range(8), 4)])
    seen, worst, expected = t([0, 1, 2, 3]), 0.0, np.zeros(3)
    order = np.argsort(-seen)
    for rank, index in enumerate(order):
        share = np.mean(every[:, order[rank:]].max(axis=1) >= seen[index] * (1 - 1e-9))
        worst = expected[index] = max(worst, share)
    assert seed_statistics.max_t_p(ours, theirs) == pytest.approx(expected)


@pytest.mark.parametrize("seeds", [1, 2, 3, 4])
def test_no_verdict_from_few_seeds(seeds):
    result = seed_statistics.compare({"a": [1.0] * seeds}, {"a": [0.0] * seeds}, 1_000)
    assert (result.state, result.slices, result.more_seeds) == ("undecided", {}, 5 - seeds)


def test_a_clear_difference_and_a_tie():
    high, low = {"a": [0.94] * 5, "b": [0.9] * 5}, {"a": [0.12] * 5, "b": [0.9] * 5}
    assert seed_statistics.compare(high, low, 1_000).state == "higher"
    assert seed_statistics.compare(low, high, 1_000).slices == {"a": -1}
    assert seed_statistics.compare(high, high, 1_000).state == "alike"
    barely = {"a": [0.945] * 5, "b": [0.9] * 5}  # a quarter of a point on average
    assert seed_statistics.compare(barely, high, 1_000_000).state == "alike"


def test_only_as_many_seeds_as_both_have():
    assert seed_statistics.compare({"a": [1.0] * 9}, {"a": [0.0] * 6}, 1_000).seeds == 6


def test_four_against_four_is_undecided_with_two_pairs():
    assert seed_statistics.permutation_p([1.0] * 4, [0.0] * 4) * 2 > seed_statistics.LEVEL


def test_floored_variance_of_equal_seeds():
    answers = seed_statistics.floored_variance([0.5, 0.5], 1_000)
    assert answers == pytest.approx(1.9 * 0.25 / 1_000)
    assert seed_statistics.floored_variance([1.0, 1.0], 1_000_000) == seed_statistics.MIN_GAP**2
    assert seed_statistics.floored_variance([0.2, 0.8], 1_000) == pytest.approx(np.var([0.2, 0.8], ddof=1))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name", ["gaussian, sd 3", "bimodal 0.5, slices apart", "bimodal 0.5, slices together", "U-shaped", "tied at 1"]
)
def test_false_wins_are_rare_with_eight_seeds(name):
    """More than 14 of 150 pages are false by chance once in 100 times at a rate of 0.05."""
    distribution = simulated.SAME[name]
    assert simulated.false_wins(distribution, distribution, 8, 1, 150, np.random.default_rng(1)) <= 14 / 150


@pytest.mark.slow
@pytest.mark.parametrize("name", simulated.SAME)
def test_false_wins_are_rare_with_five_seeds(name):
    """More than 31 of 400 pages are false by chance once in 150 times at a rate of 0.05."""
    distribution = simulated.SAME[name]
    assert simulated.false_wins(distribution, distribution, 5, 1, 400, np.random.default_rng(2)) <= 31 / 400


@pytest.mark.slow
def test_false_wins_with_unequal_spread():
    narrow, wide = simulated.gaussian(0.5, 0.01), simulated.gaussian(0.5, 0.05)
    assert simulated.false_wins(narrow, wide, 5, 1, 1_000, np.random.default_rng(2)) <= 0.07


def test_a_large_difference_is_seen():
    distribution, other = simulated.DIFFERENT["0.94 against 0.125"]
    assert simulated.power(distribution, other, 5, 30, np.random.default_rng(0)) == (1, 1)
    distribution, other = simulated.DIFFERENT["bimodal 0.9 against 0.1, together"]
    assert simulated.power(distribution, other, 8, 100, np.random.default_rng(0))[1] == pytest.approx(0.94, abs=0.08)


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_gaffkes_bound_covers_the_mean_of_two_states(share, seeds):
    def two_states(rng):
        return np.where(rng.random(seeds) < share, 1.0, 0.1)

    rng = np.random.default_rng(4)
    held = simulated.coverage(two_states, share + 0.1 * (1 - share), seed_statistics.gaffke_interval, 300, rng)
    assert held >= 0.965


def test_the_floored_t_interval_covers_the_mean_of_normal_numbers():
    rng = np.random.default_rng(5)
    held = simulated.coverage(
        lambda rng: rng.normal(0.5, 0.03, 5), 0.5, lambda values: seed_statistics.t_interval(values, 1_000), 600, rng
    )
    assert held >= 0.94


def test_t_factors_are_those_of_scipy():
    counts = range(2, 301)
    assert [t_factor(count) for count in counts] == pytest.approx(stats.t.ppf(0.975, [n - 1 for n in counts]), abs=1e-9)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_the_interval_of_a_mean_is_that_of_scipy(values):
    low, high = t_interval(values)
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    assert low == pytest.approx(np.mean(values) - half, abs=1e-6)
    assert high == pytest.approx(np.mean(values) + half, abs=1e-6)


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
