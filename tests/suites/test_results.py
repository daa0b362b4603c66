"""Stored results of `canonlm eval`: single answers, complete entries, no question twice, nothing of another model."""

import json

import pytest

from canonlm.suites.questions import Question, Score, scores, share_right
from canonlm.suites.results import Results

ABOUT = {"source": "a/run", "fingerprint": "f1", "tokenizer": "t1"}


class Sums:
    """Questions for i + i."""

    name, measures, max_new_tokens, stop = "sums", ("exact", "digit"), 3, ("\n",)

    def __init__(self, n=6):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return Question(f"{index} + {index} =", str(2 * index), {"parity": index % 2})

    def grade(self, question, text):
        return {"exact": text == question.answer, "digit": text.isdigit()}


class Calculator:
    """Right on even questions, empty answers to odd ones; longest prompts first, as a batch writer does."""

    def __init__(self, dies_after=None):
        self.questions, self.dies_after = [], dies_after

    def __call__(self, prompts, max_new_tokens, stop):
        assert (max_new_tokens, stop) == (3, ("\n",))
        for place in reversed(range(len(prompts))):
            if len(self.questions) == self.dies_after:
                raise KeyboardInterrupt
            number = int(prompts[place].split()[0])
            self.questions.append(number)
            yield place, str(2 * number) if number % 2 == 0 else ""


def test_scores_by_slice(tmp_path):
    result = Results(tmp_path, ABOUT).ask("sums", Sums(), {}, Calculator())
    assert [(s.measure, s.value, s.n, s.slice) for s in result] == [
        ("exact", 0.5, 6, {}),
        ("exact", 1.0, 3, {"parity": 0}),
        ("exact", 0.0, 3, {"parity": 1}),
        ("digit", 0.5, 6, {}),
        ("digit", 1.0, 3, {"parity": 0}),
        ("digit", 0.0, 3, {"parity": 1}),
    ]
    assert result[0].stderr == pytest.approx((0.25 / 5) ** 0.5)  # the standard error of a mean of six
    rows = [{"slice": {"k": 1}, "right": {"m": True}}, {"slice": {}, "right": {"m": False}}]  # only some have a slice
    assert scores(rows, ("m",)) == [share_right("m", 1, 2), share_right("m", 1, 1, {"k": 1})]


def test_saved_answers_are_reused(tmp_path):
    first = Calculator(dies_after=4)
    with pytest.raises(KeyboardInterrupt):
        Results(tmp_path, ABOUT).ask("sums", Sums(), {}, first)
    (path,) = (tmp_path / "answers").glob("*.jsonl")
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [5, 4, 3, 2]
    with path.open("ab") as file:
        file.write('{"index": 1, "output": "ü'.encode()[:-1])  # as a killed process leaves it
    second, counted = Calculator(), []
    result = Results(tmp_path, ABOUT).ask("sums", Sums(), {}, second, counted.append)
    assert sorted(second.questions) == [0, 1]
    assert counted == [4, 5, 6]
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [5, 4, 3, 2, 1, 0]
    assert result == Results(tmp_path / "other", ABOUT).ask("sums", Sums(), {}, Calculator())
    third = Calculator()
    assert Results(tmp_path, ABOUT).ask("sums", Sums(), {}, third) == result
    assert third.questions == []


def test_entries(tmp_path):
    results = Results(tmp_path, ABOUT)
    assert results.find("sums", "sums", {"seed": 0}) is None
    entry = results.add("sums", "sums", {"seed": 0}, [Score("exact", 0.5, 0.1, 6)], 1.26)
    assert results.find("sums", "sums", {"seed": 0}) == entry
    assert Results(tmp_path, ABOUT).find("sums", "sums", {"seed": 0}) == json.loads(json.dumps(entry))
    assert results.find("sums", "sums", {"seed": 1}) is None
    rows = json.loads((tmp_path / "results.json").read_text())
    assert rows["model"] == ABOUT
    (kept,) = rows["results"]
    assert (kept["suite"], kept["name"], kept["settings"], kept["seconds"]) == ("sums", "sums", {"seed": 0}, 1.3)
    assert kept["scores"] == [
        {"measure": "exact", "value": 0.5, "stderr": 0.1, "n": 6, "slice": {}, "higher_is_better": True, "share": True}
    ]
    assert {"canonlm", "torch", "transformers"} <= kept["versions"].keys()


@pytest.mark.parametrize(
    ("other", "settings"), [({"fingerprint": "f2"}, {}), ({"tokenizer": "t2"}, {}), ({}, {"seed": 1})]
)
def test_answers_of_another_model_or_to_other_questions_are_never_used(tmp_path, other, settings):
    """Not even of a model whose evaluation was stopped before it had a result."""
    with pytest.raises(KeyboardInterrupt):
        Results(tmp_path, ABOUT).ask("sums", Sums(), {}, Calculator(dies_after=4))
    calculator = Calculator()
    Results(tmp_path, {**ABOUT, **other}).ask("sums", Sums(), settings, calculator)
    assert len(calculator.questions) == 6
    assert len(list((tmp_path / "answers").glob("*.jsonl"))) == 2


def test_more_questions_reuse_the_answers_to_fewer(tmp_path):
    results, calculator = Results(tmp_path, ABOUT), Calculator()
    results.ask("sums", Sums(4), {"n": 4}, Calculator())
    result = results.ask("sums", Sums(6), {"n": 6}, calculator)
    assert sorted(calculator.questions) == [4, 5]
    assert result[0].n == 6
    assert results.ask("sums", Sums(4), {"n": 4}, calculator)[0].n == 4
    assert len(calculator.questions) == 2


def test_any_model_output_is_stored(tmp_path):
    def write(prompts, max_new_tokens, stop):
        yield from enumerate(["a\u2028b", "c\x85d\n", "\ud83d\ude00", "", "\x00", '"'][: len(prompts)])

    results = Results(tmp_path, ABOUT)
    result = results.ask("sums", Sums(), {}, write)
    calculator = Calculator()
    assert results.ask("sums", Sums(), {}, calculator) == result
    assert calculator.questions == []


def test_two_at_once(tmp_path):
    """They ask different questions, and neither loses the other's answers."""
    first, second = Results(tmp_path, ABOUT), Results(tmp_path, ABOUT)

    def write(prompts, max_new_tokens, stop):
        with pytest.raises(ValueError, match="another process is asking sums"):
            second.ask("sums", Sums(), {}, Calculator())
        return Calculator()(prompts, max_new_tokens, stop)

    first.ask("sums", Sums(), {}, write)
    first.add("a", "a", {}, [], 0)
    second.add("b", "b", {}, [], 0)
    first.add("a", "a", {}, [], 1)
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(entry["suite"], entry["seconds"]) for entry in rows] == [("b", 0), ("a", 1)]


def test_another_model_and_a_damaged_file_are_refused(tmp_path):
    Results(tmp_path, ABOUT).add("sums", "sums", {}, [], 0)
    for other in ({"fingerprint": "f2"}, {"tokenizer": "t2"}):
        with pytest.raises(ValueError, match=r"--out: expected a folder without results.* it has those of a/run, got"):
            Results(tmp_path, {**ABOUT, **other})
    Results(tmp_path, {**ABOUT, "checksum": "c1"}).add("sums", "sums", {}, [], 0)  # earlier versions had none
    with pytest.raises(ValueError, match=r"it has those of a/run, got"):
        Results(tmp_path, {**ABOUT, "checksum": "c2"})
    for text in ('{"model": ', "[]", '{"accuracy": 1}'):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ValueError, match=r"--out: expected a folder whose results\.json can be read \(it cannot"):
            Results(tmp_path, ABOUT)
        assert (tmp_path / "results.json").read_text() == text
