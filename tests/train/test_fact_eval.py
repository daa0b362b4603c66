"""The knowledge of a model about people, measured on models with known probabilities of every token."""

import math

import numpy as np
import pytest
import torch

from canonlm import tasks
from canonlm.data.windows import WindowStream
from canonlm.models.build import wrap
from canonlm.train import evals
from canonlm.train.evals.facts import FactEval

CPU = torch.device("cpu")
N = 24


def evaluate(model, task, size=N, batch_size=7):
    stream = WindowStream(task, "test", 0, 128, "all", False)
    evaluation = evals.build(stream, size, batch_size)
    assert isinstance(evaluation, FactEval)
    return evaluation.run(wrap(model), CPU)


def gives(task, probability):
    """Scores of a model that gives the true next token of every test document `probability(role)`, and all other tokens
    equal probabilities. For other documents it is uniform."""
    batches = [task.test_batch(0, 0, task.spec.N)]
    if task.spec.questions:
        batches.append(task.question_batch(0, 0, 6 * (task.spec.N - task.asked_in_training)))
    known = {tuple(ids[roles >= 0]): roles[roles >= 0] for batch in batches for ids, roles in zip(*batch, strict=True)}
    vocab = len(task.vocab)

    def distribution(tokens):
        scores = np.zeros((len(tokens), vocab))
        for length in {len(text) for text in known} & set(range(len(tokens) + 1)):
            if (roles := known.get(tuple(tokens[:length]))) is not None and not any(tokens[length:]):
                for i in range(1, length):
                    p = probability(int(roles[i]))
                    scores[i - 1, tokens[i]] = math.log(p) - math.log((1 - p) / (vocab - 1)) if p < 1 else 60.0
        return scores

    return distribution


@pytest.mark.parametrize("fullname", [False, True])
def test_bits_are_the_formula(knows, fullname):
    task = tasks.get("capo", N=N, exposures=1, fullname=fullname)
    p = {0: 0.9, 1: 0.25, 2: 0.5, 3: 0.75}
    row = evaluate(knows(len(task.vocab), gives(task, p.__getitem__)), task)
    _, roles = task.test_batch(0, 0, N)
    names, pronouns, values = ((roles == role).sum() / N for role in (1, 2, 3))
    assert pronouns == (not fullname)
    spaces = math.log2(400 * 400 * 1000), math.log2((2 - fullname) * 12 * 28 * 200 * 200 * 300 * 100 * 263)
    expected_bits = names * math.log2(4), pronouns + values * math.log2(4 / 3)
    expected = sum(max(0.0, space - bits) for space, bits in zip(spaces, expected_bits, strict=True))
    assert 20 < expected < 70
    measures = row["measures"]
    assert measures["bits_per_person"] == pytest.approx(expected, rel=1e-6)
    parameters = knows(len(task.vocab), None).num_parameters()
    assert measures["bits_per_parameter"] == pytest.approx(expected * N / parameters, rel=1e-6)
    assert measures["bits_per_person_at_most"] == pytest.approx(sum(spaces) - math.log2(N), rel=1e-9)


def test_everything_and_nothing(knows):
    task = tasks.get("capo", N=N, exposures=1)
    vocab = len(task.vocab)
    row = evaluate(knows(vocab, gives(task, lambda role: 1.0 if role == 3 else 0.3)), task)
    known = {entry["slice"]["attribute"]: entry["correct"] / entry["total"] for entry in row["slices"]}
    assert {name for name, share in known.items() if share == 1} >= {
        "birth date", "birth city", "university", "field", "company"
    }  # fmt: skip
    row = evaluate(knows(vocab, lambda tokens: np.zeros((len(tokens), vocab))), task)
    assert row["measures"]["bits_per_person"] == 0
    assert sum(entry["correct"] for entry in row["slices"]) == 0
    assert row["loss"] == pytest.approx(math.log(vocab), rel=1e-6)


def test_questions_about_held_out_people(knows):
    task = tasks.get("capo", N=N, exposures=1, questions=True)
    row = evaluate(knows(len(task.vocab), gives(task, lambda role: 1.0 if role == 3 else 0.3)), task)
    questions = {e["slice"]["question"]: (e["correct"], e["total"]) for e in row["slices"] if "question" in e["slice"]}
    assert set(questions.values()) == {(N // 2, N // 2)}
    assert len(questions) == 6


def test_some_of_the_people(knows):
    task = tasks.get("capo", N=N, exposures=1)
    row = evaluate(knows(len(task.vocab), gives(task, {0: 0.9, 1: 0.25, 2: 0.5, 3: 0.75}.__getitem__)), task, size=5)
    assert {entry["total"] for entry in row["slices"]} == {5}
    _, roles = task.test_batch(0, 0, 5)
    expected_bits = [(roles == role).sum() / 5 * math.log2(1 / p) for role, p in ((1, 0.25), (2, 0.5), (3, 0.75))]
    expected = 27.253497 - expected_bits[0] + 47.591616 - expected_bits[1] - expected_bits[2]
    assert row["measures"]["bits_per_person"] == pytest.approx(expected, rel=1e-6)
