"""Tasks from users' files: the one in the docs trains; mistakes are one line."""

import json
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from refusals import refused
from task_of_the_docs import CLASS, FUNCTION

from canonlm import tasks
from canonlm.core import user_code
from canonlm.data.windows import WindowStream
from canonlm.launch.recipes import load_preset
from canonlm.train import evals
from canonlm.train.config import resolve
from canonlm.train.load_config import merge

HEAD = "from canonlm.tasks import Instance, Query, Task, Vocab\n"
BARE = (
    HEAD
    + """
class Bare(Task):
    vocab, max_len = Vocab("abc"), 3
    def draw(self, rng, test):
        return Instance({tokens}, [Query({query}, {{"all": 1}})])
    def slices(self): return [{{"all": 1}}]
    def chance(self, slice): return 0.0
"""
)


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CLASS, encoding="utf-8")
    return tmp_path / "mine.py"


def test_windows_consist_of_samples():
    task = tasks.get("mine.py:Parity", bits=9)
    assert (task.name, task.spec.bits, repr(task)) == ("mine.py:Parity", 9, "mine.py:Parity(bits=9)")
    for split in tasks.SPLITS:
        window = task.windows(split, 3, 5, 2, seq_len=100)
        for row in range(2):
            parts = [task.sample(split, 3, 5 + row, j) for j in range(40)]
            for field, expected in zip(window, ("tokens", "labels"), strict=False):
                full = np.concatenate([getattr(part, expected) for part in parts])
                np.testing.assert_array_equal(field[row], full[:100])
            placed = task.instances(split, 3, 5 + row, 100)
            assert [p.sample.tokens.tolist() for p in placed] == [p.tokens.tolist() for p in parts[: len(placed)]]
    lengths = Counter(len(task.sample("test", 0, i).tokens) - 3 for i in range(300))
    assert sorted(lengths) == [4, 8, 9]
    assert (
        len({task.windows("train", *key, 1, seq_len=64).input_ids.tobytes() for key in ((0, 0), (1, 0), (0, 1))}) == 3
    )
    sample = task.sample("test", 0, 0)
    assert all(verdict.correct for verdict in task.grade(sample, sample.tokens))
    assert not task.grade(sample, sample.tokens ^ 1)[0].correct
    with pytest.raises(ValueError, match="cannot be read back"):
        task.read(sample.tokens)


def test_settings_are_checked_and_completed_in_a_run(tmp_path):
    preset = load_preset("mine.py:Parity", "tiny")
    assert (preset.task, preset.run["data"]) == ("Parity", {"seq_len": 64, "loss_on": "answer", "workers": 1})
    run = resolve(merge(preset.run, {"arch": "llama"}))
    assert run.task == {"name": "mine.py:Parity", "bits": 16}
    for settings, line in (
        ({"bits": 0}, "task.bits: expected an integer >= 1, got 0"),
        ({"bit": 4}, 'unknown setting "task.bit". Did you mean "task.bits"?'),
        (
            {"name": "mine.py:Parit"},
            'unknown name in mine.py "Parit". Did you mean "Parity"? Names in mine.py: Parity.',
        ),
        ({"name": "mine.py"}, 'name: expected FILE.py:NAME or package.module:NAME, got "mine.py"'),
        ({"name": "mine.py:Field"}, "task: expected the name of a class that is a canonlm.tasks.Task"),
        ({"name": "its.py:Parity"}, f"its.py: No such file or directory ({tmp_path / 'its.py'})"),
        ({"name": "canonlm.tasks.nowhere:Parity"}, "canonlm.tasks.nowhere: ModuleNotFoundError: No module named"),
    ):
        with refused(f"{line}..."):
            resolve(merge(preset.run, {"arch": "llama", "task": settings}))
    with pytest.raises(ValueError) as error:
        resolve(merge(preset.run, {"arch": "llama", "task": {"bits": 0}}))
    assert error.value.key == "task.bits"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("x = 1\ny = (", "mine.py, line 2: SyntaxError: '(' was never closed"),
        (
            "x = 1\n\nimport nothing_like_this",
            "mine.py, line 3: ModuleNotFoundError: No module named 'nothing_like_this'",
        ),
        ("def f():\n    raise KeyError\nf()", "mine.py, line 2: KeyError"),
        ("raise SystemExit('no')", "mine.py, line 1: SystemExit: no"),
        ("raise ValueError('two\\nlines')", "mine.py, line 1: ValueError: two lines"),
    ],
)
def test_a_file_that_does_not_run(mine, code, line):
    mine.write_text(code)
    with refused(line):
        tasks.get("mine.py:Parity")


@pytest.mark.parametrize(
    ("tokens", "query", "line"),
    [
        ("'abx'", "1, 2", 'draw: expected names or ids of the 3 tokens of the vocabulary, got "x"'),
        ("[0, 3]", "1, 2", "draw: expected names or ids of the 3 tokens of the vocabulary, got 3"),
        ("'abca'", "1, 2", "draw: expected 1 to max_len = 3 tokens, got 4"),
        ("'abc'", "2, 4", "draw: expected answers after the first and within all 3 tokens, got Query(start=2, stop=4"),
    ],
)
def test_an_instance_that_does_not_fit(mine, tokens, query, line):
    mine.write_text(BARE.format(tokens=tokens, query=query))
    with refused(f"mine.py:Bare: {line}..."):
        tasks.get("mine.py:Bare").windows("train", 0, 0, 1, seq_len=9)


def test_files_with_one_name_do_not_interfere(tmp_path, mine):
    """Two files with one name, and a file that changes."""
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(BARE.format(tokens="'abc'", query="1, 2"))
    assert tasks.get("other/mine.py:Bare").windows("train", 0, 0, 1, seq_len=6).input_ids.tolist() == [[0, 1, 2] * 2]
    first = user_code.load("mine.py:Parity")
    assert (first.file, first.name, len(first.sha256)) == (mine, "Parity", 64)
    assert user_code.load("mine.py:Parity").object is first.object
    mine.write_text(CLASS.replace("Field(16", "Field(17"))
    changed = user_code.load("mine.py:Parity")
    assert changed.sha256 != first.sha256
    assert (tasks.get("mine.py:Parity").spec.bits, first.object.Spec().bits) == (17, 16)


def test_another_process_runs_the_file_again(mine):
    """As the workers of a loader do under "spawn". The class `Own` has the settings of its base."""
    mine.write_text(CLASS + "class Own(Parity): pass\n" + FUNCTION)
    made = [tasks.get(f"mine.py:{name}", bits=9) for name in ("Parity", "Own", "parity")]
    expected = [task.windows("test", 0, 0, 2, seq_len=40).input_ids.tolist() for task in made]
    code = "import pickle, sys\nfor task in pickle.load(sys.stdin.buffer):"
    code += "\n  print(task.name, task.spec.bits, task.windows('test', 0, 0, 2, seq_len=40).input_ids.tolist())"
    pickled = pickle.dumps(made)
    again = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True)
    assert again.stdout.decode().splitlines() == [
        f"{task.name} 9 {ids}" for task, ids in zip(made, expected, strict=True)
    ]
    mine.write_text(f"{mine.read_text()}\n")
    changed = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True)
    assert b"expected the file that the other process has run, unchanged" in changed.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["depo", "lano"])
def test_a_built_in_task_is_not_replaced(mine, monkeypatch, name):
    monkeypatch.setattr(tasks.base, "_TASKS", {**tasks.base._TASKS})
    mine.write_text(f"from canonlm.tasks import Task, register\n@register('{name}')\nclass Own(Task): pass")
    with refused(f'mine.py, line 2: ...register: expected a name that no built-in task has, got "{name}"'):
        tasks.get("mine.py:Own")
    assert tasks.find(name).__module__.startswith("canonlm.tasks.")
    mine.write_text(mine.read_text().replace(name, "own"))
    for _ in range(2):
        assert tasks.get("mine.py:Own").name == "mine.py:Own"
        assert tasks.find("own").__module__ == type(tasks.get("mine.py:Own")).__module__
        mine.write_text(f"{mine.read_text()}\n")


def test_a_task_of_an_installed_package():
    task = tasks.get("canonlm.tasks.depo:Depo", N=9)
    assert task.name == "canonlm.tasks.depo:Depo"
    np.testing.assert_array_equal(
        task.windows("test", 0, 0, 2, seq_len=64).input_ids,
        tasks.get("depo", N=9).windows("test", 0, 0, 2, seq_len=64).input_ids,
    )


def test_a_task_selects_or_defines_its_evaluation(mine):
    code = BARE.format(tokens="'abc'", query="1, 2")
    mine.write_text(code + "    evaluation = 'generat'\nclass Own(Bare):\n    evaluation = dict\n")
    with pytest.raises(ValueError, match=r"^unknown evaluation"):
        evals.build(WindowStream(tasks.get("mine.py:Bare"), "test", 0, 9, "all", False), 2, 2)
    mine.write_text(code + "    evaluation = lambda stream, size, batch_size: (stream.task.name, size)\n")
    assert evals.build(WindowStream(tasks.get("mine.py:Bare"), "test", 0, 9, "all", False), 2, 2) == ("mine.py:Bare", 2)


def test_slices_that_no_row_can_hold_are_refused_before_training(monkeypatch):
    task = tasks.get("copying", N=8)
    monkeypatch.setattr(type(task), "slices", lambda self: [{"k": k} for k in range(20_000)])
    with pytest.raises(ValueError, match=r"^copying: expected slices whose counts fit in a row .* got 20,000 slices$"):
        evals.build(WindowStream(task, "test", 0, 20, "answer", False), 2, 2)
    monkeypatch.setattr(type(task), "slices", lambda self: [{"k": k} for k in range(10_000)])
    evals.build(WindowStream(task, "test", 0, 20, "answer", False), 2, 2)


def test_custom_presets_and_difficulties(mine):
    own = """
    difficulties = {"long": {"bits": 99}}
    presets = {"tiny": {"lrs": [0.5], "run": {"train": {"steps": 7}}}}
"""
    mine.write_text(CLASS + own)
    preset = load_preset("mine.py:Parity", "tiny")
    assert (preset.lrs, preset.run["train"]["steps"], preset.run["train"]["batch_size"]) == ((0.5,), 7, 64)
    long = load_preset("mine.py:Parity", "paper", "long")
    assert (long.run["task"]["bits"], long.run["data"]["seq_len"], long.difficulty) == (99, 128, "long")
    with pytest.raises(ValueError, match=r'difficulty "lang"'):
        load_preset("mine.py:Parity", "tiny", "lang")


def test_a_run_carries_its_file(tmp_path, mine, monkeypatch):
    """Nothing runs without trust. With it, your file runs if it is unchanged, else the run's copy."""
    run, sha256 = tmp_path / "run", user_code.load("mine.py:Parity").sha256
    (run / "code").mkdir(parents=True)
    (run / "code" / "mine.py").write_bytes(mine.read_bytes())
    (run / "code.json").write_text(json.dumps({"outside": {"mine.py:Parity": sha256}}))
    refused = "expected --trust-remote-code, as it is a program"
    with user_code.of_run(run), pytest.raises(ValueError, match=rf"^mine\.py:Parity: {refused}"):
        user_code.load("mine.py:Parity")
    with user_code.of_run(run, trust=True):
        assert user_code.load("mine.py:Parity").file == mine
    with user_code.of_run(run, trust={"mine.py:Parity"}):
        assert user_code.load("mine.py:Parity").file == mine
        with pytest.raises(ValueError, match=f"^os:system: {refused}"):
            user_code.load("os:system")
    mine.write_text("raise SystemExit('another file')")
    with user_code.of_run(run, {"mine.py:Parity"}), pytest.raises(ValueError, match=f"expected the file .* {sha256}"):
        user_code.load("mine.py:Parity")
    with user_code.of_run(run, trust=True), user_code.of_run(run):  # what is opened in a trusted run is trusted
        assert user_code.load("mine.py:Parity").file == run / "code" / "mine.py"
    (run / "code" / "mine.py").write_text("raise SystemExit('damaged')")
    with (
        user_code.of_run(run, trust=True),
        pytest.raises(ValueError, match=rf"^mine.py: expected the file .* {sha256}$"),
    ):
        user_code.load("mine.py:Parity")


def test_a_run_carries_its_module_of_a_package(tmp_path, monkeypatch):
    """As its file: a module that has changed is not used. The run's copy has the package's relative imports."""
    monkeypatch.syspath_prepend(tmp_path)
    package, code = tmp_path / "package_of_mine", tmp_path / "run" / "code"
    for folder in (package, code):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("WORDS = 'abc'")
    module = package / "bare.py"
    module.write_text("from .words import WORDS\n" + BARE.format(tokens="WORDS", query="1, 2"))
    reference = "package_of_mine.bare:Bare"
    began = user_code.load(reference)
    (code / "bare.py").write_bytes(module.read_bytes())
    (code.parent / "code.json").write_text(json.dumps({"outside": {reference: began.sha256}}))
    with user_code.of_run(code.parent, trust=True):
        assert user_code.load(reference).object is began.object
        module.write_text("Bare = None")
        copy = user_code.load(reference)
        assert (copy.file, copy.sha256) == (code / "bare.py", began.sha256)
        assert tasks.get(reference).sample("test", 0, 0).tokens.tolist() == [0, 1, 2]
    changed = f"package_of_mine.bare: expected the file ...{began.sha256}"
    with user_code.of_run(code.parent, {reference}), refused(changed):
        user_code.load(reference)
