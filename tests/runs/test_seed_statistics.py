"""Intervals and verdicts from few seeds: exact values, and error rates on runs with known distributions."""

import importlib.util
import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from canonlm.runs import seed_statistics
from canonlm.runs.seed_statistics import holm, permutation_p, t_factor, t_interval, wilson_interval

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("simulated_pages", ROOT / "benchmarks" / "verdicts.py")
simulated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated)

SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=6)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([1, 1, 1], 0.025 ** (1 / 3), 1),
        ([0.3] * 5, 0.3 * 0.025**0.2, 1 - 0.7 * 0.025**0.2),
        ([0, 0], 0, 1 - 0.025**0.5),
    ],
)
def test_gaffkes_bound_of_equal_values(values, low, high):
    assert seed_statistics.gaffke_interval(values) == pytest.approx((low, high), abs=1e-10)


def exact_share_below(at, values):
    """The probability that the mean of 0 and different positive `values`, weighted at random, is below `at`: divided
    differences, in fractions, as they lose all digits of a float."""
    at, points = Fraction(at), [Fraction(0), *map(Fraction, values)]
    parts = (
        math.prod((point - at) / (point - other) for other in points if other != point)
        for point in points
        if point > at
    )
    return 1 - sum(parts)


@given(values=st.lists(st.integers(1, 999), min_size=1, max_size=9, unique=True), tail=st.sampled_from([0.025, 1e-5]))
@example(values=[1], tail=1e-5)
@settings(deadline=None, max_examples=50)
def test_gaffkes_bound_is_the_quantile_of_the_exact_distribution(values, tail):
    low, high = seed_statistics.gaffke_interval([value / 1000 for value in values], 2 * tail)
    mirrored = [1 - Fraction(value, 1000) for value in values]
    step = Fraction(2) ** (1 - seed_statistics.HALVINGS)
    for bound, points in ((low, [1 - value for value in mirrored]), (1 - high, mirrored)):
        below, above = (float(exact_share_below(Fraction(bound) + each, points)) for each in (-step, step))
        assert below <= tail <= above


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
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_labellings_are_all_choices_the_real_one_first():
    rows = seed_statistics.labellings(3, 7)
    assert {tuple(np.flatnonzero(row)) for row in rows} == set(itertools.combinations(range(7), 3))
    assert len(rows) == math.comb(7, 3)
    assert rows[0].tolist() == [1, 1, 1, 0, 0, 0, 0]
    drawn = seed_statistics.labellings(15, 30)
    assert drawn.shape == (seed_statistics.SAMPLED + 1, 30)
    assert drawn[0].tolist() == [1] * 15 + [0] * 15
    assert (drawn.sum(axis=1) == 15).all()


STEADY = [0.9, 0.9, 0.9, 0.9, 0.9]


@pytest.mark.parametrize("level", [0.05, 0.01])
@pytest.mark.parametrize("seeds", [5, 7])
def test_the_safe_interval_of_runs_that_agree(seeds, level):
    """For n equal values, Gaffke's one-sided bound is the mean times (0.7 level)^(1/n): a failure that n runs do not
    show."""
    unseen = 1 - (0.7 * level) ** (1 / seeds)
    ours, theirs = [0.9] * seeds, [0.2] * seeds
    low, high = seed_statistics.safe_difference(ours, theirs, 1_000, level)
    assert low == pytest.approx(0.7 - math.hypot(unseen * 0.9, unseen * 0.8), abs=1e-9)
    assert high == pytest.approx(0.7 + math.hypot(unseen * 0.1, unseen * 0.2), abs=1e-9)


@given(ours=SHARES, theirs=SHARES)
@settings(deadline=None, max_examples=30)
def test_intervals_of_differences_mirror_and_contain_them(ours, theirs):
    gap = np.mean(ours) - np.mean(theirs)
    for how in (seed_statistics.safe_difference, seed_statistics.normal_difference):
        low, high = how(ours, theirs, 1_000)
        assert low - 1e-9 <= gap <= high + 1e-9
        assert how(theirs, ours, 1_000) == pytest.approx((-high, -low), abs=1e-9)


@given(
    ours=st.lists(st.floats(-9, 9), min_size=3, max_size=6), theirs=st.lists(st.floats(-9, 9), min_size=3, max_size=6)
)
@settings(deadline=None, max_examples=50)
def test_the_normal_interval_is_that_of_welch(ours, theirs):
    assume(np.std(ours) + np.std(theirs) > 1e-3)
    result = stats.ttest_ind(ours, theirs, equal_var=False)
    gap, half = (
        np.mean(ours) - np.mean(theirs),
        stats.t.ppf(0.975, int(result.df + 1e-9))
        * abs(result.confidence_interval(0.95).high - (np.mean(ours) - np.mean(theirs)))
        / stats.t.ppf(0.975, result.df),
    )
    assert seed_statistics.normal_difference(ours, theirs, None) == pytest.approx((gap - half, gap + half), abs=1e-6)


@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_too_few_seeds_decide_nothing(seeds):
    result = seed_statistics.compare({"a": [1.0] * seeds}, {"a": [0.0] * seeds}, 1_000)
    assert (result.state, result.slices) == ("undecided", {})


def test_states_of_comparisons():
    high, low = {"a": [0.99] * 5, "b": [0.5] * 5}, {"a": [0.01] * 5, "b": [0.3] * 5}
    assert seed_statistics.compare({"a": high["a"]}, {"a": low["a"]}, 1_000).state == "higher"
    result = seed_statistics.compare(low, high, 1_000, level=0.5)
    assert (result.state, result.slices) == ("lower", {"a": -1})  # 20 points are not enough for b
    assert seed_statistics.compare(high, high, 1_000).state == "open"
    assert seed_statistics.compare({"a": [1.0] * 9}, {"a": [0.0] * 6}, 1_000).seeds == 6


def test_all_seeds_count_where_one_side_has_more():
    """The first five alone would say that ours are higher."""
    ours, theirs = [0.99] * 5 + [0.02] * 4, [0.05] * 5
    result = seed_statistics.compare({"a": ours}, {"a": theirs}, 100)
    assert (result.state, result.gap) == ("open", pytest.approx(np.mean(ours) - 0.05))
    assert result.safe == pytest.approx(seed_statistics.safe_difference(ours, theirs, 100))


def test_more_pairs_need_more():
    one, six = (seed_statistics.compare({"a": STEADY}, {"a": [0.2] * 5}, 1_000, pairs=pairs) for pairs in (1, 6))
    assert (one.state, six.state) == ("higher", "open")
    assert six.safe.low < one.safe.low
    assert six.normal.low < one.normal.low


@pytest.mark.parametrize("gap", [0.1, 0.3, 0.5])
def test_the_number_of_seeds_that_show_a_difference(gap):
    ours, theirs = [0.9, 0.88], [0.5, 0.52]
    seeds = seed_statistics.seeds_for(ours, theirs, gap)
    visible = [seed_statistics.visible_gap(ours, theirs, each) for each in (seeds - 1, seeds)]
    assert visible[1] <= gap < visible[0]
    assert seed_statistics.seeds_for(ours, theirs, 0.001) is None


@pytest.mark.parametrize(("pairs", "seeds"), [(0, 6), (1, 6), (2, 7), (6, 8), (12, 9), (13, 10)])
def test_a_page_with_more_pairs_needs_more_seeds(pairs, seeds):
    assert seed_statistics.min_seeds(pairs) == seeds
    solved, never = {"": [1.0] * seeds}, {"": [0.0] * seeds}
    assert seed_statistics.compare(solved, never, 1000, pairs=max(1, pairs)).state == "higher"


@given(ours=st.lists(st.floats(1, 9), min_size=5, max_size=7), theirs=st.lists(st.floats(1, 9), min_size=5, max_size=7))
@settings(deadline=None, max_examples=30)
def test_the_interval_of_a_ratio_is_fiellers(ours, theirs):
    """It has every ratio r for which mean(ours) - r mean(theirs) is not significantly different from 0."""
    a, b = np.array(ours), np.array(theirs)
    assume(np.std(a) > 1e-3 < np.std(b))
    result = seed_statistics.compare_ratios({"": ours}, {"": theirs})
    r = a.mean() / b.mean()  # the degrees of freedom are those of a - r b
    t = stats.t.ppf(0.975, max(1, int(stats.ttest_ind(a, r * b, equal_var=False).df + 1e-9)))
    of_a, of_b = (each.var(ddof=1) / len(each) for each in (a, b))
    inside = lambda r: abs(a.mean() - r * b.mean()) <= t * np.sqrt(of_a + r**2 * of_b)  # noqa: E731
    assert inside(1 + result.gap)
    for end, beyond in zip(result.safe, (-1e-4, 1e-4), strict=True):
        assert math.isinf(end) or (inside(1 + end - beyond) and not inside(1 + end + beyond))


def test_the_interval_of_a_large_ratio_contains_it():
    """Where ours is ten times theirs, the uncertainty is theirs; with the degrees of freedom of a - b it is 0.927."""
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(10, 0.3, (4_000, 5)), rng.normal(1, 0.3, (4_000, 5))
    results = [seed_statistics.compare_ratios({"": a}, {"": b}).safe for a, b in zip(ours, theirs, strict=True)]
    assert np.mean([low <= 9 <= high for low, high in results]) > 0.94


def test_floored_variance_of_equal_seeds():
    answers = seed_statistics.floored_variance([0.5, 0.5], 1_000)
    assert answers == pytest.approx(1.9 * 0.25 / 1_000)
    assert seed_statistics.floored_variance([1.0, 1.0], 1_000_000) == seed_statistics.MIN_DEVIATION**2
    assert seed_statistics.floored_variance([0.2, 0.8], 1_000) == pytest.approx(np.var([0.2, 0.8], ddof=1))


@pytest.mark.parametrize("name", [
    "solves with 0.5 / the same", "solves with 0.6 / the same", "solves with 0.8 / steady", "solves with 0.9 / steady",
    "10% fail by 80 points / steady", "solves with 0.5 / solves a part with 0.625", "skewed, sd 7 / sd 1",
])  # fmt: skip
def test_safe_intervals_contain_the_difference(name):
    """Fewer than 270 of 300 intervals of 93 % contain it once in 50 times."""
    law, rng = simulated.EQUAL[name], np.random.default_rng(3)
    assert simulated.coverage(law, seed_statistics.safe_difference, 7, 300, rng) >= 0.9


def test_normal_intervals_of_rare_failures_do_not():
    law, rng = simulated.EQUAL["solves with 0.9 / steady"], np.random.default_rng(3)
    assert simulated.coverage(law, seed_statistics.normal_difference, 5, 200, rng) < 0.6


@pytest.mark.parametrize("name", ["solves with 0.5 / the same", "U-shaped / steady", "all right / the same"])
def test_false_verdicts_are_rare(name):
    """More than 14 of 150 pages are false by chance once in 100 times at a rate of 0.05."""
    first, other = simulated.EQUAL[name]
    rng = np.random.default_rng(1)
    assert simulated.false_pages(lambda: [first.draw(rng, 5), other.draw(rng, 5)], 150) <= 14 / 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seeds"),  # of two similar distributions, such as "the same" and "steady", each has other numbers
    [(name, simulated.SEEDS[(at + at // 2) % len(simulated.SEEDS)]) for at, name in enumerate(simulated.EQUAL)],
)
def test_safe_intervals_in_every_distribution(name, seeds):
    """Fewer than 909 of 1,000 intervals of 93 % contain the difference once in 100 times."""
    rng = np.random.default_rng(2)
    assert simulated.coverage(simulated.EQUAL[name], seed_statistics.safe_difference, seeds, 1_000, rng) >= 0.909


def test_a_large_difference_is_seen():
    clear = simulated.DIFFERENT["0.95 against chance (0.13), sd 2"]
    assert simulated.power(clear, 5, 1, 20, np.random.default_rng(0)) == 1


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_gaffkes_bound_covers_the_mean_of_two_states(share, seeds):
    rng, law = np.random.default_rng(4), simulated.two_state(share, 1.0, 0.1)
    assert simulated.coverage_of_one(law, seed_statistics.gaffke_interval, seeds, 300, rng) >= 0.965


def test_the_floored_t_interval_covers_the_mean_of_normal_numbers():
    rng, law = np.random.default_rng(5), simulated.gaussian(0.5, 0.03)
    assert simulated.coverage_of_one(law, lambda values: t_interval(values, 1_000), 5, 600, rng) >= 0.94


def test_t_factors_are_those_of_scipy():
    counts = range(2, 301)
    for level in (0.05, 0.002):
        expected = stats.t.ppf(1 - level / 2, [n - 1 for n in counts])
        assert [t_factor(count, level) for count in counts] == pytest.approx(expected, rel=1e-8)


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


def test_permutation_p_values_by_hand():
    """Two of the 252 labellings of ten runs have the largest difference; equal runs cannot differ."""
    assert permutation_p([0.9] * 5, [0.1, 0.2, 0.3, 0.2, 0.1]) == pytest.approx(2 / 252)
    assert permutation_p([0.5] * 5, [0.5] * 5) == 1
    assert permutation_p([1, 2], [3]) == pytest.approx(2 / 3)  # |-1.5|, |0|, |1.5|


def test_holm_by_hand():
    """The smallest of four counts four times, and no later one is smaller than an earlier one."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("seeds", [5, 7])
@pytest.mark.parametrize(("high", "low"), [(1.0, 0.0), (1.0, 0.13), (0.9, 0.1), (0.8, 0.0)])
def test_false_verdicts_by_enumeration_where_runs_solve_a_task_or_do_not(seeds, high, low):
    """The first solves it with `share` and scores 1 or 0; the other one has the same mean, and other two scores."""

    different = {
        (i, j): not interval.low <= 0 <= interval.high
        for i in range(seeds + 1)
        for j in range(seeds + 1)
        for interval in [
            seed_statistics.safe_difference([1.0] * i + [0.0] * (seeds - i), [high] * j + [low] * (seeds - j), 10_000)
        ]
    }
    for share in np.linspace(0.05, 0.95, 19).tolist():
        if low <= share <= high:
            ours = stats.binom.pmf(range(seeds + 1), seeds, share)
            theirs = stats.binom.pmf(range(seeds + 1), seeds, (share - low) / (high - low))
            assert sum(ours[i] * theirs[j] for (i, j), verdict in different.items() if verdict) <= 0.05
