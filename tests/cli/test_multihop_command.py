"""`canonlm data multihop`: texts to train on."""

import json
import re

import pytest

from canonlm.cli import main
from canonlm.suites.multihop import MultiHop, MultiHopSettings


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def multihop(*args):
    return main(["data", "multihop", *args])


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def questions(split, **settings):
    return MultiHop(MultiHopSettings(**settings), lambda text: len(text.split()), split)


def test_every_line_is_a_question_with_its_answer(capsys, workdir):
    assert multihop("hops.jsonl", "k=2", "people=3", "background=40", "--n", "12", "--seed", "5") == 0
    printed = capsys.readouterr()
    assert printed.out == "hops.jsonl: 12 texts of 2hop-0.04k, split train, seed 5\n"
    assert printed.err == ""
    expected = questions("train", k=2, people=3, background=40, n=12, seed=5)
    for text, question in zip(texts(workdir / "hops.jsonl"), expected, strict=True):
        assert text.startswith(f"{question.prompt} {question.answer}. The birth year of ")
    assert [path.name for path in workdir.iterdir()] == ["hops.jsonl"]


def test_training_texts_are_not_the_test(workdir):
    for split in ("train", "test"):
        assert multihop(f"{split}.jsonl", "--n", "50", "--split", split) == 0
    assert not set(texts(workdir / "train.jsonl")) & set(texts(workdir / "test.jsonl"))
    for text, question in zip(texts(workdir / "test.jsonl"), questions("test", n=50), strict=True):
        assert text.startswith(f"{question.prompt} {question.answer}.")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_person_of_the_last_group_is_asked_about_once(workdir, k):
    """Checked by the text alone: whose year is stated, who shares it with whom, and the sentence at the end."""
    assert multihop("hops.jsonl", f"k={k}", "people=4", "background=30", "--n", "40") == 0
    for text in texts(workdir / "hops.jsonl"):
        facts, _, answer = text.rpartition("\n\n")
        years = dict(re.findall(r"(\w+ \w+ \w+) was born in (\d{4})\.", facts))
        links = dict(re.findall(r"(\w+ \w+ \w+) was born in the same year as (\w+ \w+ \w+)\.", facts))
        answers = re.findall(r"The birth year of (\w+ \w+ \w+) is (\d{4})\.", answer)
        last = ({*links} or {*years}) - {*links.values()}
        assert len(answers) == 4
        assert {name for name, _ in answers} == last
        for name, year in answers:
            while name in links:
                name = links[name]
            assert years[name] == year


def test_an_interrupted_command_leaves_nothing(monkeypatch, capsys, workdir):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(MultiHop, "_sentences", interrupt)
    assert multihop("hops.jsonl", "--n", "3") == 130
    assert list(workdir.iterdir()) == []
