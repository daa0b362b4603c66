"""The knowledge of a model about people, measured on models with known probabilities of every token."""

import math

import numpy as np
import pytest
import torch

from canonlm import tasks
from canonlm.data.windows import WindowStream
from canonlm.models.build import wrap
from canonlm.train import evals

CPU = torch.device("cpu")
N = 24


def evaluate(model, task, size=N, batch_size=7):
    stream = WindowStream(task, "test", 0, 128, "all", False)
    return evals.build(stream, size, batch_size).run(wrap(model), CPU)


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


@pytest.mark.parametrize(("fullname", "people"), [(False, N), (True, N), (False, 5)])
def test_bits_are_the_formula(knows, fullname, people):
    task = tasks.get("capo", N=N, exposures=1, fullname=fullname)
    p = {0: 0.9, 1: 0.25, 2: 0.5, 3: 0.75}
    row = evaluate(knows(len(task.vocab), gives(task, p.__getitem__)), task, people)
    assert {entry["total"] for entry in row["slices"]} == {people}
    _, roles = task.test_batch(0, 0, people)
    names, pronouns, values = ((roles == role).sum() / people for role in (1, 2, 3))
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
    """The questions are about people whose questions were not in training."""
    task = tasks.get("capo", N=N, exposures=1, questions=True)
    vocab = len(task.vocab)
    row = evaluate(knows(vocab, gives(task, lambda role: 1.0 if role == 3 else 0.3)), task)
    right = {(*e["slice"].items(),)[0]: e["total"] for e in row["slices"] if e["correct"] == e["total"]}
    sure = {"birth date", "birth city", "university", "field", "company"}
    assert {name for key, name in right if key == "attribute"} >= sure
    assert [total for (key, _), total in right.items() if key == "question"] == [N // 2] * 6
    row = evaluate(knows(vocab, lambda tokens: np.zeros((len(tokens), vocab))), task)
    assert row["measures"]["bits_per_person"] == 0
    assert sum(entry["correct"] for entry in row["slices"]) == 0
    assert row["loss"] == pytest.approx(math.log(vocab), rel=1e-6)
