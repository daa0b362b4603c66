"""Speed factors: exact cases, and coverage on steps whose true factor is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from canonlm.runs.speed import equal_speed_p, speed_factor

FAST, SLOW = [100, 120, 150, 100, 130, 110, 110], [300, 350, 400, 300, None, 310, 300]


def test_the_factor_of_runs_that_are_three_times_faster():
    speed = speed_factor(FAST, SLOW, 600)
    assert speed.factor == pytest.approx(3, rel=0.05)
    assert 2 < speed.low < speed.factor < speed.high == 600 / 110  # the run that is cut may be later still
    assert speed.reached == (7, 6)


def test_runs_that_never_reach_the_score_bound_the_factor_on_one_side():
    ahead, behind = speed_factor(FAST, [None] * 7, 600), speed_factor([None] * 7, FAST, 600)
    assert (ahead.factor, ahead.high) == (math.inf, math.inf)
    assert ahead.low > 4  # 600 / 150, and steps of the fast ones differ
    assert (behind.factor, behind.low) == (0, 0)
    assert behind.high == pytest.approx(1 / ahead.low)


@pytest.mark.parametrize("ours", [[None] * 5, [100, None, None, None, None]])
def test_too_few_runs_that_reach_the_score_say_nothing(ours):
    assert speed_factor(ours, [None] * 5, 600) is None


def test_a_step_lies_before_the_evaluation_that_sees_it():
    """All of ours are seen at 200 and all of theirs at 400, with an evaluation every 100 steps: 300/200 to 400/100."""
    exact = speed_factor([200] * 6, [400] * 6, 600)
    assert (exact.low, exact.factor, exact.high) == pytest.approx((2, 2, 2))
    seen = speed_factor([200] * 6, [400] * 6, 600, every=100)
    assert (seen.low, seen.factor, seen.high) == pytest.approx((1.5, 2, 4))


def test_no_factor_makes_many_equal_runs_equally_often_earlier():
    """Below 2, six in ten of theirs are later than ours; above it none is. So it is 2, where two steps are equal."""
    speed = speed_factor([200] * 90, [100] * 35 + [400] * 55, 600)
    assert (speed.low, speed.factor, speed.high) == pytest.approx((0.5, 2, 2))


STEPS = st.lists(st.one_of(st.none(), st.integers(1, 60).map(lambda step: 10 * step)), min_size=5, max_size=7)


@given(ours=STEPS, theirs=STEPS)
@settings(deadline=None, max_examples=25)
def test_the_other_way_round_it_is_the_inverse(ours, theirs):
    there, back = speed_factor(ours, theirs, 600), speed_factor(theirs, ours, 600)
    assert (there is None) == (back is None)
    if there and back:
        assert there.low <= there.factor <= there.high
        invert = lambda value: math.inf if value == 0 else 1 / value  # noqa: E731
        assert there.low == pytest.approx(invert(back.high))
        assert there.factor == pytest.approx(invert(back.factor))
        assert there.high == pytest.approx(invert(back.low))


@given(a=st.lists(st.integers(1, 9), min_size=4, max_size=6), b=st.lists(st.integers(1, 9), min_size=4, max_size=6))
@settings(deadline=None, max_examples=25)
def test_without_censoring_the_test_is_that_of_wilcoxon(a, b):
    exact = stats.permutation_test(
        (a, b), lambda x, y: abs(stats.mannwhitneyu(x, y).statistic - len(x) * len(y) / 2),
        permutation_type="independent", alternative="greater", n_resamples=10_000, vectorized=False,
    )  # fmt: skip
    assert equal_speed_p(a, b, 10) == pytest.approx(exact.pvalue, abs=1e-9)


@pytest.mark.parametrize("steps", [(200, 400), (150, None), (100, 550)])
@pytest.mark.parametrize(("steady", "others"), [(n, n) for n in range(5, 11)] + [(7, 12), (12, 7), (5, 20)])
def test_where_all_of_one_are_between_the_two_states_of_the_other_none_is_faster(steady, others, steps):
    """Each run of the other is early or late with probability one half. By enumeration, one is called faster in 5 % of
    cases or fewer. That is the worst case, so six runs are the fewest that can show it."""
    called = 0.0
    for early in range(others + 1):
        theirs = [steps[0]] * early + [steps[1]] * (others - early)
        speed = speed_factor([300] * steady, theirs, 600)
        called += math.comb(others, early) / 2**others * (speed is not None and not speed.low <= 1 <= speed.high)
    assert called <= 0.05
    if min(steady, others) > 5:
        assert speed_factor([300] * steady, [steps[0]] * others, 600).high < 1


@pytest.mark.parametrize(("seeds", "factor"), [(6, 1.0), (7, 2.0), (7, 3.0)])
def test_nineteen_of_twenty_intervals_contain_the_true_factor(seeds, factor):
    rng, held = np.random.default_rng(seeds), 0
    for _ in range(150):
        drawn = 200 * np.exp(0.3 * rng.normal(size=(2, seeds))) * [[1], [factor]]
        ours, theirs = ([None if step > 600 else 25 * math.ceil(step / 25) for step in row] for row in drawn.tolist())
        speed = speed_factor(ours, theirs, 600)
        held += speed.low <= factor <= speed.high
    assert held >= 136  # fewer once in 100 times at 95 %
