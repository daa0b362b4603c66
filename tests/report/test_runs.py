"""Run folders are read in any state: running, crashed, empty, damaged, hostile."""

import json

import pytest
import yaml
from folders import evaluation, text_evaluation, write_run, write_text_run
from reading import blocks

from canonlm.experiments.outcomes import read_finished
from canonlm.report import load_play, load_run, read_runs
from canonlm.report.page import render
from canonlm.runs.folder import run_folders
from canonlm.runs.identity import label
from canonlm.runs.rows import Count, in_order, slice_key

HALF = {("k", 1): (50, 100), ("k", 2): (10, 100)}


ROWS = [
    "[]", "3", "null", "{}", "\\x00", '{"kind": "eval", "st', "[" * 100_000,
    '{"kind": "train", "step": "a", "loss": 1}', '{"kind": "train", "step": 1, "loss": "3.0x"}',
    '{"kind": "eval", "step": 1}', '{"kind": "eval", "step": 1, "slices": [["k", 1, 2]]}',
    '{"kind": "eval", "step": 1, "slices": [{"slice": {"k": 1}, "correct": 3, "total": 2}]}',
    '{"kind": "eval", "step": Infinity, "slices": [{"slice": {"k": 1}, "correct": 1, "total": 2}]}',
    '{"kind": "eval", "step": 1, "slices": [{"slice": {"k": 1}, "correct": 0, "total": 0}]}',
    '{"kind": "eval", "step": 1, "slices": [{"slice": "k", "correct": 1, "total": 2}]}',
    '{"kind": "eval", "step": 1, "slices": [{"slice": {"k": 1}, "correct": NaN, "total": 2}]}',
]  # fmt: skip
OF_TEXT = [
    '{"kind": "eval", "step": 9, "loss": 1.0}', '{"kind": "eval", "step": 9, "loss": 1.0, "sets": [1]}',
    '{"kind": "eval", "step": 9, "loss": 1.0, "sets": {"web": 3}}', '{"kind": "eval", "loss": 1.0, "sets": {}}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "row", "line"),
    [*((write_run, evaluation(50, HALF), line) for line in ROWS),
     *((write_text_run, text_evaluation(50, {"web": (3.5, 1.1, 1000)}), line) for line in (*OF_TEXT, *ROWS[-1:]))],
)  # fmt: skip
def test_damaged_rows_are_counted_not_raised(tmp_path, write, row, line):
    run = load_run(write(tmp_path / "run", evals=[row], tail=line + "\n"))
    assert (run.damaged_rows, [row.step for row in run.evals]) == (1, [50])


BREVO = {("n", 70): (30, 100), ("depth", 10): (1, 10), ("depth", 2): (29, 90), ("nodes", "9-16"): (10, 60),
         ("nodes", "1-8"): (20, 40)}  # fmt: skip


def test_accuracy_uses_the_primary_scale_despite_other_slices(run_folder):
    final = load_run(run_folder(evals=[evaluation(50, BREVO)])).result.final
    assert final.accuracy == 0.3
    assert list(final.slices) == ["n=70", "depth=2", "depth=10", "nodes=1-8", "nodes=9-16"]


def test_the_primary_scale_is_the_first_in_the_file(run_folder):
    slices = {("k", 2): (10, 100), ("a", 1): (100, 100), ("k", 1): (50, 100)}
    assert load_run(run_folder(evals=[evaluation(50, slices)])).result.final.accuracy == pytest.approx(0.3)
    unasked = {("b", 1): (0, 0)} | slices  # a slice without questions has no accuracy
    assert load_run(run_folder("b", evals=[evaluation(50, unasked)])).result.final.accuracy == pytest.approx(0.3)


def test_measures_are_listed_with_the_slices(run_folder):
    run = load_run(run_folder(evals=[evaluation(0, HALF), evaluation(50, HALF, measures={"kl": 0.25, "bits": 3})]))
    assert [row.measures for row in run.evals] == [{}, {"kl": 0.25, "bits": 3.0}]
    assert [run.result.final.value(key) for key in ("kl", "k=2", "?")] == [0.25, 0.1, None]
    assert run.notes == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "0.5", None, True, [0.5], {}])
def test_a_measure_that_is_not_a_number_is_dropped_and_reported(run_folder, value):
    run = load_run(run_folder(evals=[evaluation(50, HALF, measures={"kl": value, "bits": 2.0})]))
    assert run.result.final.measures == {"bits": 2.0}
    assert run.result.final.accuracy == pytest.approx(0.3)
    assert run.damaged_rows == 0
    assert run.notes == ("kl of the final evaluation is not a finite number",)


@pytest.mark.parametrize("measures", [3, "kl", [1.0], {"": 1.0}, {"k=1": 1.0}, {"all": 1.0}])
def test_measures_that_are_none_are_skipped(run_folder, measures):
    run = load_run(run_folder(evals=[evaluation(50, HALF, measures=measures)]))
    assert (run.result.final.measures, run.damaged_rows, run.notes) == ({}, 0, ())
    assert run.result.final.slices["k=1"] == Count(50, 100)


def test_bytes_that_are_not_text(run_folder):
    folder = run_folder(evals=[evaluation(50, HALF)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"kind"\n')
    assert load_run(folder).damaged_rows == 1


def test_a_damaged_result_is_reported_as_an_unfinished_run(run_folder):
    folder = run_folder(evals=[evaluation(50, HALF)])
    (folder / "result.json").write_text('{"steps": 50')
    run = load_run(folder)
    assert not run.finished
    assert run.notes == ("result.json is damaged",)


def test_a_result_that_contradicts_the_rows_is_refused(run_folder):
    run_folder = run_folder(evals=[evaluation(0, HALF), evaluation(100, HALF)])
    assert load_run(run_folder).finished
    assert read_finished(run_folder).evals == load_run(run_folder).evals
    result = json.loads((run_folder / "result.json").read_text())
    result["final"]["slices"][0]["correct"] = result["final"]["slices"][0]["total"]
    (run_folder / "result.json").write_text(json.dumps(result))
    for read in (load_run, read_finished):
        with pytest.raises(
            ValueError, match=r"result\.json and metrics\.jsonl differ in the evaluation after step 100"
        ):
            read(run_folder)


def test_a_result_of_another_run_is_refused(run_folder):
    """Even one with the same numbers, as two seeds that solve a task have."""
    run_folder = run_folder(evals=[evaluation(100, HALF)])
    result = json.loads((run_folder / "result.json").read_text())
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    result["run"] = label(config)
    (run_folder / "result.json").write_text(json.dumps(result))
    assert load_run(run_folder).finished
    config["train"]["seed"] += 1
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"of another run than config\.yaml: train\.seed is 0 there, and 1 here"):
        load_run(run_folder)


def test_a_rate_that_yaml_reads_as_text(run_folder):
    folder = run_folder(evals=[evaluation(50, HALF)])
    text = (folder / "config.yaml").read_text().replace("lr: 0.001", "lr: 3e-3")
    (folder / "config.yaml").write_text(text)
    assert load_run(folder).lr == 0.003


def test_the_last_of_two_rows_for_one_step_is_used(run_folder):
    run = load_run(run_folder(evals=[evaluation(50, HALF), evaluation(50, {("k", 1): (7, 10)})]))
    assert run.evals[0].slices == {"k=1": Count(7, 10)}


def test_unreadable_runs_are_skipped_with_a_reason(tmp_path):
    good = write_run(tmp_path / "good", evals=[evaluation(50, HALF)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "notes.txt").write_text("hello")
    started = write_run(tmp_path / "started", finished=False)
    broken = write_run(tmp_path / "broken", evals=[evaluation(50, HALF)])
    (broken / "config.yaml").write_text("a: [1,\n")
    lacking = write_run(tmp_path / "lacking", evals=[evaluation(50, HALF)])
    (lacking / "config.yaml").write_text("task: {name: depo}\narch: llama\ntrain: {seed: 0}\n")
    words = write_run(tmp_path / "words", evals=[evaluation(50, HALF)], lr="fast")
    folders = [good, tmp_path / "empty", tmp_path / "stray", started, broken, lacking, words, tmp_path / "gone"]
    runs, left_out = read_runs(folders)
    assert [run.name for run in runs] == ["good"]
    assert {entry.name: entry.reason for entry in left_out} == {
        "empty": "empty folder",
        "stray": "no config.yaml: not a run folder",
        "started": "nothing recorded yet",
        "broken": "config.yaml is damaged, line 2: not YAML: did not find expected node content",
        "lacking": "config.yaml has no train.optim.lr",
        "words": 'train.optim.lr: expected a number, got "fast"',
        "gone": "no such folder",
    }


def test_the_queues_folders_are_not_broken_runs(tmp_path):
    write_run(tmp_path / "done", evals=[evaluation(50, HALF)])
    for name in ("leases", ".leases.tmp-0bbfd16a", "mine"):
        (tmp_path / name).mkdir()
    assert [path.name for path in run_folders(tmp_path)] == ["done", "mine"]
    (tmp_path / "mine").rmdir()
    assert [path.name for path in run_folders(tmp_path)] == ["done"]


def test_runs_that_have_not_begun_are_one_line(tmp_path):
    """After a change of plan, a page listed every run of the earlier plan."""
    write_run(tmp_path / "done", evals=[evaluation(50, HALF)])
    for seed in range(5):
        write_run(tmp_path / f"waiting-{seed}", seed=seed, finished=False)
    (tmp_path / "empty").mkdir()
    play = load_play(tmp_path)
    assert len(play.left_out) == 6
    *_, lines = blocks(render(play), "list")
    assert lines == ["empty: empty folder", "5 runs: nothing recorded yet (waiting-0 and others)"]


def test_slices_are_named_and_sorted_numerically():
    assert slice_key({"k": 1}) == "k=1"
    assert slice_key({}) == "all"
    assert in_order(["k=10", "k=2", "k=all", "k=1"]) == ["k=1", "k=2", "k=10", "k=all"]
    assert in_order(["n=17-32", "n=9-16", "d=0.5", "n=1-8", "d=0.25", "n=33+", "n=1-8"]) == [
        "n=1-8", "n=9-16", "n=17-32", "n=33+", "d=0.25", "d=0.5"
    ]  # fmt: skip
    assert in_order(["d=1", "d=-1", "d=0", "d=-10"]) == ["d=-10", "d=-1", "d=0", "d=1"]
    assert in_order(["p=0.001", "p=1e-05", "p=0.1"]) == ["p=1e-05", "p=0.001", "p=0.1"]
    assert in_order(["from=start", "from=cut"]) == ["from=start", "from=cut"]  # words as the task names them


def test_play_sections_and_missing_runs(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, evals=[evaluation(50, HALF)])
    sections = [{"heading": "One", "text": "", "runs": ["a", "../runs/b", "later"], "chance": {"k=1": 0.5, "k=2": "x"}}]
    (tmp_path / "play.json").write_text(json.dumps({"title": "T", "sections": sections, "command": "canonlm play"}))
    play = load_play(tmp_path)
    assert [run.name for run in play.sections[0].runs] == ["a"]
    assert play.sections[0].chance == {"k=1": 0.5}
    assert {entry.name: entry.reason for entry in play.left_out} == {
        "../runs/b": "not started: no such folder",
        "later": "not started: no such folder",
        "b": "not listed in play.json",
    }


@pytest.mark.parametrize("text", [None, "{", "[]", '{"sections": 3}', '{"sections": []}', '{"sections": [3]}'])
def test_without_a_usable_play_file_there_is_one_section_per_task(tmp_path, text):
    write_run(tmp_path / "runs" / "a", evals=[evaluation(50, HALF)])
    write_run(tmp_path / "runs" / "b", evals=[evaluation(50, HALF)], task={"name": "mano", "max_len": 4})
    write_run(tmp_path / "runs" / "c", evals=[evaluation(50, HALF)], task={"name": "depo", "max_n": 9})
    if text is not None:
        (tmp_path / "play.json").write_text(text)
    headings = [section.heading for section in load_play(tmp_path).sections]
    assert headings == ["depo (max_n=30, max_k=4)", "depo (max_n=9)", "mano"]
