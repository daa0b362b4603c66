"""Charts as SVG and PDF, read back: every name, and the points where the numbers are."""

import re
import sys
from xml.etree import ElementTree

import pytest
from folders import evaluation

from canonlm.cli import main
from canonlm.report import blocks, charts, figures, load_play, results_figures, results_payload
from canonlm.report.page import render
from canonlm.report.theme import looks
from canonlm.runs.table import paired

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


def svgs(folder):
    return {file.stem: ElementTree.fromstring(file.read_text()) for file in folder.glob("*.svg")}


def test_every_kind_of_chart_is_drawn(every_task):
    drawn = []
    for _, chart, figure in figures.drawn(render(load_play(every_task))):
        drawn.append(chart["id"])
        assert [axes.get_title("left") for axes in figure.axes] == [panel["title"] for panel in chart["panels"]]
        [legend] = figure.legends
        named = {one["name"] for one in chart["series"] if not one.get("unnamed")}
        assert {text.get_text() for text in legend.get_texts()} == named
        artists = sum(len(axes.lines) + len(axes.containers) for axes in figure.axes)
        assert artists >= len(chart["series"])
    assert len(drawn) == len(set(drawn)) == 7 + 7 + 6


def test_points_are_where_the_numbers_are(run_folder, tmp_path, capsys):
    """The heights of a chart's points are a linear function of its accuracies."""
    rights = [0, 16, 40, 64]
    evals = [evaluation(10 * (i + 1), {("k", 1): (right, 64)}) for i, right in enumerate(rights)]
    run_folder("one", evals=evals, arch="llama$^2$", losses=[(10, 2.0), (40, 1.0)])  # not mathematics
    for name in ("figures", "again"):
        assert main(["report", str(tmp_path / "runs"), "--figures", str(tmp_path / name)]) == 0
    assert "figures, SVG and PDF: " in capsys.readouterr().out
    files = {file.name: file.read_bytes() for file in (tmp_path / "figures").iterdir()}
    assert set(files) == {f"{name}-0.{kind}" for name in ("curves", "loss") for kind in ("svg", "pdf")}
    for name, content in files.items():
        assert content == (tmp_path / "again" / name).read_bytes()  # no dates, no random names
        assert content.startswith(b"%PDF-") == name.endswith("pdf")
    root = svgs(tmp_path / "figures")["curves-0"]
    assert "llama$^2$" in {text.text for text in root.iter(f"{SVG}text")}
    lines = [[tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d", ""))]
             for path in root.iter(f"{SVG}path")]  # fmt: skip
    [line] = {tuple(line) for line in lines if len(line) == 4 and len({x for x, _ in line}) == 4}
    (_, low), *middle, (_, high) = line
    for right, (_, y) in zip(rights[1:-1], middle, strict=True):
        assert (low - y) / (low - high) == pytest.approx(right / 64, abs=1e-3)


def test_the_figures_of_results_have_the_published_differences(tmp_path):
    filters, folder = ["arch=GDN2", "size=1B", "source=published", "task=wikitext"], tmp_path / "figures"
    assert main(["results", *filters, "--figures", str(folder)]) == 0
    shown = results_payload.beside_the_published([], filters)
    charts = {chart["id"]: chart for _, chart, _ in figures.drawn(results_figures.html(shown))}
    assert set(svgs(folder)) == set(charts) == {"overview-short", "overview-perplexity", "curves", "compute"}
    [pairs, mean, _] = charts["overview-perplexity"]["series"]
    gains = [-delta for delta in paired(shown.numbers)["delta"]]
    assert len(gains) == 3
    assert pairs["x"] == pytest.approx([gain / max(map(abs, gains)) for gain in gains], abs=1e-6)
    assert mean["x"][0] == pytest.approx(sum(pairs["x"]) / len(gains))
    assert [panel["title"] for panel in charts["curves"]["panels"]] == ["GDN2, 1B, 1T tokens"]


@pytest.mark.parametrize("losses", [(3.2, 2.1), (2000, 2)])
def test_a_logarithmic_axis_has_labels(losses):
    """Losses from 3.2 to 2.1 have no power of ten among them, and had no labels."""
    of_loss = charts.series_of("line", "llama", [(10, losses[0]), (20, losses[1])])
    panel = {"title": "", "x": {}, "y": {"log": True, "title": "loss"}}
    block = blocks.chart("loss", "", {"panels": [panel], "series": [of_loss]})
    [(_, _, figure)] = figures.drawn(blocks.page("", [], [block], looks(["llama"])))
    figure.draw_without_rendering()
    [axes] = figure.axes
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    assert sum(low <= at <= high and label.get_text() != "" for at, label in ticks) >= 2


def test_without_matplotlib_it_is_one_line(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command in (["report", str(demo)], ["claims"], ["profile", "llama"], ["results"], ["replicate", "predict"]):
        assert main([*command, "--figures", str(tmp_path / "figures")]) == 2
        message = "canonlm: --figures needs the package matplotlib: pip install 'canonlm[figures]'\n"
        assert capsys.readouterr().err == message
    assert not (tmp_path / "figures").exists()
