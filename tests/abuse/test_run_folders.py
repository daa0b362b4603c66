"""Run folders of strangers: any contents of a file give a report that names the problem."""

import io
import json
import re
import shutil
import sys
import time
import warnings
from pathlib import Path

import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "report"))
from folders import evaluation, text_evaluation, write_run, write_text_run

from canonlm.cli import main
from canonlm.cli.live import watched_line, watched_table
from canonlm.experiments.published.runs import load_runs, runs_curves, runs_frame
from canonlm.report import load_play, tables
from canonlm.report.page import render
from canonlm.runs import folder as run_folder
from canonlm.runs import rows
from canonlm.runs.watch import Followed, Watch

HALF = {("k", 1): (50, 100), ("k", 2): (10, 100)}
LONG = "x" * 100_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    top = tmp_path_factory.mktemp("whole")
    for name, arch in (("whole", "llama"), ("hurt", "llama+canon")):
        write_run(
            top / "runs" / name,
            arch=arch,
            evals=[evaluation(0, HALF), evaluation(50, HALF, measures={"kl": 1.0})],
            losses=[(10, 3.0), (50, 2.0)],
        )
        (top / "runs" / name / "code.json").write_text('{"outside": {}}')
        (top / "runs" / name / "task.json").write_text("{}")
    write_text_run(top / "runs" / "text", evals=[text_evaluation(5, {"web": (1.0, 0.3, 9)})], contents={"web": "a"})
    (top / "play.json").write_text(json.dumps({"sections": [{"heading": "h", "runs": ["whole", "hurt", "text"]}]}))
    return top


@pytest.fixture
def play(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "play")


def load_runs_quietly(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is damaged
        load_runs(folder, settings=["train.seed"])


def shown(folder):
    """Everything that a report makes of a folder: (the terminal output, the page)."""
    console = Console(file=io.StringIO(), width=400, color_system=None)
    for part in tables(load_play(folder)):
        console.print(part)
    watch = Watch(folder)
    watch.read(time.time())
    lines = [watched_line(run) for run in watch.runs]
    console.print(watched_table(watch.runs * 2, 40))  # twice, so that their names are shown
    for frame in (runs_frame, runs_curves):
        frame([folder])
    load_runs_quietly(folder)
    return console.file.getvalue() + "\n".join(lines), render(load_play(folder))


def of_row(**changed):
    return json.dumps({**evaluation(60, HALF), **changed})


NAMES = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a\u2028b\u2029c",
    "\x1b]0;title\x07\x1b[2J",
    "\x9b2J\r\n\t\x00",
]
KEYS = ("arch", "task", "setting", "source", "machine", "command", "heading", "preset")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *(pytest.param("".join(NAMES), [key], id=f"all-{key}") for key in KEYS),
        *(pytest.param(LONG, [key], id=f"long-{key}") for key in KEYS),
        *(pytest.param(name, [*KEYS], id=f"{ascii(name)[:30]}-everywhere") for name in NAMES),
    ],
)
def test_names_are_data(play, name, keys):
    changed = {
        "arch": {"arch": name},
        "task": {"task": {"name": name}},
        "setting": {"task": {"name": "depo", name: name}},
        "preset": {"preset": name},
    }
    config = {key: value for place in keys for key, value in changed.get(place, {}).items()}
    hurt = "hurt\x1b[2J\n"
    shutil.rmtree(play / "runs" / "hurt")
    write_run(play / "runs" / hurt, evals=[evaluation(50, HALF)], losses=[(5, 1.0)], config=config)
    if "source" in keys:
        sources, rows = {name: (name, 1.0)}, [text_evaluation(5, {name: (1.0, 0.3, 9)})]
        write_text_run(play / "runs" / "other", evals=rows, sources=sources)
    if "machine" in keys:
        (play / "runs" / hurt / "env.json").write_text(json.dumps({"machine": name, "torch": [name]}))
    if {"command", "heading"} & {*keys}:
        section = {"heading": name if "heading" in keys else "", "runs": ["whole", hurt]}
        (play / "play.json").write_text(json.dumps({"title": name, "command": name, "sections": [section]}))
    text, page = shown(play)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert not re.search("[\u2028\u2029]", "".join(re.findall(r"<script.*?</script>", page, re.DOTALL)))
    if not {"command", "heading"} & {*keys}:
        assert max(map(len, text.splitlines())) < 1_000


def test_a_large_file_is_read_by_lines_up_to_a_limit(play, monkeypatch):
    monkeypatch.setattr(rows, "MAX_BYTES", 2**14)
    path = play / "runs" / "hurt" / "metrics.jsonl"
    with path.open("a") as file:
        file.truncate(2**40)  # a terabyte of zeros, in a sparse file
    notes = []
    evals, _, _ = rows.read(path, notes)
    assert [row.step for row in evals] == [0, 50]
    assert notes == ["metrics.jsonl is not read beyond 16,384 bytes"]


def test_a_row_after_an_overlong_row_is_read(play, monkeypatch):
    path = play / "runs" / "hurt" / "metrics.jsonl"
    with path.open("a") as file:
        file.write("x" * (2 * rows.MAX_LINE + 7) + "\n" + of_row() + "\n")
    evals, _, damaged = rows.read(path)
    assert [row.step for row in evals] == [0, 50, 60]
    assert damaged == 3
    followed = Followed(path)
    assert followed.read()
    assert followed.step == 60
    assert not followed.read()


def test_the_damaged_line_of_a_configuration_is_named(play):
    path = play / "runs" / "hurt" / "config.yaml"
    path.write_text("a: b\nc:\n  " + "- " * 3_000)
    with pytest.raises(ValueError, match=r"^config.yaml is damaged, line 3: expected at most 100 levels of nesting$"):
        run_folder.read_config(path.parent)


def test_commands_print_names_in_one_line(play, capsys, monkeypatch):
    monkeypatch.chdir(play)
    name = "".join([*NAMES, "[red]x[/bold]"])
    shutil.rmtree(play / "runs" / "hurt")
    task = {"name": name, "N": name}
    rows = [evaluation(50, {(name, name): (1, 2)}, measures={f"m{name}": 1.0})]
    write_run(play / "runs" / "hurt", arch=name, task=task, evals=rows, losses=[(5, 1.0)])
    (play / "play.json").write_text(
        json.dumps({"title": name, "sections": [{"heading": name, "runs": ["hurt", name]}]})
    )
    for command in (
        ["report", "."],
        ["report", ".", "--watch", "--table"],
        ["results", ".", "source=yours"],
        ["results", "runs/hurt", "--html", "page.html"],
        ["results", ".", "--csv", "-", "source=yours"],
    ):
        assert main(command) == 0
        output = capsys.readouterr()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", output.out + output.err)
    page = (play / "page.html").read_text()
    assert "<script>alert" not in page
    assert "<img" not in page
