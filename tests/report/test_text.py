"""Runs on text: their rows, which of them are compared, and that the report only has their losses."""

import json
import math

import polars as pl
import pytest
from folders import evaluation, text_evaluation, write_run, write_text_run
from reading import charts, numbers, page_of, printed, tables, visible_text
from test_page import NASTY, Page

from canonlm.experiments.published.runs import runs_curves, runs_frame, settings
from canonlm.report import load_play, load_run
from canonlm.runs.gather import gather
from canonlm.runs.load import LeftOut, mixes

TOKENS = 32 * 512  # a step of `write_run`
ROWS = [text_evaluation(100, {"web": (3.5, 1.1, 1000)}), text_evaluation(200, {"web": (2.25, 0.7, 1000)})]
TWO = [text_evaluation(200, {"web": (2.0, 0.5, 3000), "code": (1.0, 0.25, 1000)})]


@pytest.mark.parametrize("final", [{}, None], ids=["now", "earlier versions"])
def test_a_run_without_held_out_text(tmp_path, final):
    folder = write_text_run(tmp_path / "a", finished=False, steps=50, losses=[(50, 2.5)])
    (folder / "result.json").write_text(json.dumps({"steps": 50, "num_parameters": 9, "final": final}))
    run = load_run(folder)
    assert (run.finished, run.final.measures, run.notes) == (True, {}, ())
    assert "2.500" in printed(tmp_path)
    assert "No run has a loss on held-out text." in printed(tmp_path)
    numbers, left_out = runs_frame([tmp_path])
    assert (len(numbers), left_out) == (0, [])
    assert "Training loss" in visible_text(page_of(tmp_path))


def test_a_diverged_run_is_reported_without_a_number(tmp_path):
    write_text_run(tmp_path / "a", evals=[*ROWS, text_evaluation(300, {"web": (math.nan, math.nan, 10)})])
    run = load_run(tmp_path / "a")
    assert (run.final.sets, run.final.measures) == ({"web": 10}, {})
    assert run.notes == tuple(
        f"{name} of the final evaluation is not a finite number"
        for name in ("loss", "loss (web)", "bits per byte (web)")
    )
    assert "nan" not in printed(tmp_path).lower()


@pytest.mark.parametrize("text", [5, {}, {"sources": {}}, {"sources": ["web"]}])
def test_a_run_without_a_record_of_its_text_is_skipped(tmp_path, text):
    write_text_run(tmp_path / "runs" / "a", evals=ROWS, config={"text": text})
    play = load_play(tmp_path)
    assert play.texts == ()
    (entry,) = play.left_out
    assert (entry.name, entry.reason[:13]) == ("a", "text.sources:")


def test_only_runs_on_the_same_text_are_compared(tmp_path):
    cases = {
        "here": ({"web": ("data/web", 1.0)}, {"web": "aa"}),
        "elsewhere": ({"web": ("/mnt/web", 1.0)}, {"web": "aa"}),
        "newer": ({"web": ("data/web", 1.0)}, {"web": "bb"}),
        "mixed": ({"web": ("data/web", 0.5), "code": ("data/code", 0.5)}, {"web": "aa", "code": "cc"}),
        "turned": ({"code": ("data/code", 0.5), "web": ("data/web", 0.5)}, {"web": "aa", "code": "cc"}),
        "more code": ({"web": ("data/web", 0.25), "code": ("data/code", 0.75)}, {"web": "aa", "code": "cc"}),
    }
    for name, (sources, contents) in cases.items():
        write_text_run(tmp_path / "runs" / name, sources=sources, contents=contents, evals=ROWS)
    play = load_play(tmp_path)
    result = {section.heading.removeprefix("Pretraining on text: "): {run.name for run in section.runs}
              for section in play.texts}  # fmt: skip
    assert set(map(frozenset, result.values())) == {
        frozenset({"here", "elsewhere"}), frozenset({"newer"}), frozenset({"mixed", "turned"}),
        frozenset({"more code"})}  # fmt: skip
    assert {name for name, runs in result.items() if runs & {"mixed", "more code"}} == {
        "code × 0.5, web × 0.5", "code × 0.75, web × 0.25"}  # fmt: skip
    assert len(result) == 4
    assert all("aa" in name or "bb" in name or "×" in name for name in result)
    alone = [run for section in play.texts for run in section.runs if run.name == "mixed"]
    assert list(mixes(alone)) == ["code, web"]


def test_the_tables(tmp_path):
    write_text_run(tmp_path / "runs" / "done", evals=TWO, params=1_500_000, losses=[(200, 1.875)], seed=3)
    write_text_run(tmp_path / "runs" / "going", arch="gla5+canon", evals=ROWS, finished=False, steps=900,
                   losses=[(250, 2.125)])  # fmt: skip
    assert {line["run"] for line in numbers(page_of(tmp_path))} == {"done", "going"}
    text = printed(tmp_path)
    line = next(line for line in text.splitlines() if "llama" in line)
    assert [part.strip() for part in line.strip("│ ").split("│")] == [
        "llama", "1.5 M", "0.001", "3", "3.28 M", "2.000", "0.500", "1.000", "0.250", "1.875", "finished"]  # fmt: skip
    line = next(line for line in text.splitlines() if "gla5+canon" in line)
    assert [part.strip() for part in line.strip("│ ").split("│")] == [
        "gla5+canon", "2L64D", "0.001", "0", "4.1 M", "2.250", "0.700", "–", "–", "2.125",
        "unfinished"]  # fmt: skip
    below = [part.split() for line in text.splitlines() for part in line.split("│") if part.strip()[:7] == "at step"]
    assert below == [["at", "step", "200"]] * 2 + [["at", "step", "250", "of", "900"]]
    page = page_of(tmp_path)
    words = visible_text(page)
    assert "Pretraining on text: web" in words
    assert "accuracy" not in words
    assert "going: unfinished at step 250 of 900" in words
    assert "not in the averages" not in words


def test_the_loss_of_the_answer_is_in_the_table(tmp_path):
    for seed, code in enumerate((1.0, 1.5)):
        evals = [text_evaluation(100, {"web": (2.0, 0.5, 300), "code": (code, 0.25, 100)})]
        write_text_run(tmp_path / "runs" / str(seed), seed=seed, evals=evals)
    page = page_of(tmp_path)
    assert "Loss on held-out text: llama 1.812 (2 runs)." in visible_text(page)
    [ranking] = [rows for rows in tables(page) if "loss (all sets)" in rows[0]]
    assert ranking[1][ranking[0].index("loss (all sets)")] == "1.812\n1.750, 1.875"


@pytest.mark.slow
def test_every_curve_is_the_run_it_names(tmp_path):
    write_text_run(tmp_path / "runs" / "a", evals=ROWS, losses=[(10, 4.0), (20, math.nan), (30, 3.0)])
    write_text_run(
        tmp_path / "runs" / "b", arch="llama+canon", evals=TWO, losses=[(s, 4 - s / 1e5) for s in range(25_000)]
    )
    drawn = {(name, one["run"]): dict(zip(one["x"], one["y"], strict=True))
             for name, chart in charts(page_of(tmp_path)).items()
             for one in chart["series"]}  # fmt: skip
    assert drawn["text-0-0", "a"] == {100 * TOKENS: 3.5, 200 * TOKENS: 2.25}
    assert drawn["text-0-0", "b"] == {200 * TOKENS: 2.0}
    assert drawn["text-0-1", "b"] == {200 * TOKENS: 1.0}
    assert drawn["text-loss-0", "a"] == {10 * TOKENS: 4.0, 30 * TOKENS: 3.0}
    thinned = drawn["text-loss-0", "b"]
    assert 5_000 < len(thinned) <= 10_000
    assert all(loss == pytest.approx(4 - tokens / TOKENS / 1e5) for tokens, loss in thinned.items())


def test_in_the_frames(tmp_path):
    write_text_run(tmp_path / "runs" / "one", evals=ROWS, arch="llama+canon", losses=[(10, 4.0)])
    write_text_run(tmp_path / "runs" / "two", evals=TWO, finished=False, steps=500)
    write_run(tmp_path / "runs" / "task", evals=[evaluation(50, {("k", 1): (5, 10)})])
    question = ("task", "setting", "slice", "metric", "unit", "value", "total", "tokens")
    numbers, left_out = runs_frame([tmp_path])
    assert left_out == [LeftOut("two", "unfinished at step 200 of 500: no final result")]
    mine = numbers.filter(pl.col("model") == "one")
    assert set(mine.select(question).iter_rows()) == {
        ("text", "web", "web", "loss", "", 2.25, 1000, 200 * TOKENS),
        ("text", "web", "web", "bits_per_byte", "", 0.7, 1000, 200 * TOKENS)}  # fmt: skip
    assert mine.select("arch", "canon", "size", "lr").unique().rows() == [("Llama", "ABCD", "2L64D", 0.001)]
    along, left_out = runs_curves([tmp_path])
    assert left_out == []
    two = along.filter(pl.col("model") == "two")
    of_sets = {(name, metric) for name in ("web", "code") for metric in ("loss", "bits_per_byte")}
    assert set(two.select("slice", "metric").iter_rows()) == {("all", "loss"), *of_sets}
    assert two.filter(pl.col("slice") == "all")["value"].to_list() == [1.75]
    train = along.filter((pl.col("model") == "one") & (pl.col("task") == "train"))
    assert train.select("tokens", "value").rows() == [(10 * TOKENS, 4.0)]


def test_settings_under_the_names_of_the_frames(tmp_path):
    write_text_run(tmp_path / "one" / "a", evals=ROWS, params=77)
    write_run(tmp_path / "one" / "b", evals=[evaluation(50, {("k", 1): (5, 10)})], finished=False, lr=0.5)
    write_run(tmp_path / "two" / "a", evals=[evaluation(50, {("k", 1): (5, 10)})], finished=False)
    folders = [tmp_path / "one", tmp_path / "two"]
    result = settings(gather(folders))
    assert set(result) == {f"{tmp_path}/one/a", f"{tmp_path}/two/a", "b"} == set(runs_curves(folders)[0]["model"])
    assert set(runs_frame(folders)[0]["model"]) == {f"{tmp_path}/one/a"}  # the same name, though only one has finished
    a, b = result[f"{tmp_path}/one/a"], result["b"]
    assert (a["parameters"], a["text.sources.web.path"], a["model.hidden_size"]) == (77, "data/web", 64)
    assert (b["train.optim.lr"], b["task.max_n"], "parameters" in b) == (0.5, 30, False)


def test_text_from_runs_stays_text(tmp_path):
    for place in (0, 1):
        rows = [text_evaluation(10, {NASTY: (1.0, 1.0, 5), "[red]x[/red]": (1.0, 1.0, 5)})]
        write_text_run(tmp_path / "runs" / f"{NASTY}{place}", arch=NASTY, evals=rows, losses=[(5, 2.0)],
                       sources={NASTY: (f"{NASTY}{place}", 1.0)}, finished=place == 0)  # fmt: skip
    written = page_of(tmp_path)
    assert not [tag for tag, _ in Page(written).tags if tag == "img"]
    assert NASTY in visible_text(written)
    text = printed(tmp_path)
    assert "<img" in text
    assert "[red]x" in text.replace("\n", "")
