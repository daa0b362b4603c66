"""The statistics against hand computation and against scipy."""

import pytest
from folders import evaluation, write_run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from canonlm.report import differences, fairness, load_runs, summarise, wilson
from canonlm.report.runs import Count
from canonlm.report.summary import slices_of


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
    assert (one.mean, one.low, one.high, one.runs) == (pytest.approx(0.3), 0.2, 0.4, 3)
    assert (plain.parameters, canon.parameters) == (10, 12)
    assert plain.tokens_per_s == 2000.0
    gaps = {d.key: d for d in differences(plain, canon)}
    assert gaps["k=1"].mean == pytest.approx((0.7 + 0.5 + 0.57) / 3)
    assert (gaps["k=1"].low, gaps["k=1"].high, gaps["k=1"].pairs) == (pytest.approx(0.5), pytest.approx(0.7), 3)
    assert gaps["k=2"].low == pytest.approx(0.0)
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
    assert "llama+canon, learning rate 0.1, seed 0 was run more than once; all count." in notes


def test_a_single_run_has_a_binomial_interval(tmp_path):
    (only,) = summarise(grid(tmp_path, [("llama", 0.1, 0, 50, 0)]))
    half, none = only.best.slices["k=1"], only.best.slices["k=2"]
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert (none.low, none.high) == (0.0, pytest.approx(0.0370, abs=1e-4))
    assert half.kind == "95% interval of one run"


@given(total=st.integers(1, 5000), share=st.floats(0, 1))
def test_wilson_equals_scipy(total, share):
    correct = round(total * share)
    low, high = wilson(Count(correct, total))
    truth = stats.binomtest(correct, total).proportion_ci(0.95, "wilson")
    assert low == pytest.approx(truth.low, abs=1e-6)
    assert high == pytest.approx(truth.high, abs=1e-6)
    assert 0 <= low <= correct / total <= high <= 1
