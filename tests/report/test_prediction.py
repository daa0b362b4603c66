"""Rankings in one place against those in another, on the kept files and on made-up ones."""

import math
from pathlib import Path

import numpy as np
import pytest
from reading import charts, visible_text
from scipy import stats

from canonlm.cli import main
from canonlm.experiments.prediction import TEXT, _prediction, predictions, reliability, spearman
from canonlm.report.prediction_page import html, lines_of, said


def test_the_correlation_is_that_of_scipy():
    rng = np.random.default_rng(0)
    for ties in (False, True):
        x, y = rng.normal(size=(2, 12)).round(0 if ties else 9).tolist()
        assert spearman(x, y)[0] == pytest.approx(stats.spearmanr(x, y).statistic)


@pytest.mark.parametrize(("archs", "rho"), [(8, 0.5), (12, 0.0), (12, 0.8), (12, 0.95)])
def test_nineteen_of_twenty_intervals_contain_the_true_correlation(archs, rho):
    rng, held = np.random.default_rng(archs), 0
    true = 6 / math.pi * math.asin(rho / 2)  # of two normal numbers with this correlation
    for _ in range(600):
        x, noise = rng.normal(size=(2, archs))
        low, high = spearman(x.tolist(), (rho * x + math.sqrt(1 - rho**2) * noise).tolist())[1]
        held += low <= true <= high
    assert held >= 552  # 92 %


def test_few_architectures_have_no_interval():
    correlation, interval = spearman([1, 2, 3, 4], [1, 2, 3, 4])
    assert (correlation, interval) == (pytest.approx(1), (-1, 1))


def test_pairs_are_counted_within_families():
    there = {"llama": 1.0, "llama+canon": 2.0, "gla": 3.0, "gla+canon": 4.0, "only here": 9.0}
    outcome = {"llama": 1.0, "llama+canon": 0.0, "gla": 5.0, "gla+canon": 6.0}
    prediction = _prediction("a", "b", there, outcome)
    assert (prediction.agreeing, prediction.pairs, len(prediction.points)) == (1, 2, 4)
    assert prediction.correlation == pytest.approx(stats.spearmanr([1, 2, 3, 4], [1, 0, 5, 6]).statistic)


@pytest.fixture(scope="module")
def of_kept_files():
    return predictions()


def test_the_numbers_of_the_docs(of_kept_files):
    by_name = {(each.predictor, each.outcome): each for each in of_kept_files}
    micro = by_name["micro depo", "depo"]
    assert len(micro.points) == 13
    points = {arch: (there, here) for arch, there, here in micro.points}
    assert points["llama"][1] < points["llama+canon=A"][1] < points["llama+canon"][1]
    assert len([each for each in by_name.values() if each.outcome in TEXT]) == 4 * len(TEXT)
    assert all(0.5 < reliability(group) <= 1 for group in TEXT)
    docs = (Path(__file__).parents[2] / "docs/experiments/published.md").read_text()
    for each in by_name.values():
        assert f"| {each.predictor} | {each.outcome} | {said(each)} |" in docs


def test_the_command_writes_its_page(of_kept_files, tmp_path, capsys):
    assert main(["replicate", "predict", "--out", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    names = {"correlations", "rankings"}
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {
        f"{n}.{kind}" for n in names for kind in ("svg", "pdf")
    }
    lines = lines_of(of_kept_files)
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines
    page = (tmp_path / "prediction.html").read_text()
    assert said(of_kept_files[0]) in visible_text(page)
    assert set(charts(page)) == {"correlations", "rankings"}
    clear = [each for each in of_kept_files if each.interval.low > 0]
    assert f"Only the {len(clear)} of {len(of_kept_files)} pairs" in visible_text(page)
    panels = {panel["title"]: panel for panel in charts(page)["rankings"]["panels"]}
    axes = [panels["brevo → Wikipedia"][axis]["title"] for axis in ("x", "y")]
    assert axes == ["brevo: accuracy", "Wikipedia: −1 × perplexity"]
    named = {one["name"] for one in charts(page)["correlations"]["series"] if not one.get("unnamed")}
    assert named == {"no correlation", "interval above 0", "interval not above 0"}
    assert html(of_kept_files) == page
