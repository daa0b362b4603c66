"""Evaluation on test windows: every query of every complete instance, with greedy choices as answers.

An answer counts when each of its tokens is the model's first choice given the true tokens before it. For tasks with one
right answer that is exactly greedy generation, which stays on the true answer as long as each choice is right.
Earlier queries of a window show their true answers, as in training (Physics of Language Models, Part 4.1, App. A).
"""

from typing import Any

import numpy as np
import torch

from canonlm.data.windows import WindowStream
from canonlm.models.interface import LanguageModel
from canonlm.tasks import Placed
from canonlm.train.evals.answers import Answers, Keep


class WindowEval:
    """The first `size` test windows of a stream; they are drawn once and used in every `run`.

    after: only answers that start at or after this position of a window are graded.
    """

    def __init__(self, stream: WindowStream, size: int, batch_size: int, *, after: int = 0) -> None:
        self.stream, self.size, self.batch_size, self.after = stream, size, min(batch_size, size), after
        self._placed: list[list[Placed]] = []

    keep: Keep | None = None  # called with every answer

    @torch.no_grad()
    def run(self, model: LanguageModel, device: torch.device) -> dict[str, Any]:
        """`{"loss", "token_accuracy", "slices": [{"slice", "correct", "total"}, …]}`: mean cross-entropy (nats) of the
        labelled tokens, share of right tokens in the answers, and right answers per slice; further keys as in
        `Answers.result`."""
        task = self.stream.task
        answers = Answers(task, self.keep)
        right_tokens = tokens = 0
        loss = labelled = 0.0
        for first in range(0, self.size, self.batch_size):
            count = min(self.batch_size, self.size - first)
            choices, finite, batch_loss, batch_labelled = read_off(model, self.stream, first, count, device)
            loss, labelled = loss + batch_loss, labelled + batch_labelled
            for row, usable, placed in zip(choices, finite, self._instances(first, count), strict=True):
                for start, stop, sample in placed:
                    output = row[start:stop]
                    answered = np.zeros(len(output), bool)
                    for query, verdict in zip(sample.queries, task.grade(sample, output), strict=True):
                        if start + query.start >= self.after:
                            place = slice(start + query.start, start + query.stop)
                            answers.add(sample, query, row[place], verdict, bool(usable[place].all()))
                            answered[query.start : query.stop] = True
                    right_tokens += int((output == sample.labels)[answered].sum())
                    tokens += int(answered.sum())
        return {
            "loss": loss / max(1.0, labelled),
            "token_accuracy": right_tokens / max(1, tokens),
            **answers.result(),
        }

    def _instances(self, first: int, count: int) -> list[list[Placed]]:
        """The instances of windows first … first + count - 1; all windows before them are drawn, too."""
        s = self.stream
        for window in range(len(self._placed), first + count):
            self._placed.append(s.task.instances(s.split, s.seed, window, s.seq_len))
        return self._placed[first : first + count]


def read_off(
    model: LanguageModel, stream: WindowStream, first: int, count: int, device: torch.device
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """For windows first … first + count - 1: (the model's first choice at every position, -1 at position 0; whether its
    largest logit there is finite; the summed cross-entropy of the labelled tokens in nats; the number of these)."""
    batch = stream.rows(first, count).to(device)
    logits = model.logits(batch.input_ids, batch.documents).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    choices, finite = first_choices(logits)
    return choices, finite, float(loss), float((batch.targets != -100).sum())


def first_choices(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(the likeliest token, whether its logit is finite) at every position, from the logits before it, [batch, time]:
    -1 and True at the first. The maximum of logits with a NaN is NaN."""
    largest, choices = logits[:, :-1].max(-1)
    finite = torch.nn.functional.pad(largest.isfinite(), (1, 0), value=True)
    return torch.nn.functional.pad(choices, (1, 0), value=-1).cpu().numpy(), finite.cpu().numpy()


def window_loss(model: LanguageModel, stream: WindowStream, count: int, device: torch.device) -> float:
    """Mean cross-entropy (nats) of the labelled tokens of the first `count` windows."""
    _, _, loss, labelled = read_off(model, stream, 0, count, device)
    return loss / max(1.0, labelled)
