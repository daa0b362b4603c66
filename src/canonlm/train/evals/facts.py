"""Evaluation of Capo: bits that the model knows about its people, and attributes that it predicts correctly."""

from typing import Any

import numpy as np
import torch

from canonlm.data.windows import WindowStream
from canonlm.models.interface import LanguageModel
from canonlm.tasks.base import Sample
from canonlm.tasks.capo import Capo
from canonlm.tasks.capo.pools import ATTRIBUTES
from canonlm.train.evals.answers import Answers, Keep
from canonlm.train.evals.windows import first_choices, window_loss

NAME, PRONOUN, VALUE = 1, 2, 3  # roles of `Capo.test_batch`


class FactEval:
    """The first `size` people (at most all), each in one biography of the test; with the task's `questions`, also the
    six questions about each of up to `size` held-out people.

    Bits come from the loss on names and values (`canonlm.tasks.capo.bits`). An attribute counts as known if every
    token of its value is the model's first choice given the true tokens before it.
    """

    def __init__(self, stream: WindowStream, size: int, batch_size: int) -> None:
        assert isinstance(stream.task, Capo)
        self.stream, self.task, self.batch_size = stream, stream.task, batch_size
        self.people = min(size, self.task.spec.N)
        self.held_out = min(size, self.task.spec.N - self.task.asked_in_training) if self.task.spec.questions else 0

    keep: Keep | None = None  # called with every answer

    @torch.no_grad()
    def run(self, model: LanguageModel, device: torch.device) -> dict[str, Any]:
        """`{"loss", "slices", "measures": {"bits_per_parameter", "bits_per_person", "bits_per_person_at_most"}}`:
        cross-entropy (nats) of the labelled tokens in a batch of test windows, attributes and answers known; further
        keys as in `Answers.result`."""
        task, seed, split = self.task, self.stream.seed, self.stream.split
        answers = Answers(task, self.keep)
        name_nats = value_nats = 0.0
        for first in range(0, self.people, self.batch_size):
            ids, roles = task.test_batch(seed, first, min(self.batch_size, self.people - first), split)
            choices, finite, nats = _read_off(model, ids, device)
            name_nats += float(nats[roles == NAME].sum())
            value_nats += float(nats[(roles == PRONOUN) | (roles == VALUE)].sum())
            for r, row in enumerate(choices):
                self._grade(task.sample(split, seed, first + r), row, finite[r], answers)
        questions = len(ATTRIBUTES) * self.held_out
        for first in range(0, questions, self.batch_size):
            ids, _ = task.question_batch(seed, first, min(self.batch_size, questions - first))
            choices, finite, _ = _read_off(model, ids, device)
            for number, row in enumerate(choices, first):
                person = task.asked_in_training + number // len(ATTRIBUTES)
                sample = task.question(seed, person, ATTRIBUTES[number % len(ATTRIBUTES)])
                self._grade(sample, row, finite[number - first], answers)
        bits = task.bits(name_nats / self.people, value_nats / self.people)
        return {
            "loss": window_loss(model, self.stream, self.batch_size, device),
            **answers.result(),
            "measures": {
                "bits_per_parameter": bits.per_parameter(model.num_parameters),
                "bits_per_person": bits.per_person,
                "bits_per_person_at_most": bits.at_most,
            },
        }

    def _grade(self, sample: Sample, row: np.ndarray, finite: np.ndarray, answers: Answers) -> None:
        places = [slice(query.start, query.stop) for query in sample.queries]
        answers.grade(sample, [row[place] for place in places], [bool(finite[place].all()) for place in places])


def _read_off(model: LanguageModel, ids: np.ndarray, device: torch.device) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first choice, whether its logit is finite, cross-entropy in nats float64) at every position; -1, True and 0 at
    the first. Padding on the right does not affect the tokens before it."""
    tokens = torch.from_numpy(ids).long().to(device)
    logits = model.logits(tokens)
    # In double, a row at a time: the sum over a large vocabulary costs a float32 its sixth digit.
    rows = zip(logits[:, :-1], tokens[:, 1:], strict=True)
    nats = torch.stack([torch.nn.functional.cross_entropy(x.double(), y, reduction="none") for x, y in rows])
    return *first_choices(logits), torch.nn.functional.pad(nats, (1, 0)).cpu().numpy()
