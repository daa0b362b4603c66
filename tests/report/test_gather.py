"""Several folders at once: each run once, with a unique name, beside runs with the same questions. And any contents of
a folder give a report."""

import json
import os
import shutil
import time

import pytest
from folders import evaluation, text_evaluation, write_results, write_run, write_text_run
from reading import numbers, printed, visible_text

from canonlm.experiments.published.runs import runs_curves
from canonlm.report import load_play, tables, write_report
from canonlm.report.settings import unplanned
from canonlm.runs.gather import gather
from canonlm.runs.load import LeftOut

HALF = {("k", 1): (50, 100), ("k", 2): (10, 100)}
OTHER = {"name": "depo", "max_n": 9}


def play_folder(folder, runs, heading="Depo", **kwargs):
    """`runs`: {name: keywords of `write_run`}."""
    for name, about in runs.items():
        write_run(folder / "runs" / name, **{"evals": [evaluation(50, HALF)]} | about)
    section = {"heading": heading, "text": "", "runs": list(runs), "chance": {"k=1": 0.5}}
    (folder / "play.json").write_text(
        json.dumps({"title": heading, "sections": [section], "command": heading} | kwargs)
    )
    return folder


def shape(play):
    return {section.heading: [run.name for run in section.runs] for section in play.sections}


def test_sections_with_the_same_settings_are_merged(tmp_path):
    one = play_folder(tmp_path / "one", {"a": {}, "b": {"seed": 1}}, "Mine")
    two = play_folder(tmp_path / "two", {"a": {"arch": "llama+canon"}, "c": {"arch": "gla5"}}, "Yours")
    play = load_play([one, two])
    assert shape(play) == {"Mine": [f"{one}/a", "b", f"{two}/a", "c"]}
    assert [run.arch for run in play.sections[0].runs] == ["llama", "llama", "llama+canon", "gla5"]
    assert play.sections[0].chance == {"k=1": 0.5}
    assert (play.title, play.command) == ("Mine and Yours", "Mine\nYours")
    page = write_report([one, two], tmp_path / "both.html").read_text()
    assert f"{two}/a" in page


def test_the_folder_where_play_started_shows_its_runs(tmp_path):
    """`canonlm report .` beside the folder `runs`."""
    play_folder(tmp_path / "runs" / "one", {"a": {}}, "Mine")
    play_folder(tmp_path / "runs" / "two", {"b": {"task": OTHER}}, "Yours")
    play = load_play(tmp_path)
    assert shape(play) == shape(load_play(tmp_path / "runs")) == {"Mine": ["a"], "Yours": ["b"]}
    assert play.left_out == ()


def test_other_settings_of_a_task_are_another_section(tmp_path):
    one = play_folder(tmp_path / "one", {"a": {}}, "depo")
    two = play_folder(tmp_path / "two", {"a2": {"task": OTHER}}, "depo")
    assert shape(load_play([one, two])) == {"depo (max_n=30, max_k=4)": ["a"], "depo (max_n=9)": ["a2"]}
    assert shape(load_play(two)) == {"depo": ["a2"]}


def test_two_sections_of_one_folder_are_not_merged(tmp_path):
    one = tmp_path / "one"
    for name in ("a", "b"):
        write_run(one / "runs" / name, evals=[evaluation(50, HALF)])
    sections = [{"heading": name, "runs": [name]} for name in ("a", "b")]
    (one / "play.json").write_text(json.dumps({"sections": sections}))
    two = play_folder(tmp_path / "two", {"c": {}})
    assert shape(load_play([one, two])) == {"a": ["a", "c"], "b": ["b"]}


def test_a_run_that_is_given_twice_counts_once(tmp_path):
    one = play_folder(tmp_path / "one", {"a": {}, "b": {}})
    again = [one, one / "runs", one / "runs" / "a", tmp_path / "two" / ".." / "one"]
    (tmp_path / "two").mkdir()
    (tmp_path / "link").symlink_to(one / "runs" / "b")
    assert shape(load_play([*again, tmp_path / "link"])) == {"Depo": ["a", "b"]}
    numbers, _ = runs_curves(again)
    assert numbers["model"].unique().sort().to_list() == ["a", "b"]
    assert numbers.is_duplicated().sum() == 0


def test_results_of_one_name_in_two_folders(tmp_path):
    for name in ("one", "two"):
        entry = ("multihop", "1hop", {}, [("exact", 0.5, None, 4, {}, True)])
        write_results(tmp_path / name / "mine", {"source": "mine"}, [entry])
    both = [tmp_path / "one", tmp_path / "two"]
    assert [one.label for one in load_play(both).evaluated] == [f"{folder}/mine" for folder in both]
    assert [one.label for one in load_play(both[0]).evaluated] == ["mine"]
    assert [list(one.evaluated) for one in gather(both)] == [[f"{folder}/mine"] for folder in both]


def test_text_of_several_folders(tmp_path):
    rows = [text_evaluation(10, {"web": (2.0, 0.5, 10)})]
    one = write_text_run(tmp_path / "one", evals=rows, contents={"web": "aa"})
    two = write_text_run(tmp_path / "two", evals=rows, contents={"web": "aa"}, arch="gla5")
    play = load_play([one, two, play_folder(tmp_path / "three", {"a": {}})])
    texts = {section.heading: [run.name for run in section.runs] for section in play.texts}
    assert texts == {"Pretraining on text: web": ["two", "one"]}
    assert shape(play) == {"Depo": ["a"]}


def test_skipped_runs_are_named_with_their_folder(tmp_path):
    one = play_folder(tmp_path / "one", {"a": {}})
    two = play_folder(tmp_path / "two", {"b": {}})
    (two / "runs" / "c").mkdir()
    play = load_play([one, two])
    assert play.left_out == (LeftOut(f"{two}/c", "empty folder"),)
    with pytest.raises(ValueError, match="folder: expected a folder with runs or results"):
        load_play([one, tmp_path / "nowhere"])


GARBAGE = bytes(range(256)) * 40


DAMAGES = {
    "garbage": lambda path: path.write_bytes(GARBAGE),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(missing_ok=True),
    "deep": lambda path: path.write_text("[" * 30_000),
    "other": lambda path: path.write_text(
        '{"sections": [{"runs": 5}, {"runs": null, "heading": 3}, 7], "arch": "\\ud800"}'
    ),
    "deeper": lambda path: path.write_text("- " * 30_000),
    "endless": lambda path: path.write_text("&a {arch: *a, model: *a}"),
    "folder": lambda path: (path.unlink(missing_ok=True), path.mkdir()),
}


def lines_of(folder):
    page = write_report(folder).read_text()
    assert "whole" in {row["run"] for row in numbers(page)}
    printed(folder)
    return visible_text(page).splitlines()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "result.json", "env.json", "data.json"])
def test_a_damaged_file_is_named_on_the_page(tmp_path, name):
    """There are many runs, each with another damage."""
    play_folder(tmp_path, {"whole": {}, **{kind: {"evals": [evaluation(50, HALF)]} for kind in DAMAGES}})
    for kind, damage in DAMAGES.items():
        text = tmp_path / "runs" / f"text-{kind}"
        write_text_run(text, evals=[text_evaluation(5, {"web": (1.0, 0.3, 9)})], contents={"web": "a"})
        for folder in (tmp_path / "runs" / kind, text):
            damage(folder / name)
    named = {line.partition(":")[0] for line in lines_of(tmp_path) if name in line}
    assert "text-garbage" in named
    if name == "config.yaml":
        assert {*DAMAGES, *(f"text-{kind}" for kind in DAMAGES)} <= named


@pytest.mark.every(4)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_page_of_a_damaged_play_folder(tmp_path, damage):
    play_folder(tmp_path, {"whole": {}})
    damage(tmp_path / "play.json")
    lines_of(tmp_path)


def test_names_that_are_not_text(tmp_path):
    for place, make in enumerate((write_run, write_text_run)):
        rows = [evaluation(50, HALF)] if place == 0 else [text_evaluation(5, {"a\ud800": (1.0, 0.3, 9)})]
        folder = tmp_path / "runs" / os.fsdecode(b"n\xff%d" % place)
        make(folder, evals=rows, arch="llama", losses=[(5, 1.0)])
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace("arch: llama", 'arch: "\\ud800"'))
    page = write_report(tmp_path).read_text()
    assert "n?0" in page
    for part in tables(load_play(tmp_path)):
        str(part).encode()


def test_names_cannot_send_terminal_escapes(tmp_path):
    task = {"name": "x\x1b[2J", "n": "\x1b[2J"}
    write_run(
        tmp_path / "runs" / "a\x1b[2J", arch="b\x1b[2J", task=task, evals=[evaluation(50, {("k", "\x1b[2J"): (1, 2)})]
    )
    write_run(tmp_path / "runs" / "c\x1b[2J", task=task, evals=[evaluation(50, HALF)], finished=False)
    rows = [text_evaluation(5, {"d\x1b[2J": (1.0, 0.3, 9)})]
    write_text_run(tmp_path / "runs" / "e\x1b[2J", evals=rows, sources={"f\x1b[2J": ("g", 1.0)})
    entry = ("multihop", "j\x1b[2J", {}, [("i\x1b[2J", 0.5, None, 4, {}, True)])
    write_results(tmp_path / "evals" / "h\x1b[2J", {"source": "k"}, [entry])
    (tmp_path / "runs" / "l\x1b[2J").mkdir()
    text = printed(tmp_path, width=250)
    assert all(f"{letter}�[2J" in text for letter in "bcdfhijlx")
    assert "\x1b" not in text


@pytest.mark.slow
def test_500_runs(tmp_path):
    """It may take ten seconds on a small machine that also does other work, so the test measures CPU time."""
    rows = [evaluation(step, {("k", k): (step // 10 + k, 100) for k in (1, 2, 3, 4)}) for step in range(0, 601, 100)]
    first = write_run(tmp_path / "runs" / "0", arch="llama", evals=rows, losses=[(10, 3.0), (600, 2.0)])
    config = (first / "config.yaml").read_text()
    for place in range(1, 500):  # writing YAML is slow
        folder = shutil.copytree(first, tmp_path / "runs" / str(place))
        arch = ("llama", "llama+canon", "gla5", "gdn2")[place % 4]
        text = config.replace("arch: llama", f"arch: {arch}").replace("seed: 0", f"seed: {place}")
        (folder / "config.yaml").write_text(text)
    start = time.process_time()
    page = write_report(tmp_path)
    assert time.process_time() - start < 10
    assert len({row["run"] for row in numbers(page.read_text())}) == 500


def test_different_sizes_are_reported(tmp_path):
    for width in (128, 256):
        model = {"num_hidden_layers": 4, "hidden_size": width}
        write_run(tmp_path / "runs" / f"wide{width}", evals=[evaluation(50, HALF)], config={"model": model})
    (section,) = load_play(tmp_path).sections
    assert unplanned(section.groups) == ["model.hidden_size"]
