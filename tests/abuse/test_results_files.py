"""Results and answers of `canonlm eval` that strangers may have written or changed, and the files that it reads."""

import io
import json
import re
import warnings

import pytest
import torch
from rich.console import Console

from canonlm import CanonLMConfig, CanonLMForCausalLM, tasks
from canonlm.cli import main
from canonlm.experiments.published.runs import load_runs, runs_frame
from canonlm.report import load_play, tables
from canonlm.report.page import render
from canonlm.runs.answers import read_answers
from canonlm.suites.questions import Score
from canonlm.suites.results import Results

DIGITS = "9" * 5_000
SCORE = {"measure": "exact", "value": 0.5, "stderr": 0.1, "n": 4, "slice": {}, "share": True, "higher_is_better": True}
ENTRY = {"suite": "multihop", "name": "1hop-0k", "settings": {"k": 1}, "scores": [SCORE]}
ABOUT = {"source": "a/run", "fingerprint": "f1", "tokenizer": "t1", "kind": "folder"}
TASK = {"name": "parity", "N": 8}


def write(folder, entry=ENTRY, model=ABOUT):
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"model": model, "results": [entry]}))
    return folder


def shown(folder):
    console = Console(file=io.StringIO(), width=400, color_system=None)
    for part in tables(load_play(folder)):
        console.print(part)
    runs_frame([folder])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is damaged
        load_runs(folder)
    return console.file.getvalue(), render(load_play(folder))


def test_results_that_name_a_run_outside_do_not_show_it(tmp_path):
    """Somebody else's results could otherwise put your settings into a page that they get."""
    config = {"arch": "llama+canon", "train": {"seed": 7, "optim": {"lr": 0.25}}}
    foreign = tmp_path / "foreign"
    for run in (tmp_path / "secret" / "mine", foreign / "theirs"):
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(json.dumps(config))
    (foreign / "linked").symlink_to(tmp_path / "secret" / "mine")

    def about(source):
        frame, _ = runs_frame([write(foreign, model={**ABOUT, "source": str(source)})])
        return frame.select("arch", "lr", "seed").row(0)

    assert about(foreign / "theirs") == ("Llama", 0.25, 7)
    for source in (tmp_path / "secret" / "mine", foreign / ".." / "secret" / "mine", foreign / "linked"):
        assert about(source) == (None, None, None)


class Sums:
    """Questions for i + i."""

    name, measures, max_new_tokens, stop = "sums", ("exact",), 3, ("\n",)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        from canonlm.suites.questions import Question

        return Question(f"{index} + {index} =", str(2 * index), {"parity": index % 2})

    def grade(self, question, text):
        return {"exact": text == question.answer}


def evaluated(folder):
    results = Results(folder, ABOUT)
    scores = results.ask("sums", Sums(), {"n": 6}, lambda prompts, max_new_tokens, stop: enumerate("024680"))
    return results.add("sums", "sums", {"n": 6}, scores, 1.0)


TAMPERED = {
    "right": lambda text: text.replace('"exact": false', '"exact": true', 1),
    "output": lambda text: text.replace('"output": "0"', '"output": "1"', 1),
    "line": lambda text: text.partition("\n")[2],
    "half": lambda text: text[:40],
    "junk": lambda text: "[[[\n" + text,
    "types": lambda text: text.replace('"slice": {', '"slice": [{', 1),
    "deep": lambda text: text + "[" * 10_000 + "\n",
    "digits": lambda text: text + f'{{"index": {DIGITS}}}\n',
}


@pytest.mark.parametrize("how", TAMPERED)
def test_answers_that_were_changed_are_noticed(tmp_path, how):
    entry = evaluated(tmp_path)
    assert [row["output"] for row in read_answers(tmp_path, entry)] == list("024680")
    path = tmp_path / entry["answers"]["file"]
    path.write_text(TAMPERED[how](path.read_text()))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: ") as caught:
        Results(tmp_path, ABOUT).find("sums", "sums", {"n": 6})
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    text, _ = shown(tmp_path)
    assert "answers of sums in results.json: left out, " in text


def test_answers_may_be_removed_and_more_may_follow(tmp_path):
    entry = evaluated(tmp_path)
    path = tmp_path / entry["answers"]["file"]
    with path.open("a") as file:
        file.write(
            json.dumps({"index": 6, "slice": {}, "answer": "12", "output": "12", "right": {"exact": True}}) + "\n"
        )
    assert Results(tmp_path, ABOUT).find("sums", "sums", {"n": 6}) == entry
    path.unlink()
    assert Results(tmp_path, ABOUT).find("sums", "sums", {"n": 6}) == entry


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    torch.manual_seed(0)
    vocab = len(tasks.get(**TASK).vocab)
    config = CanonLMConfig(vocab_size=vocab, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    CanonLMForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_playground_keeps_its_answers(model, tmp_path, capsys):
    settings = [f"task.{key}={value}" for key, value in TASK.items()]
    command = ["eval", str(model), "--out", str(tmp_path), "--suite", "playground", *settings, "n=8"]
    assert main(command) == 0
    (entry,) = json.loads((tmp_path / "results.json").read_text())["results"]
    rows = read_answers(tmp_path, entry)
    accuracy = Score(**entry["scores"][0])
    assert len(rows) == accuracy.n
    assert all(row["right"]["accuracy"] == (row["output"] == row["answer"]) for row in rows)
    by_slice = {json.dumps(score["slice"]): score for score in entry["scores"] if score["slice"]}
    for where, score in by_slice.items():
        there = [row["right"]["accuracy"] for row in rows if row["slice"] == json.loads(where)]
        assert (sum(there) / len(there), len(there)) == (score["value"], score["n"])
    assert all(row["question"].endswith("ans") for row in rows)
    path = tmp_path / entry["answers"]["file"]
    assert main(command) == 0
    path.write_text(path.read_text().replace("true", "false", 1).replace("false", "true", 1))
    path.write_text(path.read_text().replace('"output": "', '"output": "not ', 1))
    capsys.readouterr()
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"canonlm: {path}: expected the answers behind the scores in results.json")
