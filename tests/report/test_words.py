"""What is said must be true of the numbers."""

import pytest
from folders import evaluation, write_run

from canonlm.report import load_runs, summarise
from canonlm.report.charts import learning_curves
from canonlm.report.sentences import results_sentences, verdict
from canonlm.report.theme import DARK, LOOKS, looks
from canonlm.report.words import number, percent, points, quantity, scale_words, short, signed, slice_label, span


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1, "100%"), (0.9999, ">99.9%"), (0.0001, "<0.1%"), (0.125, "12.5%"), (0.93, "93.0%")],
)
def test_percent_never_rounds_to_none_or_all(share, text):
    assert percent(share) == text


def test_points_and_sizes():
    assert [points(x) for x in (0.125, -0.5, 0.0, -0.0001)] == ["+12.5", "−50.0", "0.0", "0.0"]
    assert [short(x) for x in (None, 12, 61234.0, 1_052_160, 1.3e9)] == ["–", "12", "61.2 k", "1.05 M", "1.3 B"]


def test_measures_in_words_with_a_fallback():
    assert [number(x) for x in (1.917, 0.003141, 0.0, -0.5, 12345.6, 2e-7)] == [
        "1.92", "0.00314", "0", "−0.5", "12,346", "2e−07"
    ]  # fmt: skip
    assert [signed(x) for x in (0.3125, -0.3125, 0.0)] == ["+0.312", "−0.312", "0"]
    assert (span(0.9, 0.95), span(1.0, 1.25, number), span(2.0, 2.0, number)) == ("90.0–95.0%", "1–1.25", "2")
    assert (quantity("lano", "kl").label, quantity("lano", "kl").log) == ("divergence (KL)", True)
    assert quantity("mine", "tokens_per_joule").label == "tokens per joule"
    assert quantity("depo", "k=1").say(0.5) == quantity("depo", "").say(0.5) == "50.0%"


def test_scales_in_words_with_a_fallback():
    assert scale_words("brevo", "depth=3").by == "depth of the question"
    assert scale_words("mine", "width=3").by == "width"


def test_slices_in_words_with_a_fallback():
    assert slice_label("depo", "k=1") == "1 hop"
    assert slice_label("depo", "k=8") == "8 hops"
    assert slice_label("mano", "l=10") == "10 operations"
    assert slice_label("copying", "first=all") == "whole list"
    assert slice_label("mqar", "pairs=1") == "1 pair"
    assert slice_label("brevo", "n=70") == "70 items"
    assert slice_label("brevo", "depth=3") == "depth 3"
    assert slice_label("brevo", "nodes=9-16") == "9–16 to list"
    assert slice_label("lano", "from=start") == "from the start"
    assert slice_label("lano", "from=cut") == "after 50 given tokens"
    assert slice_label("capo", "attribute=birth city") == "birth city"
    assert slice_label("capo", "question=birth city") == "birth city, asked"
    assert slice_label("lano", "cfg=3f") == "cfg = 3f"
    assert slice_label("depo", "k=1, n=5") == "k = 1, n = 5"
    assert slice_label("depo", "all") == "all questions"


def architectures(tmp_path, scores, total=100):
    """`scores`: {arch: [(correct at k=1, correct at k=2) per seed]}."""
    folders = []
    for arch, seeds in scores.items():
        for seed, (one, two) in enumerate(seeds):
            rows = [evaluation(10, {("k", 1): (one, total), ("k", 2): (two, total)})]
            folders.append(write_run(tmp_path / f"{arch}{seed}", arch=arch, seed=seed, evals=rows))
    return summarise(load_runs(folders)[0])


@pytest.mark.parametrize(
    ("plain", "canon", "said"),
    [
        ([(20, 10), (22, 12)], [(90, 80), (92, 82)],
         "every b run beats every a run on every question type: on average 86.0% against 16.0%."),
        ([(20, 10), (22, 12)], [(90, 11), (92, 13)],
         "every b run beats every a run on 1 hop: 91.0% against 21.0%; on 2 hops their ranges overlap."),
        ([(20, 90), (22, 92)], [(90, 10), (92, 12)],
         "every b run beats every a run on 1 hop: 91.0% against 21.0%; "
         "every a run beats every b run on 2 hops: 91.0% against 11.0%."),
        ([(20, 10), (22, 12)], [(21, 11), (23, 13)],
         "a and b cannot be told apart, their ranges overlap everywhere."),
        ([(100, 100), (100, 100)], [(100, 100), (100, 100)], "a and b score exactly the same."),
        ([(20, 10)], [(90, 12)], "b beats a on 1 hop: 90.0% against 20.0%; on 2 hops their ranges overlap."),
    ],
)  # fmt: skip
def test_the_verdict_says_what_the_runs_bear_out(tmp_path, plain, canon, said):
    assert verdict(architectures(tmp_path, {"a": plain, "b": canon})) == f"At the best learning rates, {said}"


def test_many_architectures_are_ranked_and_left_to_the_tables(tmp_path):
    archs = architectures(tmp_path, {"a": [(10, 20)], "b": [(90, 80)], "c": [(0, 0)], "d": [(100, 100)]})
    assert verdict(archs) == (
        "At the best learning rates, averaged over question types: d 100%, b 85.0%, a 15.0% and c 0%."
    )
    assert results_sentences(archs, {}) == []


def test_one_architecture_has_no_verdict(tmp_path):
    assert verdict(architectures(tmp_path, {"a": [(1, 2)]})) == ""


def test_the_sentences_give_the_numbers_and_chance(tmp_path):
    archs = architectures(tmp_path, {"a": [(20, 10), (22, 12)], "b": [(90, 80), (90, 82)]})
    assert results_sentences(archs, {"k=1": 0.125, "k=2": 0.125}) == [
        "After 10 training steps, share answered correctly (guessing scores 12.5%):",
        "1 hop: a 21.0% (20.0–22.0%) and b 90.0%.",
        "2 hops: a 11.0% (10.0–12.0%) and b 81.0% (80.0–82.0%).",
    ]
    assert results_sentences(archs, {"k=1": 0.125})[1].endswith("Guessing scores 12.5%.")


def capo(tmp_path, scores):
    """`scores`: {arch: [bits per parameter per seed]}; everybody knows one fact of two."""
    folders = []
    for arch, seeds in scores.items():
        for seed, bits in enumerate(seeds):
            row = evaluation(10, {("attribute", "field"): (5, 10)}, measures={"bits_per_parameter": bits})
            folders.append(write_run(tmp_path / f"{arch}{seed}", arch=arch, seed=seed, evals=[row],
                                     task={"name": "capo"}))  # fmt: skip
    return summarise(load_runs(folders)[0])


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"a": [1.0, 1.2], "b": [1.5, 1.7]}, "every b run beats every a run: 1.6 against 1.1 bits per parameter."),
        ({"a": [1.0, 1.2], "b": [0.5, 0.7]}, "every a run beats every b run: 1.1 against 0.6 bits per parameter."),
        ({"a": [1.0, 1.2], "b": [1.1, 1.7]}, "a and b cannot be told apart, their ranges overlap everywhere."),
        ({"a": [1.0], "b": [1.5]}, "a reaches 1 and b 1.5 bits per parameter; single runs do not say how much of that "
                                   "is luck."),
        ({"a": [1.0], "b": [float("nan")]}, "a and b were not asked the same questions."),
        ({"a": [1.0], "b": [1.5], "c": [2.0], "d": [float("nan")]},
         "bits per parameter: c 2, b 1.5, a 1 and d –."),
    ],
)  # fmt: skip
def test_the_verdict_on_capo_is_about_bits(tmp_path, scores, said):
    assert verdict(capo(tmp_path, scores)) == f"At the best learning rates, {said}"


def test_the_sentences_tell_shares_from_measures(tmp_path):
    assert results_sentences(capo(tmp_path, {"a": [1.0, 1.25], "b": [0.5]}), {}) == [
        "After 10 training steps:",
        "Bits per parameter: a 1.12 (1–1.25) and b 0.5.",
        "Share of people whose fact is known, field: a 50.0% and b 50.0% (23.7–76.3%).",
    ]


def test_what_is_sliced_besides_does_not_enter_the_verdict(tmp_path):
    folders = []
    for arch, right in (("a", 10), ("b", 90)):
        for seed in range(2):
            slices = {("n", 70): (50 + seed, 100), ("depth", 1): (right, 100)}
            folders.append(write_run(tmp_path / f"{arch}{seed}", arch=arch, seed=seed, evals=[evaluation(10, slices)],
                                     task={"name": "brevo"}))  # fmt: skip
    archs = summarise(load_runs(folders)[0])
    assert verdict(archs) == "At the best learning rates, a and b score exactly the same."
    assert len(results_sentences(archs, {})) == 2


def test_architectures_keep_their_look_and_never_share_one():
    assert looks(["x", "llama"])["llama"] == looks(["llama+canon", "llama"])["llama"] == LOOKS["llama"]
    many = looks(["llama", *(f"mine{n}" for n in range(12))])
    assert len(set(many.values())) == 13
    assert all(look.color in DARK for look in many.values())


def test_curves_are_one_trace_per_run_and_one_mean(tmp_path):
    archs = architectures(tmp_path, {"a": [(20, 10), (22, 12)], "b": [(90, 80), (90, 82)]})
    figure = learning_curves(archs, ["k=1", "k=2"], {"k=1": 0.125})
    assert len(figure.data) == 1 + 2 * 2 * (2 + 1)
    assert sorted(trace.name for trace in figure.data if trace.showlegend) == ["a", "b", "guessing"]
    mean = next(trace for trace in figure.data if trace.meta == "mean")
    assert mean.y == (pytest.approx(0.21),)
