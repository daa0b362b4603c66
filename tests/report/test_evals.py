"""The report reads the results of `canonlm eval`: beside runs, alone, damaged."""

import json
import math
import statistics

import polars as pl
import pytest
from folders import evaluation, write_results, write_run
from reading import page_of, printed, visible_text
from scipy import stats

from canonlm import load_runs
from canonlm.report import load_play, numbers_csv
from canonlm.report.evals import suite_tables
from canonlm.runs.answers import digest
from canonlm.runs.evaluated import load_evaluated
from canonlm.runs.table import read_text


@pytest.fixture
def folder(tmp_path):
    """Two runs on a task, one of them with results of two suites, and a model that is not a run."""
    run = write_run(tmp_path / "runs" / "depo-llama", evals=[evaluation(10, {("k", 1): (30, 40)})])
    write_run(tmp_path / "runs" / "depo-canon", arch="llama+canon", evals=[evaluation(10, {("k", 1): (39, 40)})])
    again = [("exact", 0.912, 0.0127, 500, {}, True), ("year", 0.92, 0.01, 500, {}, True),
             ("exact", 0.123, 0.1, 5, {"position": 3}, True)]  # fmt: skip
    write_results(run / "evals" / "step-00000010", {"source": "runs/depo-llama"}, [
        ("multihop", "1hop-0k", {}, [("exact", 0.3, 0.02, 500, {}, True)]),
        ("multihop", "1hop-0k", {}, again),
        ("harness", "wikitext", {}, [("word_perplexity", 23.456, None, 500, {}, False)]),
    ])  # fmt: skip
    other = [("multihop", "1hop-0k", {}, [("exact", 0.5, 0.022, 500, {}, True)])]
    write_results(tmp_path / "evals" / "<b>", {"source": "some/model"}, other)
    return tmp_path


def test_tables(folder):
    text = printed(folder)
    assert "Birth years in a text" in text
    (row,) = [line for line in text.splitlines() if "1hop-0k" in line and "exact" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["1hop-0k", "exact", "50.0% ± 2.2", "91.2% ± 1.3"]
    (row,) = [line for line in text.splitlines() if "1hop-0k" in line and "year" in line]
    assert "–" in row
    assert "92.0% ± 1.0" in row
    assert "23.5" in text
    assert "12.3" not in text  # slices are only in the file
    assert "depo-llama/step-00000010" in text
    assert "llama+canon" in text


def test_other_settings_are_separate_rows(tmp_path):
    """Numbers with different settings never share a row, for one model or for two."""
    for name, entries in {"a": [(3, 0.5), (5, 0.25)], "b": [(5, 0.75)]}.items():
        write_results(tmp_path / name, {"source": name}, [
            ("multihop", "1hop-0k", {"people": people, "n": 500}, [("exact", share, None, 500, {}, True)])
            for people, share in entries
        ])  # fmt: skip
    lines = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in printed(tmp_path).splitlines()]
    assert [line for line in lines if line[0].startswith("1hop")] == [
        ["1hop-0k (people=3)", "exact", "50.0%", "–"],
        ["1hop-0k (people=5)", "exact", "25.0%", "75.0%"],
    ]


def test_page(folder):
    page = page_of(folder)
    words = visible_text(page)
    assert "Birth years in a text" in words
    assert "91.2% ± 1.3" in words
    assert "<b>" in words
    assert '<b>"' not in page
    assert "2 saved models evaluated" in words


def test_results_are_among_the_numbers_to_download(folder):
    """Each number of `load_runs`, once; runs in their section, results of suites in none."""
    downloaded = read_text(numbers_csv(load_play(folder)))
    loaded = load_runs(folder).filter(pl.col("kind") != "training")
    assert set(downloaded.filter(kind="suite")["section"]) == {""}
    assert downloaded.filter(kind="suite").height == 5
    rows = downloaded.select(loaded.columns).rows()
    assert sorted(map(repr, rows)) == sorted(map(repr, loaded.rows()))


def test_results_without_runs_make_a_report(tmp_path):
    entry = ("babilong", "babilong-qa1-0k", {}, [("correct", 1, 0, 500, {}, True)])
    write_results(tmp_path / "evals" / "m", {"source": "some/model"}, [entry])
    play = load_play(tmp_path / "evals")
    assert (play.sections, play.left_out) == ((), ())
    assert "Stories in a longer text" in visible_text(page_of(tmp_path / "evals"))
    assert "100%" in printed(tmp_path / "evals")


def test_documents_are_compared_in_pairs(tmp_path):
    """The interval is that of scipy's paired t-test; a model whose answers are gone or changed has none."""
    nats = {
        "a": [700.0, 420.0, 900.0, 350.0],
        "b": [690.0, 425.0, 880.0, 340.0],
        "changed": [700.0] * 4,
        "gone": [1.0] * 4,
    }
    sizes = [200, 120, 300, 90]
    for name, losses in nats.items():
        folder = tmp_path / "evals" / name
        rows = [
            {"index": i, "slice": {}, "right": {}, "bytes": size, "tokens": size, "nats": loss, "positions": {}}
            for i, (size, loss) in enumerate(zip(sizes, losses, strict=True))
        ]
        entry = ("text", "text-held-out", {}, [("bits_per_byte", 5.0, 0.1, 4, {}, False)])
        write_results(folder, {"source": name}, [entry])
        results = json.loads((folder / "results.json").read_text())
        results["results"][0]["answers"] = {"file": "answers.jsonl", "count": 4, "sha256": digest(rows)}
        (folder / "results.json").write_text(json.dumps(results))
        rows[0]["nats"] += name == "changed"
        if name != "gone":
            (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bits = {name: [loss / math.log(2) / size for loss, size in zip(nats[name], sizes, strict=True)] for name in "ab"}
    test = stats.ttest_rel(bits["b"], bits["a"])
    low, high = test.confidence_interval(0.95)
    ends = f"{low:.3g} to +{high:.3g}".replace("-", "−")
    mean = f"{statistics.mean(bits['b']) - statistics.mean(bits['a']):.3g}".replace("-", "−")
    assert low < 0 < high
    [(_, _, head, lines)] = suite_tables(load_evaluated(tmp_path)[0])
    assert head == ["task", "measure", "a", "b", "changed", "gone"]
    assert lines[-1] == ["text-held-out", "bits_per_byte, paired", "the first", f"{mean} ({ends})", "–", "–"]
