"""A saved model on its task: as trained, at another difficulty, beyond the length of training."""

import json

import numpy as np
import pytest
import torch
import yaml

from canonlm import tasks
from canonlm.cli import main
from canonlm.data.windows import WindowStream
from canonlm.models.build import wrap
from canonlm.suites.load_model import Subject
from canonlm.suites.playground import PlaygroundSettings, evaluations
from canonlm.train.evals.windows import WindowEval
from canonlm.train.load_config import load

DEPO = {"name": "depo", "N": 6, "K": 2, "M": 3, "name_vocab": 10}
RUN = {
    "arch": "llama+canon=A",
    "task": DEPO,
    "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
    "data": {"seq_len": 80, "loss_on": "answer"},
    "train": {
        "steps": 2, "batch_size": 4, "num_threads": 1, "eval_every": 2, "eval_size": 8, "checkpoint_every": 2,
        "optim": {"lr": 1e-3},
    },
}  # fmt: skip


def oracle(knows, task, right):
    """A model that follows the ring of its instance; `right(position)`: whether it gives the right answer there."""
    vocab = task.vocab

    def distribution(row):
        scores, start = np.zeros((len(row), len(vocab))), 0
        for at in range(len(row)):
            if row[at] == vocab.ids["bos"]:
                start = at
            if row[at] == vocab.ids["ans"] and right(at + 1):
                answer = _walk(task, row[start : at + 1])
                for ahead, token in enumerate(answer):
                    if at + ahead < len(row):
                        scores[at + ahead, token] = 9
        return scores

    return knows(len(vocab), distribution)


def _walk(task, tokens):
    """The answer, from the edges and the last question: names are tokens up to one with a dot."""
    names, current, hops = [], [], 0
    for token in task.vocab.text(tokens).split()[1:]:
        if token.startswith("q"):
            hops, names = int(token[1:]), [*names, None]
        elif token != "ans":
            current.append(token)
            if token.endswith("."):
                names, current = [*names, tuple(current)], []
    edges = names[: names.index(None)]
    follows, at = dict(zip(edges[::2], edges[1::2], strict=True)), names[-1]
    for _ in range(hops):
        at = follows[at]
    return [task.vocab.ids[token] for token in at]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "depo"
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(RUN))
    assert main(["train", str(config), "--out", str(folder)]) == 0
    return folder


def ask(run, model, **settings):
    subject = Subject(model, None, {"source": str(run)}, run=load(run / "config.yaml"))
    return {
        evaluation_.name: evaluation_.scores()
        for evaluation_ in evaluations(subject, PlaygroundSettings(n=8, **settings))
    }


def accuracy(scores):
    assert scores[0].slice == {}
    return scores[0].value


def test_lengths_that_are_equal_in_six_digits_have_two_names(run, knows):
    subject = Subject(knows(24, None), None, {"source": str(run)}, run=load(run / "config.yaml"))
    planned = evaluations(subject, PlaygroundSettings(lengths=[1.5, 1.5000001]))
    assert [each.name for each in planned] == ["depo x1.5", "depo x1.5000001"]


def test_only_answers_beyond_the_training_length_are_graded(run, knows):
    task = load(run / "config.yaml").built_task
    result = ask(run, oracle(knows, task, lambda position: position < 80), lengths=[1, 1.5, 2])
    assert list(result) == ["depo", "depo x1.5", "depo x2"]
    assert accuracy(result["depo"]) == 1
    assert accuracy(result["depo x1.5"]) == accuracy(result["depo x2"]) == 0
    result = ask(run, oracle(knows, task, lambda position: position >= 80), lengths=[1, 1.5, 2])
    assert accuracy(result["depo"]) == 0
    assert accuracy(result["depo x1.5"]) == accuracy(result["depo x2"]) == 1


def test_more_windows_hold_more_answers(run, knows):
    task = load(run / "config.yaml").built_task
    model = oracle(knows, task, lambda position: True)
    counts = {}
    for length in (160, 240):
        stream = WindowStream(task, "test", 0, length, "answer", False)
        for after in (0, 80):
            rows = WindowEval(stream, 8, 4, after=after).run(wrap(model), torch.device("cpu"))["slices"]
            counts[length, after] = sum(row["total"] for row in rows)
    full = WindowEval(WindowStream(task, "test", 0, 80, "answer", False), 8, 4).run(wrap(model), torch.device("cpu"))
    inside = sum(row["total"] for row in full["slices"])
    assert 0 < counts[160, 80] < counts[160, 0] < counts[240, 0]
    assert counts[160, 0] - counts[160, 80] >= inside  # those that the short window's end cuts are complete here


def test_another_difficulty_with_the_same_tokens(run, knows):
    harder = tasks.get(**{**DEPO, "N": 8})
    result = ask(run, oracle(knows, harder, lambda position: True), task={"N": 8})
    assert accuracy(result["depo"]) == 1
    assert {tuple(score.slice.items()) for score in result["depo"]} >= {(("k", 1),), (("k", 2),)}
    subject = Subject(oracle(knows, harder, bool), None, {"source": str(run)}, run=load(run / "config.yaml"))
    (evaluation_,) = evaluations(subject, PlaygroundSettings(task={"N": 8}))
    assert evaluation_.settings["task"]["N"] == 8


def test_equals_the_evaluation_of_the_training_run(run):
    """The run's last evaluation, repeated by the command."""
    assert main(["eval", str(run), "--suite", "playground", "n=8"]) == 0
    rows = json.loads((run / "evals" / "step-00000002" / "results.json").read_text())
    final = json.loads((run / "result.json").read_text())["final"]
    scores = {str(s["slice"]): s["value"] for s in rows["results"][0]["scores"] if s["measure"] == "accuracy"}
    assert {str(row["slice"]): row["correct"] / row["total"] for row in final["slices"]}.items() <= scores.items()
    (loss,) = [s["value"] for s in rows["results"][0]["scores"] if s["measure"] == "loss"]
    assert loss == pytest.approx(final["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": {"K": 3}}, "task: expected a difficulty with the 24 tokens of the model"),
        ({"task": {"name": "mano"}}, "task.name: expected depo, which the run was trained on"),
        ({"task": {"nodes": 3}}, 'unknown setting "task.nodes"'),
        ({"task": {"N": 40}}, r"lengths: expected numbers >= 2\.\d+, or the questions of .* do not fit, got \[1"),
        ({"lengths": [0.5, 1]}, r"lengths: expected numbers >= 1, got \[0.5, 1"),
        ({"lengths": [1.02]}, "lengths: expected longer ones: no answer is complete beyond"),
    ],
)
def test_invalid_questions(run, knows, settings, message):
    with pytest.raises(ValueError, match=message):
        ask(run, knows(24, lambda row: np.zeros((len(row), 24))), **settings)


def test_a_model_without_a_run_needs_a_task(knows):
    subject, brevo = (Subject(knows(size, None), None, {"source": "here"}) for size in (24, 14))
    assert evaluations(subject, PlaygroundSettings(task=DEPO))[0].settings["seq_len"] == 2048
    with pytest.raises(ValueError, match=r"task\.name: expected one of .*depo"):
        evaluations(subject, PlaygroundSettings())
    with pytest.raises(ValueError, match=r"lengths: expected \[1\]: in brevo every question stands alone"):
        evaluations(brevo, PlaygroundSettings(task={"name": "brevo", "N": 10}, lengths=[1, 2]))


def test_the_headline_of_sentences_is_generation_from_the_start(tmp_path, knows):
    """A model that has memorized one sentence writes it, and continues any other sentence with it."""
    lano = tasks.get("lano", grammar="small")
    by_heart = [*lano.sample("train", 0, 0).tokens[1:].tolist(), 0]

    def distribution(row):
        scores = np.zeros((len(row), len(lano.vocab)))
        for at in range(min(len(row), len(by_heart))):
            scores[at, by_heart[at]] = 50
        return scores

    subject = Subject(knows(len(lano.vocab), distribution), None, {"source": str(tmp_path)})
    settings = PlaygroundSettings(task={"name": "lano", "grammar": "small"}, n=8)
    scores = [score for score in evaluations(subject, settings)[0].scores() if score.measure == "accuracy"]
    assert [score.slice for score in scores] == [{}, {"from": "start"}, {"from": "cut"}]
    assert [(score.value, score.n) for score in scores[:2]] == [(1.0, 8), (1.0, 8)]
    assert scores[2].value < 1


@pytest.mark.parametrize(
    ("drawn", "names"),
    [
        ("['a', Answer('b')]", [("accuracy", {})]),
        ("['a', Answer('b', k=1)]", [("accuracy", {}), ("accuracy", {"k": 1})]),
        (
            "['a', Answer('b', k=1), Answer('b')]",
            [("accuracy", {}), ("accuracy", {"k": 1}), ("accuracy of other questions", {})],
        ),
    ],
)
def test_no_two_scores_have_one_name(tmp_path, knows, drawn, names):
    head = "from canonlm.tasks import Answer, task\n@task(vocab=['a', 'b'], max_len=3, chance=0)\n"
    (tmp_path / "mine.py").write_text(f"{head}def own(rng, test): return {drawn}")
    subject = Subject(knows(2, lambda row: np.zeros((len(row), 2))), None, {"source": str(tmp_path)}, trusted=True)
    settings = PlaygroundSettings(task={"name": f"{tmp_path}/mine.py:own"}, n=8)
    scores = [score for score in evaluations(subject, settings)[0].scores() if "accuracy" in score.measure]
    assert [(score.measure, score.slice) for score in scores] == names
