"""The claims about the published models, against sums by hand from the file of final scores."""

import csv
import re
from importlib.resources import files

import pytest

from canonlm.experiments.claims import listed
from canonlm.experiments.retests import Retest, TableTest, retests


def score(model: str, column: str) -> float:
    text = (files("canonlm.experiments.published") / "finals.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return next(float(row[column]) for row in rows if row["model"] == model)


def one(claim: str, pattern: str) -> Retest:
    tests = [each for test in listed()[claim].tables for each in retests(test)]
    [retest] = [each for each in tests if re.search(pattern, each.comparison)]
    return retest


def test_a_size_and_length_of_training_is_one_observation():
    retest = one("C46", "MMLU")
    gains = [
        score(f"LlamaCanon-{run}-lr{lr}", "MMLU") - score(f"Llama-{run}-lr{lr}", "MMLU")
        for run, rates in [("1B-Nemo-1T", (0.002, 0.003)), ("1B-Nemo-2T", (0.003, 0.005)),
                           ("3B-Nemo-1T", (0.002, 0.003)), ("8B-Nemo-1T", (0.002, 0.003))]
        for lr in rates
    ]  # fmt: skip
    means = [(a + b) / 2 for a, b in zip(gains[::2], gains[1::2], strict=True)]
    assert sorted(retest.gains) == pytest.approx(sorted(means))
    mean = sum(means) / 4
    half = 3.182446 * (sum((x - mean) ** 2 for x in means) / 3 / 4) ** 0.5
    assert (retest.low, retest.high) == pytest.approx((mean - half, mean + half), abs=1e-4)
    assert (retest.better, retest.pairs) == (8, 8)
    assert retest.verdict == "undecided"  # rotary positions differ, too


def test_lower_perplexity_is_a_gain():
    assert min(one("C46", "Wiki_ppl").gains) > 0


def test_the_pair_with_another_norm_is_left_out():
    assert one("C48", "^GLA5.*Mamba2, MMLU").pairs == 7
    assert one("C48", "^GDN2.*Mamba2, MMLU").pairs == 8


def test_retrieval_against_the_best_linear_model():
    retest = one("C50", "JRT")
    linear = ["GLA5Canon", "GDN2Canon", "Mamba2Canon"]
    gaps = []
    for size in ("1B", "3B", "8B"):
        mean = {
            model: sum(score(f"{model}-{size}-Nemo-1T-lr{lr}", "JRT_avg12") for lr in (0.002, 0.003)) / 2
            for model in ["LlamaCanon", *linear]
        }
        gaps.append(mean["LlamaCanon"] - max(mean[model] for model in linear))
    assert sorted(retest.gains) == pytest.approx(sorted(gaps))
    assert retest.verdict == "undecided"  # the families were not trained alike


@pytest.mark.parametrize(
    ("low", "high", "no_gain", "verdict"),
    [
        (0.1, 2, False, "supported"), (-2, -0.1, False, "contradicted"), (-1, 1, False, "undecided"),
        (-0.9, 0.9, True, "supported"), (-0.9, 1.1, True, "undecided"), (1.1, 3, True, "contradicted"),
    ],
)  # fmt: skip
def test_verdicts(low, high, no_gain, verdict):
    test = TableTest(pairs="Llama", scores={}, no_gain=no_gain)
    assert Retest(test, "", (0.0,), low, high, 0, 0, "").verdict == verdict


def _paper_rows() -> list[dict[str, str]]:
    text = (files("canonlm.experiments.published") / "slimpajama.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def test_how_far_seeds_are_apart_is_counted():
    """The paper names five scores that differ much; two that hardly do contradict that all are like them."""
    seeds = [row for row in _paper_rows() if "seed" in row["variant"]]
    assert len(seeds) == 8
    for column, paper in listed()["C42"].tables[0].scores.items():
        scores = [float(row[column]) for row in seeds]
        retest = one("C42", f"{column}$")
        assert retest.estimate == pytest.approx(max(scores) - min(scores))
        assert not paper or round(retest.estimate, 1) == float(paper)
        assert retest.verdict == ("supported" if paper else "contradicted")


@pytest.mark.parametrize("column", ["2hop-0k", "2hop-1k"])
def test_the_best_of_all_models_does_not_do_better_than_a_guess(column):
    scores = [float(row[column]) for row in _paper_rows()]
    retest = one("C44", column)
    assert f"the best of {len(scores)} models" in retest.comparison
    assert (retest.estimate, retest.unit, retest.verdict) == (max(scores), "% right", "supported")
    assert 100 / 3 < max(scores) < 100 / 3 + 5
