"""Evaluation by greedy generation in batches, for tasks where more than one answer is right."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from canonlm.data.windows import WindowStream
from canonlm.models.interface import LanguageModel
from canonlm.tasks import Query
from canonlm.train.evals.answers import Answers, Keep
from canonlm.train.evals.windows import window_loss

Asked = tuple[int, Query]  # the number of a sample, and one of its queries


class GenerateEval:
    """The first `size` test instances, each alone. The prompt is the instance up to an answer, and the grader reads the
    model's continuation up to the task's `end` token, if it has one.

    Nothing longer than the longest true answer of a batch is generated: a right answer has exactly the tokens of the
    true one, in another order at most.
    """

    def __init__(self, stream: WindowStream, size: int, batch_size: int) -> None:
        self.stream, self.batch_size = stream, min(batch_size, size)
        self.samples = [stream.task.sample(stream.split, stream.seed, index) for index in range(size)]

    keep: Keep | None = None  # called with every answer
    one_length: ClassVar[bool] = False  # whether the prompts of a batch have one length

    @torch.no_grad()
    def run(self, model: LanguageModel, device: torch.device) -> dict[str, Any]:
        """`{"loss", "slices"}`: cross-entropy (nats) of the labelled tokens in a batch of test windows, and right
        answers per slice; further keys as in `Answers.result`."""
        answers: list[list[list[int]]] = [[] for _ in self.samples]
        finite: list[list[bool]] = [[] for _ in self.samples]
        for batch in self._batches(self.one_length or model.reads_padding):
            monitor = NotFinite()
            written = self._answer(model, batch, device, monitor)
            for (i, _), answer, bad in zip(batch, written, monitor.rows, strict=True):
                answers[i].append(answer)  # a sample's queries come in order: sorting by start is stable
                finite[i].append(not bad)
        counts = Answers(self.stream.task, self.keep)
        for each in zip(self.samples, answers, finite, strict=True):
            counts.grade(*each)
        return {"loss": window_loss(model, self.stream, self.batch_size, device), **counts.result()}

    def _batches(self, one_length: bool) -> Iterator[list[Asked]]:
        questions = [(i, query) for i, sample in enumerate(self.samples) for query in sample.queries]
        questions.sort(key=lambda pair: pair[1].start)  # prompts of a batch have similar lengths: little padding
        groups = groupby(questions, lambda pair: pair[1].start if one_length else 0)
        for group in ([*pairs] for _, pairs in groups):
            yield from (group[first : first + self.batch_size] for first in range(0, len(group), self.batch_size))

    def _answer(
        self, model: LanguageModel, batch: list[Asked], device: torch.device, monitor: "NotFinite"
    ) -> list[list[int]]:
        """The model's answers to these questions."""
        prompts = [self.samples[i].tokens[: query.start].tolist() for i, query in batch]
        end = self.stream.task.vocab.ids.get("end", ())  # a task without one: as many tokens as the longest answer has
        return generate(model, prompts, max(q.stop - q.start for _, q in batch), end, device, monitor=monitor)


class NotFinite(LogitsProcessor):
    """Records the rows of a batch in which the model's logits are not finite (NaN) at any step, and changes nothing."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        bad = ~scores.amax(-1).isfinite()  # the maximum of scores with a NaN is NaN
        self._rows = bad if self._rows is None else self._rows | bad
        return scores

    @property
    def rows(self) -> list[bool]:
        return [] if self._rows is None else self._rows.tolist()


def generate(
    model: LanguageModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    end: int | Sequence[int],
    device: torch.device,
    *,
    use_cache: bool = True,
    monitor: LogitsProcessor | None = None,
    **options: Any,
) -> list[list[int]]:
    """The model's continuation of each prompt: at most `max_new_tokens` tokens, up to its first `end` (included).

    Greedy, whatever the model's own generation settings are. Prompts of different lengths are padded on the left, which
    a model that `reads_padding` does not allow.
    end: one token or several; if empty, all rows have `max_new_tokens` tokens. monitor: gets the model's logits at
    every step, before anything changes them. options: further arguments of `model.generate`.
    """
    ends = [end] if isinstance(end, int) else list(end)
    pad = ends[0] if ends else 0  # also pads rows that have ended
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=pad, use_cache=use_cache
    )
    if monitor is not None:
        options["logits_processor"] = LogitsProcessorList([monitor, *options.get("logits_processor", [])])
    written = model.generate(ids, attention_mask=mask, generation_config=settings, **options)
    rows = written[:, width:].tolist()
    stops = [next((i for i, token in enumerate(row) if token in ends), max_new_tokens) for row in rows]
    return [row[: stop + 1] for row, stop in zip(rows, stops, strict=True)]
