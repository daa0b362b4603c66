"""A task as one function: the one in the docs trains and equals the class beside it; mistakes are one line."""

import json

import numpy as np
import pytest
from refusals import refused
from task_of_the_docs import CLASS, FUNCTION

from canonlm import tasks
from canonlm.cli import main
from canonlm.launch.recipes import load_preset
from canonlm.runs import task_info
from canonlm.runs.identity import identity
from canonlm.tasks.base import Verdict
from canonlm.tasks.tally import Tally
from canonlm.train.config import resolve
from canonlm.train.load_config import merge

HEAD = "import numpy as np\nfrom canonlm.tasks import Answer, Instance, Scale, task\n"


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION + CLASS, encoding="utf-8")
    return tmp_path / "mine.py"


def written(mine, arguments, function):
    mine.write_text(f"{HEAD}@task({arguments})\n{function}\n")
    return tasks.get("mine.py:own")


@pytest.mark.slow
def test_the_task_in_the_docs_plays(tmp_path, mine, capsys):
    mine.write_text(FUNCTION)
    assert len(FUNCTION.splitlines()) <= 20
    train = {"steps": 2, "eval_every": 2, "eval_size": 8, "checkpoint_every": 2, "batch_size": 4}
    small = [*(f"train.{key}={value}" for key, value in train.items()), "model.hidden_size=16", "task.bits=9"]
    assert main(["play", "mine.py:parity", "--arch", "llama", "--out", "out", *small]) == 0
    [described] = tmp_path.glob("out/runs/*/task.json")
    assert json.loads(described.read_text())["chance"] == {"bits=4": 0.5, "bits=8": 0.5, "bits=9": 0.5}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "must say whether the number of ones is even or odd" in page
    assert "bits = 9" in page


def test_function_and_class_are_the_same_task():
    function, written_as_class = tasks.get("mine.py:parity"), tasks.get("mine.py:Parity")
    for split in tasks.SPLITS:
        for of_function, of_class in zip(
            *(task.windows(split, 3, 5, 4, seq_len=100) for task in (function, written_as_class)), strict=True
        ):
            np.testing.assert_array_equal(of_function, of_class)
    sample = function.sample("test", 0, 0)
    assert sample.queries == written_as_class.sample("test", 0, 0).queries
    assert function.slices() == written_as_class.slices()
    assert (function.name, repr(function)) == ("mine.py:parity", "mine.py:parity(bits=16)")
    by_hand = type(function)(bits=12)
    assert (by_hand.name, by_hand.spec.bits, by_hand.max_len) == ("parity", 12, 15)
    assert all(verdict.correct for verdict in function.grade(sample, sample.tokens))
    assert not function.grade(sample, sample.tokens ^ 1)[0].correct


def test_settings_are_those_of_a_run():
    preset = load_preset("mine.py:parity", "tiny")

    def run(**settings):
        return resolve(merge(preset.run, {"arch": "llama", "task": settings}))

    assert run().task == {"name": "mine.py:parity", "bits": 16}
    identities = {identity(run(**settings).model_dump()) for settings in ({}, {"bits": 16}, {"bits": 12})}
    assert len(identities) == 2
    for settings, line in (
        ({"bits": "x"}, 'task.bits: expected an integer, got "x"'),
        ({"bit": 4}, 'unknown setting "task.bit". Did you mean "task.bits"?'),
    ):
        with refused(f"...{line}..."):
            run(**settings)


def test_several_answers_in_named_slices(mine):
    task = written(
        mine,
        "vocab=lambda s: [*map(str, range(s.n)), '?'], max_len=9, chance=lambda where: 1 / where['n'],"
        "slices={'n': [2, 3]}, loss_on='all', markers=['?'], scales={'n': Scale('digits', str)}",
        "def own(rng, test, *, n=3):\n    return [0, '?', Answer(1, 2, n=2), '?', Answer('0', n=3)]",
    )
    sample = task.sample("train", 0, 0)
    assert sample.tokens.tolist() == sample.labels.tolist() == [0, 3, 1, 2, 3, 0]
    assert [(query.start, query.stop, query.slice) for query in sample.queries] == [(2, 4, {"n": 2}), (5, 6, {"n": 3})]
    assert [role for _, role in task.show(sample)] == ["context", "marker", "answer", "answer", "marker", "answer"]
    assert [task.chance(where) for where in task.slices()] == [1 / 2, 1 / 3]
    assert task.scales["n"].by == "digits"


def test_answers_without_a_slice_have_a_chance(mine, monkeypatch):
    task = written(
        mine, "vocab=['a', 'b'], max_len=2, chance=np.float32(0.5)", "def own(rng, test): return ['a', Answer('b')]"
    )
    assert json.loads(json.dumps(task_info.written(task)))["chance"] == {"all": 0.5}
    monkeypatch.setattr(type(task), "chance", lambda self, where: 1 + 3e-16)
    assert task_info.written(task)["chance"] == {"all": 1.0}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("vocab=['a', 'b', 'a'], chance=0", 'vocab: expected different texts, the names of the tokens, got "a"'),
        ("vocab=[*range(3)], chance=0", "vocab: expected different texts, the names of the tokens, got 0"),
        ("vocab=['a'], markers=['b'], chance=0", 'markers: expected names of the vocabulary, got "b"'),
        ("vocab=['a'], chance=50", "mine.py:own: chance of all: expected a share from 0 to 1, got 50"),
        (
            "vocab=['a'], chance=lambda where: None",
            "mine.py:own: chance of all: expected a share from 0 to 1, got None",
        ),
        ("vocab=['a'], chance=float('nan')", "mine.py:own: chance of all: expected a share from 0 to 1, got nan"),
        (
            "vocab=['a'], slices={'n': [1, '1']}, chance=lambda where: 0.5 if where['n'] == 1 else 0.1",
            "mine.py:own: chance of n=1: expected one share, 0.5, got 0.1",
        ),
        ("vocab=['a'], chance=0, score='n'", 'mine.py:own: score: expected a canonlm.tasks.Score, got "n"'),
        (
            "vocab=['a'], chance=0, scales={'n': 1}",
            "mine.py:own: scales: expected a dict of canonlm.tasks.Scale, got {'n': 1}",
        ),
        ("vocab=['a'], chance=0, measures=3", "mine.py:own: measures: expected a dict of canonlm.tasks.Measure, got 3"),
    ],
)
def test_invalid_words_or_chance(mine, arguments, line):
    with refused(line):
        task_info.written(written(mine, f"max_len=2, {arguments}", "def own(rng, test): return ['a', Answer('a')]"))


@pytest.mark.parametrize("drawn", ["['a', 'a']", "np.array(['a', 'a'])", "Instance(['a'], [])"])
@pytest.mark.parametrize("slices", ["", "slices={'n': [1]}"])
def test_a_task_without_answers_is_refused_before_training(mine, drawn, slices):
    task = written(mine, f"vocab=['a'], max_len=2, chance=0, {slices}", f"def own(rng, test): return {drawn}")
    with refused("mine.py:own: draw: expected an Answer in a test sample, got ..."):
        task_info.written(task)


@pytest.mark.parametrize("grade", [2, 0.5, None])
def test_grades_by_points_are_refused_before_training(mine, monkeypatch, grade):
    task = written(mine, "vocab=['a'], max_len=2, chance=0", "def own(rng, test): return ['a', Answer('a')]")
    monkeypatch.setattr(type(task), "_judge", lambda self, sample, query, answer: Verdict(grade, query.slice, ""))
    with refused("grade: expected a Verdict that is True or False, got Verdict(correct=..."):
        task_info.written(task)


def test_values_that_are_written_alike_are_one_slice():
    tally = Tally([{"a": 1}, {"a": "1"}])
    for verdict in (Verdict(True, {"a": "1"}, ""), Verdict(False, {"a": 1}, ""), Verdict(True, {"a": True}, "")):
        tally.add(verdict)
    assert tally.rows() == [
        {"slice": {"a": 1}, "correct": 1, "total": 2}, {"slice": {"a": True}, "correct": 1, "total": 1}
    ]  # fmt: skip


@pytest.mark.parametrize("slices", ["{'n': 1}", "['n']", "{'n': 'ab'}"])
def test_slices_without_lists(mine, slices):
    with refused("mine.py:own: slices: expected a list of values for each name, got ..."):
        function = "def own(rng, test): return ['a', Answer('a', n=1)]"
        written(mine, f"vocab=['a'], max_len=2, chance=0, slices={slices}", function).slices()


def test_slices_with_numbers_of_numpy(mine):
    task = written(
        mine,
        "vocab=['a', 'b'], max_len=2, chance=0.5, slices={'n': np.arange(3), 'p': np.array([0.5])}",
        "def own(rng, test): return ['a', Answer('b', n=np.int64(2), p=np.float64(0.5))]",
    )
    sample, tally = task.sample("test", 0, 0), Tally(task.slices())
    assert json.dumps(sample.queries[0].slice) == '{"n": 2, "p": 0.5}'
    for verdict in (*task.grade(sample, sample.tokens), Verdict(False, {"n": np.int64(2)}, "")):
        tally.add(verdict)
    rows = json.loads(json.dumps(tally.rows()))
    assert [(row["slice"], row["correct"], row["total"]) for row in rows] == [
        ({"n": 0}, 0, 0), ({"n": 1}, 0, 0), ({"n": 2}, 1, 2), ({"p": 0.5}, 1, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "function", "line"),
    [
        ("", "def own(rng): ...", 'own: expected the arguments (rng, test), or (rng, test, *, setting='),
        ("", "def own(rng, test, n=3): ...", "own: expected the arguments (rng, test)"),
        ("", "def own(rng, test, *, n): ...", 'own: n: expected a setting with a default, got "n"'),
        ("loss=1", "def own(rng, test): ...", 'unknown attribute of a task "loss". Did you mean "loss_on"?'),
        ("", "def own(rng, test): return 'ab'", "mine.py:own: draw: expected names or ids"),
        ("", "def own(rng, test): return ['a', Answer()]", "mine.py:own: draw: expected answers after the first"),
        ("", "def own(rng, test): return ['a', 0.5]", "mine.py:own: draw: expected names or ids"),
        ("", "def own(rng, test): return [True, Answer('a')]", "mine.py:own: draw: expected names or ids"),
        ("", "def own(rng, test): ...", "mine.py:own: draw: expected tokens with Answers, or an Instance, got None"),
        ("", "def own(rng, test): return ['a', Answer('a', n=[1])]", "own: draw: expected numbers or texts in a slice"),
        ("", "def own(rng, test, *, name='a'): ...", "name: expected a setting with another name"),
        ("", "def own(rng, test, *, difficulty=1): ...", "difficulty: expected a setting with another name"),
        ("", "def own(rng, test, *, model_config=1): ...", "model_config: expected a setting with another name"),
        ("loss_on='answers'", "def own(rng, test): return ['a', Answer('a')]", 'loss_on: expected "answer" or "all"'),
    ],
)  # fmt: skip
def test_invalid_arguments(mine, arguments, function, line):
    with refused(f"...{line}..."):
        written(mine, f"vocab=['a'], max_len=9, chance=0, {arguments}", function).sample("train", 0, 0)


def test_the_length_of_the_longest_instance_is_an_integer(mine):
    with refused("max_len: expected an integer from 1 to 2**63 - 1, got 2.5"):
        written(mine, "vocab=['a'], max_len=lambda s: s.n / 2, chance=0", "def own(rng, test, *, n=5): ...")


def test_a_vocabulary_that_can_be_read_once(mine):
    function = "def own(rng, test): return ['a', Answer('b')]"
    for task in (written(mine, "vocab=(c for c in 'ab'), max_len=2, chance=0", function), tasks.get("mine.py:own")):
        assert task.sample("train", 0, 0).tokens.tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["", ": tuple[int, int]", ": tuple[int, ...] | None"])
def test_a_tuple_is_a_list_in_the_configuration_of_a_run(mine, kind):
    function = f"def own(rng, test, *, pair{kind} = (1, 2)): return ['a', Answer('a', n=rng.choice(pair))]"
    task = written(mine, "vocab=['a'], max_len=2, chance=0", function)
    assert tasks.get("mine.py:own", pair=[1, 2]).spec == task.spec
    run = resolve(merge(load_preset("mine.py:own", "tiny").run, {"arch": "llama"}))
    assert resolve(json.loads(json.dumps(run.model_dump()))) == run


def test_a_default_has_its_settings_type(mine):
    """It is hashed as the one that a saved run has."""
    task = written(
        mine,
        "vocab=['a'], max_len=2, chance=0",
        "def own(rng, test, *, noise: float = 0): return ['a', Answer('a')]",
    )
    assert repr(task) == repr(tasks.get("mine.py:own", noise=0.0)) == "mine.py:own(noise=0.0)"


@pytest.mark.parametrize("name", ["spec", "self"])
def test_a_setting_may_be_called_as_an_argument_is(mine, name):
    function = f"def own(rng, test, *, {name}=3): return ['a', Answer('a')]"
    task = written(mine, "vocab=['a'], max_len=2, chance=0", function)
    made = (task, type(task)(**{name: 4}), type(task)(task.spec), tasks.get("mine.py:own", **{name: 4}))
    assert [getattr(each.spec, name) for each in made] == [3, 4, 3, 4]
