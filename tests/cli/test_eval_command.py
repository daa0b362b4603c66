"""`canonlm eval`, then `canonlm report`, as a user types them."""

import json

import pytest

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.cli import main


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    config = CanonLMConfig(vocab_size=258, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    CanonLMForCausalLM(config).save_pretrained(folder)
    return folder


BYTES = "--tokenizer", "bytes"


def say(*arguments):
    return main(["eval", *map(str, arguments)])


def test_results_beside_the_command_and_in_the_report(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = (model, "--suite", "multihop", "k=[1,2]", "people=2", "n=3", "--tokenizer", "bytes", "--batch-size", "2")
    assert say(*command) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("1hop-0k  exact 0%  year 0%  (n = 3)")
    assert second.startswith("2hop-0k")
    assert last == "results: evals/tiny/results.json"
    assert say(*command) == 0
    assert [line.endswith("(as before)") for line in capsys.readouterr().out.splitlines()] == [True, True, False]
    assert len(json.loads((tmp_path / "evals" / "tiny" / "results.json").read_text())["results"]) == 2
    assert main(["report", "evals"]) == 0
    output = capsys.readouterr().out
    assert "Birth years in a text" in output
    assert "2hop-0k" in (tmp_path / "evals" / "report.html").read_text()


def test_home_is_home_in_every_name(model, tmp_path, monkeypatch, capsys):
    """zsh leaves ~ in KEY=~/FILE to the command. A folder "~" in the current one is easily removed with all of home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (tmp_path / "some.txt").write_text("It rains.")
    assert say("~/tiny", "--suite", "multihop", "people=2", "n=1", "background=1", "text=~/some.txt", *BYTES) == 0
    assert say("~/tiny", "--suite", "text", "~/some.txt", *BYTES) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "results: evals/tiny/results.json"
    assert [path.name for path in folder.iterdir()] == ["evals"]


def test_ctrl_c_keeps_the_answers(model, tmp_path, monkeypatch, capsys):
    from canonlm.suites.generation import Writer

    write = Writer.write

    def interrupted(*args):
        yield next(write(*args))
        raise KeyboardInterrupt

    command = (model, "--suite", "multihop", "people=2", "n=3", "--tokenizer", "bytes", "--out", tmp_path / "out")
    monkeypatch.setattr(Writer, "write", interrupted)
    assert say(*command) == 130
    assert capsys.readouterr().err.startswith("canonlm: interrupted; the answers so far are in ")
    monkeypatch.setattr(Writer, "write", write)
    (answers,) = (tmp_path / "out" / "answers").glob("*.jsonl")
    assert len(answers.read_text().splitlines()) == 1
    assert say(*command) == 0
    assert len(answers.read_text().splitlines()) == 3


def test_babilong(model, tmp_path, capsys):
    assert say(model, "--suite", "babilong", "task=qa1", "n=2", "--tokenizer", "bytes", "--out", tmp_path / "out") == 0
    assert "babilong-qa1-0k  correct" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere", "--suite", "multihop"], 'MODEL: "nowhere" is neither a folder nor a model on the Hub'),
        (["tiny", "--suite", "multihop"], "MODEL: expected a model with a tokenizer (--tokenizer names one: "),
        (["tiny", "--suite", "hops"], 'unknown suite "hops". Did you mean "multihop"?'),
        (["tiny", "--suite", "multihop", "--tasks", "piqa"], "--tasks only works with --suite harness"),
        (["tiny", "--suite", "harness"], "--suite harness needs --tasks, such as piqa"),
        (["tiny", "--suite", "multihop", "--tokenizer", "bytes", "--out", "/proc/no"], "--out: expected a folder"),
        (["tiny", "--suite", "multihop", "--tokenizer", "bytes", "--out", "tiny/config.json"], "--out: expected a f"),
        (["tiny", "--suite", "playground", "--published"], "--suite: expected multihop, babilong or harness"),
    ],
)
def test_mistakes_are_one_line(model, tmp_path, assert_refused, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(["eval", *arguments], line)
