"""The statistics against hand computation and against scipy."""

import statistics

import pytest
from folders import capo_bits, evaluation, write_run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from canonlm.report import differences, fairness, load_runs, summarise, wilson
from canonlm.report.summary import (
    at_most,
    columns_of,
    counterpart,
    measures_of,
    scales_of,
    slices_of,
    spread,
    spread_of,
)
from canonlm.runs.rows import Count


def grid(tmp_path, cells):
    """`cells`: (arch, lr, seed, correct of 100 at k=1, correct of 100 at k=2, finished)."""
    folders = []
    for arch, lr, seed, one, two, *finished in cells:
        folder = tmp_path / f"run{len(folders)}"
        write_run(folder, arch=arch, lr=lr, seed=seed, finished=finished != [False],
                  evals=[evaluation(10, {("k", 1): (one, 100), ("k", 2): (two, 100)})],
                  speed=1000.0 * (seed + 1), params=10 if arch == "llama" else 12)  # fmt: skip
        folders.append(folder)
    runs, left_out = load_runs(folders)
    assert not left_out
    return runs


def test_the_best_rate_and_the_spread_by_hand(tmp_path):
    runs = grid(tmp_path, [
        ("llama", 0.1, 0, 20, 10), ("llama", 0.1, 1, 30, 10), ("llama", 0.1, 2, 40, 10),
        ("llama", 0.2, 0, 21, 10), ("llama", 0.2, 1, 22, 10), ("llama", 0.2, 2, 23, 10),
        ("llama+canon", 0.1, 0, 90, 50), ("llama+canon", 0.1, 1, 80, 60), ("llama+canon", 0.1, 2, 97, 10),
    ])  # fmt: skip
    plain, canon = summarise(runs)
    assert (plain.arch, canon.arch) == ("llama", "llama+canon")
    assert plain.best.lr == 0.1
    assert plain.best.mean == pytest.approx(((20 + 10) + (30 + 10) + (40 + 10)) / 6 / 100)
    one = plain.best.slices["k=1"]
    half = stats.t.ppf(0.975, 2) * stats.sem([0.2, 0.3, 0.4])
    assert (one.mean, one.low, one.high) == (pytest.approx(0.3), pytest.approx(0.3 - half), pytest.approx(0.3 + half))
    assert (one.runs, one.values, one.kind) == (3, (0.2, 0.3, 0.4), "95% t-interval over 3 runs")
    assert (plain.parameters, canon.parameters) == (10, 12)
    assert plain.tokens_per_s == 2000.0
    gaps = {d.key: d for d in differences(plain, canon)}
    assert gaps["k=1"].mean == pytest.approx((0.7 + 0.5 + 0.57) / 3)
    truth = stats.ttest_rel([0.9, 0.8, 0.97], [0.2, 0.3, 0.4]).confidence_interval(0.95)
    assert (gaps["k=1"].low, gaps["k=1"].high) == (pytest.approx(truth.low), pytest.approx(truth.high))
    assert (gaps["k=1"].values, gaps["k=1"].pairs) == (pytest.approx((0.7, 0.5, 0.57)), 3)
    assert gaps["k=1"].means == (pytest.approx(0.89), pytest.approx(0.3))
    truth = stats.ttest_rel([0.5, 0.6, 0.1], [0.1, 0.1, 0.1]).confidence_interval(0.95)
    assert (gaps["k=2"].low, gaps["k=2"].high) == (pytest.approx(truth.low), pytest.approx(truth.high))
    assert slices_of([plain, canon]) == ["k=1", "k=2"]


def test_a_rate_does_not_win_by_its_survivors(tmp_path):
    runs = grid(tmp_path, [("llama", 0.1, 0, 50, 50), ("llama", 0.1, 1, 50, 50),
                           ("llama", 0.9, 0, 99, 99), ("llama", 0.9, 1, 0, 0, False)])  # fmt: skip
    (only,) = summarise(runs)
    assert only.best.lr == 0.1
    assert [rate.finished_of for rate in only.rates] == ["2", "1 of 2"]


def test_of_equal_rates_the_smallest(tmp_path):
    (only,) = summarise(grid(tmp_path, [("llama", 0.2, 0, 50, 50), ("llama", 0.1, 0, 50, 50)]))
    assert only.best.lr == 0.1


def test_nothing_finished(tmp_path):
    (only,) = summarise(grid(tmp_path, [("llama", 0.1, 0, 50, 50, False)]))
    assert only.best is None
    assert only.tokens_per_s is None
    assert fairness([only]) == ["Fewer than 3 learning rates were tried: one architecture may suit them by luck."]


def test_different_seeds_are_not_paired(tmp_path):
    plain, canon = summarise(grid(tmp_path, [("llama", 0.1, 0, 20, 10), ("llama+canon", 0.1, 1, 90, 50)]))
    assert differences(plain, canon) == []
    assert any("do not have the same seeds: llama 0; llama+canon 1" in note for note in fairness([plain, canon]))


def test_a_fair_grid_has_nothing_held_against_it(tmp_path):
    cells = [(arch, lr, seed, 90 if lr == 0.2 else 10, 10)
             for arch in ("llama", "llama+canon") for lr in (0.1, 0.2, 0.3) for seed in range(3)]  # fmt: skip
    assert fairness(summarise(grid(tmp_path, cells))) == []


def test_what_is_held_against_an_unfair_grid(tmp_path):
    cells = [("llama", lr, seed, int(100 * lr), 10) for lr in (0.1, 0.2, 0.3) for seed in range(3)]
    cells += [("llama+canon", 0.1, 0, 50, 50), ("llama+canon", 0.1, 0, 50, 50)]
    notes = fairness(summarise(grid(tmp_path, cells)))
    assert "The architectures did not finish the same learning rates: llama 0.1, 0.2, 0.3; llama+canon 0.1." in notes
    assert "The best rate of llama, 0.3, is at the edge of those tried; a larger one might do better." in notes
    assert (
        "llama+canon, learning rate 0.1, seed 0 was run more than once: the mean of these counts as one run." in notes
    )


def test_a_seed_that_was_run_twice_is_no_second_seed(tmp_path):
    plain, canon = summarise(grid(tmp_path, [
        ("llama", 0.1, 0, 10, 7), ("llama", 0.1, 0, 30, 7), ("llama", 0.1, 1, 40, 7),
        ("llama+canon", 0.1, 0, 50, 7), ("llama+canon", 0.1, 0, 90, 7),
    ]))  # fmt: skip
    assert plain.best.slices["k=1"].values == (pytest.approx(0.2), 0.4)
    assert plain.best.score.runs == plain.best.repeats == 2
    only = canon.best.slices["k=1"]
    assert (only.mean, only.runs) == (pytest.approx(0.7), 1)
    truth = stats.binomtest(70, 100).proportion_ci(0.95, "wilson")  # of 100 answers, and not of 200
    assert (only.low, only.high) == (pytest.approx(truth.low, abs=1e-6), pytest.approx(truth.high, abs=1e-6))
    (gap, _) = differences(plain, canon)
    assert (gap.mean, gap.pairs) == (pytest.approx(0.5), 1)


def test_a_rate_does_not_win_by_running_one_seed_twice(tmp_path):
    cells = [("llama", 0.1, 0, 10, 10), ("llama", 0.1, 0, 10, 10), ("llama", 0.2, 0, 50, 50)]
    (only,) = summarise(grid(tmp_path, cells))
    assert only.best.lr == 0.2


def test_a_single_run_has_a_binomial_interval(tmp_path):
    (only,) = summarise(grid(tmp_path, [("llama", 0.1, 0, 50, 0)]))
    half, none = only.best.slices["k=1"], only.best.slices["k=2"]
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert (none.low, none.high) == (0.0, pytest.approx(0.0370, abs=1e-4))
    assert half.kind == "95% interval of one run"


def test_runs_that_score_the_same_have_the_interval_of_all_their_answers(tmp_path):
    """And the difference of such runs, worked out by hand: 0 and 1 of 100, twice, may well be luck; 0 and 40 not."""
    cells = [(arch, 0.1, seed, *right) for arch, right in (("llama", (0, 0)), ("llama+canon", (1, 40)))
             for seed in (0, 1)]  # fmt: skip
    plain, canon = summarise(grid(tmp_path, cells))
    spreads = [*plain.best.slices.values(), *canon.best.slices.values()]
    for found, correct in zip(spreads, (0, 0, 2, 80), strict=True):
        truth = stats.binomtest(correct, 200).proportion_ci(0.95, "wilson")
        assert (found.low, found.high) == (pytest.approx(truth.low, abs=1e-6), pytest.approx(truth.high, abs=1e-6))
        assert (found.runs, found.kind) == (2, "95% interval of 2 equal runs")
    luck, none = differences(plain, canon)
    assert (luck.mean, luck.low, luck.high) == (0.01, pytest.approx(-0.0102, abs=1e-4), pytest.approx(0.0357, abs=1e-4))
    assert luck.low < 0 < none.low
    assert none.low > 0.3


def test_one_pair_has_no_interval(tmp_path):
    plain, canon = summarise(grid(tmp_path, [("llama", 0.1, 0, 0, 10), ("llama+canon", 0.1, 0, 100, 10)]))
    gap = differences(plain, canon)[0]
    assert (gap.mean, gap.low, gap.high, gap.pairs) == (1.0, 1.0, 1.0, 1)


scores = st.lists(st.integers(0, 1000), min_size=2, max_size=12)


@given(counts=scores)
def test_intervals_of_accuracies_equal_scipy_inside_what_an_accuracy_can_be(counts):
    found = spread([Count(count, 1000) for count in counts])
    shares = [count / 1000 for count in counts]
    if len(set(counts)) == 1:
        truth = stats.binomtest(sum(counts), 1000 * len(counts)).proportion_ci(0.95, "wilson")
        low, high = truth.low, truth.high
    else:
        low, high = stats.t.interval(0.95, len(shares) - 1, statistics.fmean(shares), stats.sem(shares))
    assert found.low == pytest.approx(max(0.0, low), abs=1e-6)
    assert found.high == pytest.approx(min(1.0, high), abs=1e-6)
    assert 0 <= found.low <= found.mean <= found.high <= 1


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12))
def test_intervals_of_measures_are_not_cut(values):
    found = spread_of(values)
    if len(set(values)) == 1:
        assert (found.low, found.high, found.kind) == (values[0], values[0], f"{len(values)} equal runs")
    else:
        half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        assert found.mean - found.low == pytest.approx(half, rel=1e-6, abs=1e-9)
        assert found.high - found.mean == pytest.approx(half, rel=1e-6, abs=1e-9)


@given(total=st.integers(1, 5000), share=st.floats(0, 1))
def test_wilson_equals_scipy(total, share):
    correct = round(total * share)
    low, high = wilson(Count(correct, total))
    truth = stats.binomtest(correct, total).proportion_ci(0.95, "wilson")
    assert low == pytest.approx(truth.low, abs=1e-6)
    assert high == pytest.approx(truth.high, abs=1e-6)
    assert 0 <= low <= correct / total <= high <= 1


CAPO = {"name": "capo", "people": 1000}


def capo(tmp_path, cells, task=CAPO):
    """`cells`: (arch, lr, seed, share known, bits per parameter or None, parameters)."""
    folders = []
    for arch, lr, seed, share, bits, params, *finished in cells:
        measures = None if bits is None else {"bits_per_parameter": bits, "bits_per_person": bits * params / 1000}
        row = evaluation(10, {("attribute", "field"): (share, 100), ("question", "field"): (0, 9)}, measures=measures)
        folders.append(write_run(tmp_path / f"run{len(folders)}", arch=arch, lr=lr, seed=seed, task=task, evals=[row],
                                 params=params, config={"model": {"hidden_size": params}},
                                 finished=finished != [False]))  # fmt: skip
    return load_runs(folders)[0]


def test_capo_goes_by_bits_per_parameter_and_not_by_accuracy(tmp_path):
    (only,) = summarise(capo(tmp_path, [("llama", 0.1, 0, 90, 1.0, 50), ("llama", 0.1, 1, 90, 1.5, 50),
                                        ("llama", 0.2, 0, 10, 1.75, 50), ("llama", 0.2, 1, 10, 1.25, 50)]))  # fmt: skip
    assert only.score == "bits_per_parameter"
    assert (only.best.lr, only.best.mean) == (0.2, 1.5)
    bits = only.best.measures["bits_per_parameter"]
    half = stats.t.ppf(0.975, 1) * stats.sem([1.25, 1.75])
    assert (bits.mean, bits.low, bits.high) == (1.5, pytest.approx(1.5 - half), pytest.approx(1.5 + half))
    assert (bits.runs, bits.kind) == (2, "95% t-interval over 2 runs")


def test_where_no_run_has_bits_capo_goes_by_accuracy(tmp_path):
    runs = capo(tmp_path, [("llama", 0.1, 0, 90, None, 50), ("llama", 0.2, 0, 10, None, 50)])
    (only,) = summarise(runs)
    assert (only.score, only.best.lr, only.best.mean) == ("", 0.1, 0.9)


def test_a_rate_that_diverged_in_one_run_does_not_win_by_the_other(tmp_path):
    nan = float("nan")
    (only,) = summarise(capo(tmp_path, [("llama", 0.1, 0, 90, 1.0, 50), ("llama", 0.1, 1, 90, 1.0, 50),
                                        ("llama", 0.2, 0, 90, 9.0, 50), ("llama", 0.2, 1, 90, nan, 50)]))  # fmt: skip
    assert only.best.lr == 0.1
    assert [rate.score.runs for rate in only.rates] == [2, 1]


def test_an_architecture_without_the_measure_has_no_score_among_those_with_it(tmp_path):
    new, old = summarise(capo(tmp_path, [("llama", 0.1, 0, 50, 1.0, 50), ("gdn2", 0.1, 0, 99, None, 50),
                                         ("gdn2", 0.2, 0, 50, None, 50)]))  # fmt: skip
    assert (new.score, old.score) == ("bits_per_parameter", "bits_per_parameter")
    assert (new.best.mean, old.best.mean) == (1.0, None)
    assert columns_of([new, old]) == ["bits_per_parameter", "attribute=field", "bits_per_person"]


def test_a_measure_of_one_run_has_no_interval(tmp_path):
    (only,) = summarise(capo(tmp_path, [("llama", 0.1, 0, 50, 1.0, 50)]))
    bits = only.best.measures["bits_per_parameter"]
    assert (bits.low, bits.high, bits.kind) == (1.0, 1.0, "one run")


def test_measures_are_paired_by_seed_like_accuracies(tmp_path):
    plain, canon = summarise(capo(tmp_path, [
        ("llama", 0.1, 0, 50, 1.0, 50), ("llama", 0.1, 1, 50, 2.0, 50), ("llama", 0.1, 5, 50, 9.0, 50),
        ("llama+canon", 0.1, 1, 60, 2.25, 50), ("llama+canon", 0.1, 0, 60, 2.0, 50),
    ]))  # fmt: skip
    gaps = {d.key: d for d in differences(plain, canon)}
    bits = gaps["bits_per_parameter"]
    truth = stats.ttest_rel([2.0, 2.25], [1.0, 2.0]).confidence_interval(0.95)
    assert (bits.mean, bits.values, bits.pairs) == (0.625, (1.0, 0.25), 2)
    assert (bits.low, bits.high) == (pytest.approx(truth.low), pytest.approx(truth.high))
    assert bits.means == (2.125, 1.5)  # without seed 5, which one of them has
    assert bits.low < 0 < bits.high
    assert gaps["attribute=field"].mean == pytest.approx(0.1)


@pytest.mark.parametrize(("share", "params"), [(0.5, 40_000), (1.0, 1_000), (0.001, 7)])
def test_the_most_bits_per_parameter_are_all_bits_over_all_parameters(run_folder, share, params):
    rows = [evaluation(step, {("attribute", "field"): (0, 1)}, measures=capo_bits(known, params, people=250))
            for step, known in ((0, 0.0), (1, share), (2, 0.0))]  # fmt: skip
    (run,) = load_runs([run_folder(task=CAPO, evals=rows, params=params)])[0]
    assert at_most(run, "bits_per_parameter") == pytest.approx(65.0 * 250 / params)
    assert at_most(run, "bits_per_person") == 65.0
    assert at_most(run, "kl") is None
    nothing = run_folder("nothing", task=CAPO, evals=rows[:1], params=params)  # nothing stored yet: not known
    assert at_most(load_runs([nothing])[0][0], "bits_per_parameter") is None


def test_bounds_are_no_measures_and_scales_keep_apart(run_folder):
    row = evaluation(1, {("attribute", "b"): (1, 2), ("attribute", "a"): (1, 2), ("question", "b"): (1, 2)},
                     measures=capo_bits(0.5, 10) | {"other": 1.0})  # fmt: skip
    archs = summarise(load_runs([run_folder(task=CAPO, evals=[row])])[0])
    assert measures_of(archs) == ["bits_per_parameter", "bits_per_person", "other"]
    assert scales_of(archs) == [["attribute=b", "attribute=a"], ["question=b"]]
    assert columns_of(archs) == ["bits_per_parameter", "attribute=b", "attribute=a", "bits_per_person", "other"]


def test_models_of_different_size_are_not_repeats_of_each_other(tmp_path):
    archs = summarise(capo(tmp_path, [
        ("llama", 0.1, 0, 50, 2.0, 4_000_000), ("llama", 0.2, 0, 50, 0.0, 4_000_000, False),
        ("llama", 0.1, 0, 50, 1.0, 1_000_000), ("llama", 0.2, 0, 50, 1.5, 1_000_000),
        ("llama+canon", 0.1, 0, 50, 1.2, 1_010_000), ("llama", 0.2, 0, 50, 0.0, 9_000_000, False),
    ]))  # fmt: skip
    assert [a.arch for a in archs] == ["llama (1 M)", "llama (4 M)", "llama (size unknown)", "llama+canon"]
    assert [a.family for a in archs] == ["llama"] * 3 + ["llama+canon"]
    assert [(a.best.lr, a.best.mean) if a.best else None for a in archs] == [(0.2, 1.5), (0.1, 2.0), None, (0.1, 1.2)]
    assert [sum(rate.unfinished for rate in a.rates) for a in archs] == [0, 1, 1, 0]
    assert counterpart(archs[:2], archs[3]).arch == "llama (1 M)"


def test_sizes_that_round_alike_are_told_apart(tmp_path):
    archs = summarise(capo(tmp_path, [("llama", 0.1, 0, 50, 2.0, 1_000_001), ("llama", 0.1, 0, 50, 1.0, 1_000_002)]))
    assert [a.arch for a in archs] == ["llama (1,000,001)", "llama (1,000,002)"]
