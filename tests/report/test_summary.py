"""The statistics against hand computation and against scipy."""

import math
import statistics

import numpy as np
import pytest
from folders import capo_bits, evaluation, write_run
from hypothesis import given
from hypothesis import strategies as st
from reading import visible_text
from scipy import stats

from canonlm.report import differences, fairness, load_play, read_runs, render, summarise, wilson
from canonlm.report.format import percent, small_of
from canonlm.report.sentences import choice
from canonlm.report.table import tables
from canonlm.runs.rows import Count
from canonlm.runs.seed_statistics import spread_of
from canonlm.runs.summary import at_most, columns_of, compared_of, counterpart, measures_of, scales_of, slices_of


def grid(tmp_path, cells):
    """`cells`: (arch, lr, seed, correct of 100 at k=1, correct of 100 at k=2, finished)."""
    folders = []
    for arch, lr, seed, one, two, *finished in cells:
        folder = tmp_path / f"run{len(folders)}"
        write_run(folder, arch=arch, lr=lr, seed=seed, finished=finished != [False],
                  evals=[evaluation(10, {("k", 1): (one, 100), ("k", 2): (two, 100)})],
                  speed=1000.0 * (seed + 1), params=10 if arch == "llama" else 12)  # fmt: skip
        folders.append(folder)
    runs, left_out = read_runs(folders)
    assert not left_out
    return runs


def gaffke_ends(values, level=0.05):
    """Gaffke's bounds, from weights of another generator than ours: gaps between sorted uniform numbers."""
    cuts = np.sort(np.random.default_rng(1).random((100_000, len(values))), axis=1)
    weights = np.diff(cuts, prepend=0.0, append=1.0)
    low, high = weights @ [*sorted(values), 0.0], weights @ [*sorted(values), 1.0]
    return np.quantile(low, level / 2), np.quantile(high, 1 - level / 2)


def gaffke(values):
    return tuple(pytest.approx(end, abs=0.01) for end in gaffke_ends(values))


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
    assert (one.mean, one.low, one.high) == (pytest.approx(0.3), *gaffke([0.2, 0.3, 0.4]))
    assert (one.runs, one.values, one.kind) == (3, (0.2, 0.3, 0.4), "95% interval over 3 runs")
    assert (plain.parameters, canon.parameters) == (10, 12)
    assert plain.tokens_per_s == 2000.0
    gaps = differences(plain, canon)
    assert gaps["k=1"].mean == pytest.approx((0.7 + 0.5 + 0.57) / 3)
    (low, high), (other_low, other_high) = (gaffke_ends(each, 0.07) for each in ([0.9, 0.8, 0.97], [0.2, 0.3, 0.4]))
    assert gaps["k=1"].low == pytest.approx(0.59 - math.hypot(0.89 - low, other_high - 0.3), abs=0.01)
    assert gaps["k=1"].high == pytest.approx(0.59 + math.hypot(high - 0.89, 0.3 - other_low), abs=0.01)
    assert (gaps["k=1"].values, gaps["k=1"].pairs) == (pytest.approx((0.7, 0.5, 0.57)), 3)
    assert slices_of([plain, canon]) == ["k=1", "k=2"]


@pytest.mark.parametrize("finished", [True, False])
def test_validation_runs_select_the_rate_where_the_test_has_runs(tmp_path, finished):
    """0.1 is best on the test, 0.2 on validation samples."""
    folders = []
    for lr, seed, split, right in [(0.1, 0, "test", 90), (0.2, 0, "test", 60), (0.1, 100, "validation", 50),
                                   (0.2, 100, "validation", 70)]:  # fmt: skip
        train = {"steps": 10, "batch_size": 32, "seed": seed, "optim": {"lr": lr}, "eval_split": split}
        folders.append(tmp_path / f"run{len(folders)}")
        write_run(folders[-1], lr=lr, seed=seed, evals=[evaluation(10, {("k", 1): (right, 100)})],
                  config={"train": train}, finished=finished or lr == 0.1 or split != "test")  # fmt: skip
    archs = summarise(read_runs(folders)[0])
    [shown] = [arch for arch in archs if 0 in {run.seed for rate in arch.rates for run in rate.runs}]
    [other] = [arch for arch in archs if arch is not shown]
    assert (shown.best.lr, shown.validated) == ((0.2, True) if finished else (0.1, False))
    assert (other.best.lr, other.validated) == (0.2, False)
    assert ("these choose it" in choice(archs)) == finished
    assert "looks better than it is, by 0.6 standard errors" in choice([other])


@pytest.mark.parametrize("until", [None, 0.9])
def test_runs_that_ended_early_have_a_caveat(tmp_path, until):
    for step, lr in ((3, 0.1), (10, 0.2)):
        train = {"steps": 10, "batch_size": 8, "seed": 0, "optim": {"lr": lr}, "until": until}
        write_run(tmp_path / str(lr), lr=lr, evals=[evaluation(step, {("k", 1): (91, 100)})], config={"train": train})
    first, *_ = fairness(summarise(read_runs(tmp_path.iterdir())[0]))
    assert first.startswith("Runs ended once enough was right (train.until)") == (until is not None)


def test_runs_that_choose_rates_are_not_compared(tmp_path):
    """As in the folder of `canonlm profile`: three rates on validation samples, then fresh seeds at the best one."""
    for number, (arch, lr, seed) in enumerate(
        [*((arch, lr, 100) for arch in ("llama", "gla5") for lr in (0.1, 0.2, 0.3)),
         *((arch, 0.2, seed) for arch in ("llama", "gla5") for seed in range(5))]
    ):  # fmt: skip
        split = "validation" if seed == 100 else "test"
        right = 30 + 60 * (lr == 0.2) + (arch == "gla5")
        train = {"steps": 10, "batch_size": 8, "seed": seed, "optim": {"lr": lr}, "eval_split": split}
        write_run(tmp_path / "runs" / str(number), arch=arch, lr=lr, seed=seed,
                  evals=[evaluation(10, {("k", 1): (right, 100)})], config={"train": train})  # fmt: skip
    play = load_play(tmp_path)
    archs = compared_of(play.sections[0].architectures)
    assert {a.arch: (a.best.lr, a.best.seeds) for a in archs} == {
        "gla5": (0.2, (0, 1, 2, 3, 4)),
        "llama": (0.2, (0, 1, 2, 3, 4)),
    }
    assert fairness(archs) == []  # three rates of each, and the best is not at their edge
    assert next(tables(play)).row_count == 2
    text = visible_text(render(play))
    assert "no difference is shown between gla5 and llama: 91.0% and 90.0%" in text
    assert "llama − gla5" in text
    assert "llama (eval_split=validation) 0.1" in " ".join(text.split())  # among all runs


@pytest.mark.parametrize(
    ("cells", "best", "finished_of", "passed_over"),
    [
        # not by its survivors
        ([(0.1, 0, 50), (0.1, 1, 50), (0.9, 0, 99), (0.9, 1, 0, False)], 0.1, ["2", "1 of 2"], [0.9]),
        ([(0.1, 0, 50), (0.1, 1, 50), (0.9, 0, 49), (0.9, 1, 0, False)], 0.1, ["2", "1 of 2"], []),
        # of equal rates the smallest
        ([(0.2, 0, 50), (0.1, 0, 50)], 0.1, ["1", "1"], []),
        # not by running one seed twice
        ([(0.1, 0, 10), (0.1, 0, 10), (0.2, 0, 50)], 0.2, ["1", "1"], []),
    ],
)
def test_the_best_rate(tmp_path, cells, best, finished_of, passed_over):
    """`cells`: (learning rate, seed, correct of 100, finished)."""
    runs = grid(tmp_path, [("llama", lr, seed, right, right, *done) for lr, seed, right, *done in cells])
    (only,) = summarise(runs)
    assert only.best.lr == best
    assert [rate.finished_of for rate in only.rates] == finished_of
    assert [note for note in fairness([only]) if "fewer seeds" in note] == [
        f"At learning rate {lr}, llama does better than at {best}, which is shown, but fewer seeds have a score there "
        "(1 against 2)."
        for lr in passed_over
    ]


def test_of_equally_good_rates_the_one_with_the_lowest_loss(tmp_path):
    for lr, loss in ((0.1, 0.5), (0.2, 0.3), (0.3, 0.4)):
        write_run(tmp_path / str(lr), lr=lr, evals=[evaluation(10, {("k", 1): (100, 100)}, loss)])
    (only,) = summarise(read_runs([tmp_path / str(lr) for lr in (0.1, 0.2, 0.3)])[0])
    assert only.best.lr == 0.2


def test_nothing_finished(tmp_path):
    (only,) = summarise(grid(tmp_path, [("llama", 0.1, 0, 50, 50, False)]))
    assert only.best is None
    assert only.tokens_per_s is None
    assert fairness([only]) == ["Fewer than 3 learning rates were tried: another one may do better."]
    more = "Fewer than 3 learning rates were tried: they may suit one architecture by luck."
    assert fairness(summarise(grid(tmp_path / "two", [(arch, 0.1, 1, 50, 50, False) for arch in ("a", "b")]))) == [more]


def test_different_seeds_are_not_paired(tmp_path):
    plain, canon = summarise(grid(tmp_path, [("llama", 0.1, 0, 20, 10), ("llama+canon", 0.1, 1, 90, 50)]))
    assert differences(plain, canon) == {}
    assert any("do not have the same seeds: llama 0; llama+canon 1" in note for note in fairness([plain, canon]))


def test_a_fair_grid_has_no_objections(tmp_path):
    cells = [(arch, lr, seed, 90 if lr == 0.2 else 10, 10)
             for arch in ("llama", "llama+canon") for lr in (0.1, 0.2, 0.3) for seed in range(3)]  # fmt: skip
    assert fairness(summarise(grid(tmp_path, cells))) == []


def test_objections_to_an_unfair_grid(tmp_path):
    cells = [("llama", lr, seed, int(100 * lr), 10) for lr in (0.1, 0.2, 0.3) for seed in range(3)]
    cells += [("llama+canon", 0.1, 0, 50, 50), ("llama+canon", 0.1, 0, 50, 50)]
    notes = fairness(summarise(grid(tmp_path, cells)))
    assert "The architectures did not finish the same learning rates: llama 0.1, 0.2, 0.3; llama+canon 0.1." in notes
    assert "The best rate of llama, 0.3, is at the edge of those tried; a larger one might do better." in notes
    assert (
        "llama+canon, learning rate 0.1, seed 0 was run more than once: the mean of these counts as one run." in notes
    )


def test_a_seed_without_a_score_is_not_counted(tmp_path):
    runs = capo(tmp_path, [("llama", 0.1, seed, 50, None if seed == 2 else 1.0, 50) for seed in range(3)])
    assert "Fewer than 3 seeds: the spread between repeats is not well known." in fairness(summarise(runs))


def test_a_repeated_seed_is_not_a_second_seed(tmp_path):
    plain, canon = summarise(grid(tmp_path, [
        ("llama", 0.1, 0, 10, 7), ("llama", 0.1, 0, 30, 7), ("llama", 0.1, 1, 40, 7),
        ("llama+canon", 0.1, 0, 50, 7), ("llama+canon", 0.1, 0, 90, 7),
    ]))  # fmt: skip
    assert plain.best.slices["k=1"].values == (pytest.approx(0.2), 0.4)
    assert plain.best.score.runs == plain.best.repeats == plain.best.planned == 2
    assert (plain.best.finished_of, canon.best.finished_of) == ("2", "1")
    only = canon.best.slices["k=1"]
    assert (only.mean, only.runs) == (pytest.approx(0.7), 1)
    assert (only.low, only.high) == (only.mean, only.mean)  # one seed has no interval
    (gap, _) = differences(plain, canon).values()
    assert (gap.mean, gap.pairs) == (pytest.approx(0.5), 1)


def test_a_repeated_seed_gives_no_more_answers(tmp_path):
    """16 of 100 where guessing scores 22 is luck: the interval ends at 24.4. With 200 answers it would end at 21.7."""
    (only,) = summarise(grid(tmp_path, [("llama", 0.1, 0, 16, 16), ("llama", 0.1, 0, 16, 16)]))
    assert not only.best.is_below("k=1", 0.22)


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_runs_have_no_interval(tmp_path, seeds):
    """Even with many questions, and even if they score alike."""
    (only,) = summarise(grid(tmp_path, [("llama", 0.1, seed, 50, 10 * seed) for seed in range(seeds)]))
    equal, other = only.best.slices.values()
    assert (equal.low, equal.high, equal.kind) == (0.5, 0.5, "one run" if seeds == 1 else "2 runs")
    assert small_of(equal, percent, seeds) == ("" if seeds == 1 else "all equal")
    assert small_of(other, percent, seeds) == ("" if seeds == 1 else "0%, 10.0%")


@given(values=st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=3, max_size=12))
def test_normal_intervals_of_accuracies(values):
    """Student's t, with a variance of at least that of 1,000 questions in clusters, and at least one point."""
    result = spread_of(values, 1000).normal
    mean = statistics.fmean(values)
    near = (1000 * mean + 2) / 1004
    variance = max(statistics.variance(values), 1.9 * near * (1 - near) / 1000, 1e-4)
    half = stats.t.ppf(0.975, len(values) - 1) * (variance / len(values)) ** 0.5
    assert result.low == pytest.approx(max(0.0, mean - half), abs=1e-6)
    assert result.high == pytest.approx(min(1.0, mean + half), abs=1e-6)


def test_answers_of_a_run_are_counted_at_a_reduced_size():
    low, high = wilson(Count(95, 190))
    truth = stats.binomtest(50, 100).proportion_ci(0.95, "wilson")
    assert (low, high) == (pytest.approx(truth.low, abs=1e-6), pytest.approx(truth.high, abs=1e-6))


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
    return read_runs(folders)[0]


def test_capo_is_ranked_by_bits_per_parameter(tmp_path):
    (only,) = summarise(capo(tmp_path, [("llama", 0.1, 0, 90, 1.0, 50), ("llama", 0.1, 1, 90, 1.5, 50),
                                        ("llama", 0.2, 0, 10, 1.75, 50), ("llama", 0.2, 1, 10, 1.25, 50)]))  # fmt: skip
    assert only.score == "bits_per_parameter"
    assert (only.best.lr, only.best.mean) == (0.2, 1.5)
    bits = only.best.measures["bits_per_parameter"]
    assert (bits.mean, bits.runs, bits.values, bits.kind) == (1.5, 2, (1.75, 1.25), "2 runs")


def test_capo_without_bits_is_ranked_by_accuracy(tmp_path):
    runs = capo(tmp_path, [("llama", 0.1, 0, 90, None, 50), ("llama", 0.2, 0, 10, None, 50)])
    (only,) = summarise(runs)
    assert (only.score, only.best.lr, only.best.mean) == ("", 0.1, 0.9)


def test_an_architecture_without_the_measure_has_no_score_among_those_with_it(tmp_path):
    new, old = summarise(capo(tmp_path, [("llama", 0.1, 0, 50, 1.0, 50), ("gdn2", 0.1, 0, 99, None, 50),
                                         ("gdn2", 0.2, 0, 50, None, 50)]))  # fmt: skip
    assert (new.score, old.score) == ("bits_per_parameter", "bits_per_parameter")
    assert (new.best.mean, old.best.mean) == (1.0, None)
    assert columns_of([new, old]) == ["bits_per_parameter", "attribute=field", "bits_per_person"]


def test_measures_are_paired_by_seed_like_accuracies(tmp_path):
    plain, canon = summarise(capo(tmp_path, [
        ("llama", 0.1, 0, 50, 1.0, 50), ("llama", 0.1, 1, 50, 2.0, 50), ("llama", 0.1, 5, 50, 9.0, 50),
        ("llama+canon", 0.1, 1, 60, 2.25, 50), ("llama+canon", 0.1, 0, 60, 2.0, 50),
    ]))  # fmt: skip
    gaps = differences(plain, canon)
    bits = gaps["bits_per_parameter"]
    assert (bits.mean, bits.values, bits.pairs) == (0.625, (1.0, 0.25), 2)  # without seed 5, which one of them has
    assert (bits.low, bits.high) == (0.625, 0.625)  # two seeds have no interval
    assert gaps["attribute=field"].mean == pytest.approx(0.1)


@pytest.mark.parametrize(("share", "params"), [(0.5, 40_000), (1.0, 1_000), (0.001, 7)])
def test_max_bits_per_parameter_is_all_bits_over_all_parameters(run_folder, share, params):
    rows = [evaluation(step, {("attribute", "field"): (0, 1)}, measures=capo_bits(known, params, people=250))
            for step, known in ((0, 0.0), (1, share), (2, 0.0))]  # fmt: skip
    (run,) = read_runs([run_folder(task=CAPO, evals=rows, params=params)])[0]
    assert at_most(run, "bits_per_parameter") == pytest.approx(65.0 * 250 / params)
    assert at_most(run, "bits_per_person") == 65.0
    assert at_most(run, "kl") is None
    nothing = run_folder("nothing", task=CAPO, evals=rows[:1], params=params)  # nothing stored yet: unknown
    assert at_most(read_runs([nothing])[0][0], "bits_per_parameter") is None


def test_bounds_are_not_measures_and_scales_stay_separate(run_folder):
    row = evaluation(1, {("attribute", "b"): (1, 2), ("attribute", "a"): (1, 2), ("question", "b"): (1, 2)},
                     measures=capo_bits(0.5, 10) | {"other": 1.0})  # fmt: skip
    archs = summarise(read_runs([run_folder(task=CAPO, evals=[row])])[0])
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


def test_sizes_that_round_equally_get_different_names(tmp_path):
    archs = summarise(capo(tmp_path, [("llama", 0.1, 0, 50, 2.0, 1_000_001), ("llama", 0.1, 0, 50, 1.0, 1_000_002)]))
    assert [a.arch for a in archs] == ["llama (1,000,001)", "llama (1,000,002)"]
