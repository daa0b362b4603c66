"""Ask and let the model write: greedy generation in batches, for tasks where more than one answer is right."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from canonlm.data.windows import WindowStream
from canonlm.evals.windows import window_loss
from canonlm.models.interface import LanguageModel
from canonlm.tasks.tally import Tally


class GenerateEval:
    """The first `size` test instances, each alone: the prompt is what stands before an answer, and the grader reads all
    that the model writes up to the task's `end` token, if it has one.

    Nothing longer than the longest true answer of a batch is generated: a right answer has exactly the tokens of the
    true one, in another order at most.
    """

    def __init__(self, stream: WindowStream, size: int, batch_size: int) -> None:
        self.stream, self.batch_size = stream, min(batch_size, size)
        self.samples = [stream.task.sample(stream.split, stream.seed, index) for index in range(size)]

    @torch.no_grad()
    def run(self, model: LanguageModel, device: torch.device) -> dict[str, Any]:
        """`{"loss", "slices"}`: cross-entropy (nats) of the labelled tokens in a batch of test windows, and right
        answers per slice."""
        stream, task, samples = self.stream, self.stream.task, self.samples
        asked = [(i, query) for i, sample in enumerate(samples) for query in sample.queries]
        asked.sort(key=lambda pair: pair[1].start)  # prompts of a batch are of like length: little padding
        end = task.vocab.ids.get("end", ())  # a task without one: as many tokens as the longest answer has
        said: list[list[list[int]]] = [[] for _ in samples]
        for first in range(0, len(asked), self.batch_size):
            batch = asked[first : first + self.batch_size]
            prompts = [samples[i].tokens[: query.start].tolist() for i, query in batch]
            longest = max(query.stop - query.start for _, query in batch)
            written = generate(model.module, prompts, longest, end, device)
            for (i, _), answer in zip(batch, written, strict=True):
                said[i].append(answer)  # the queries of a sample come in their order: sorting by start is stable
        tally = Tally(task.slices())
        for sample, answers in zip(samples, said, strict=True):
            for verdict in task.grade(sample, answers):
                tally.add(verdict)
        return {"loss": window_loss(model, stream, self.batch_size, device), "slices": tally.rows()}


def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    most: int,
    end: int | Sequence[int],
    device: torch.device,
    *,
    use_cache: bool = True,
    **options: Any,
) -> list[list[int]]:
    """What the model writes after each prompt: at most `most` tokens, up to its first `end` (which is kept).

    Greedy, whatever the model's own generation settings are; prompts of different lengths are padded on the left.
    end: one token or several; none of them: all rows have `most` tokens. options: what else `model.generate` takes.
    """
    ends = [end] if isinstance(end, int) else list(end)
    pad = ends[0] if ends else 0  # also what rows that ended are filled with
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    settings = GenerationConfig(
        max_new_tokens=most, do_sample=False, eos_token_id=ends or None, pad_token_id=pad, use_cache=use_cache
    )
    with own_settings(model):
        written = model.generate(ids, attention_mask=mask, generation_config=settings, **options)  # type: ignore[operator]
    rows = written[:, width:].tolist()
    stops = [next((i for i, token in enumerate(row) if token in ends), most) for row in rows]
    return [row[: stop + 1] for row, stop in zip(rows, stops, strict=True)]


@contextmanager
def own_settings(model: PreTrainedModel) -> Iterator[None]:
    """The library fills settings that a caller left open with those of the model (a repetition penalty, say): here it
    has none."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept
