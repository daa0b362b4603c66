"""Evaluation of Lano: are the model's sentences valid, and how far is its next-token distribution from the true one?"""

from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from canonlm.data.windows import WindowStream
from canonlm.models.initialize import generator_for
from canonlm.models.interface import LanguageModel
from canonlm.tasks.lano import Lano
from canonlm.tasks.lano.parse import kl
from canonlm.tasks.lano.sampling import BOS
from canonlm.train.evals.generate import Asked, GenerateEval, NotFinite, generate

UNFINISHED = -1  # no terminal


class SentenceEval(GenerateEval):
    """As in the paper (arXiv 2512.17351, App. A): the share of valid sentences among `size` that are written at
    temperature 1 from the start, and among the same number continued after a cut; and the Kullback-Leibler divergence
    of the model's next-token distribution from the true one, over `size` test sentences.

    Text that has not ended at the end of the window is not a sentence. Sampling is a function of (seed, sentence):
    batches and devices change nothing but rounding.
    """

    one_length = True

    def __init__(self, stream: WindowStream, size: int, batch_size: int) -> None:
        assert isinstance(stream.task, Lano)
        super().__init__(stream, size, batch_size)
        self.task, self.size = stream.task, size

    @torch.no_grad()
    def run(self, model: LanguageModel, device: torch.device) -> dict[str, Any]:
        """As in `GenerateEval`, for valid sentences; with `"measures": {"kl"}`, divergence in nats per token."""
        return {**super().run(model, device), "measures": {"kl": self._divergence(model, device)}}

    def _answer(
        self, model: LanguageModel, batch: list[Asked], device: torch.device, monitor: NotFinite
    ) -> list[list[int]]:
        written = self._write(model, [i for i, _ in batch], batch[0][1].start, device, monitor)
        return [sentence if BOS in sentence else [*sentence, UNFINISHED] for sentence in written]

    def _write(
        self, model: LanguageModel, batch: list[int], start: int, device: torch.device, monitor: NotFinite | None = None
    ) -> list[list[int]]:
        """The model's continuations of the first `start` tokens of these test sentences, at temperature 1."""
        prompts = [self.samples[i].tokens[:start].tolist() for i in batch]
        room = self.stream.seq_len - start
        generators = [generator_for(self.stream.seed, f"sentence {i} after {start} tokens") for i in batch]
        noise = LogitsProcessorList([_Gumbel(generators, room, len(self.task.vocab), device)])
        return generate(model, prompts, room, BOS, device, monitor=monitor, logits_processor=noise)

    def _divergence(self, model: LanguageModel, device: torch.device) -> float:
        """Mean over all positions of the test sentences, up to the window's length."""
        divergences = []
        for first in range(0, self.size, self.batch_size):
            tokens = [s.tokens[: self.stream.seq_len] for s in self.samples[first : first + self.batch_size]]
            ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)  # padding on the right is never read
            for row, sentence in zip(ids, tokens, strict=True):
                row[: len(sentence)] = sentence
            logits = model.logits(torch.from_numpy(ids).to(device)).float()
            probs = logits.softmax(-1).double().cpu().numpy()  # columns: bos, which is the end, and the terminals
            for row, sentence in zip(probs, tokens, strict=True):
                true_probs = self.task.grammar.next_token_probs(sentence[1:])  # quicker than the model
                divergences.append(kl(true_probs, row[: len(sentence)]))
        return float(np.concatenate(divergences).mean())


class _Gumbel(LogitsProcessor):
    """Adds standard Gumbel noise, so that the largest score is a sample from the softmax (Gumbel 1954)."""

    def __init__(self, generators: list[torch.Generator], steps: int, vocab: int, device: torch.device) -> None:
        draws = [torch.empty(steps, vocab).exponential_(generator=generator) for generator in generators]
        self.noise, self.step = -torch.stack(draws).log().to(device), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return scores + self.noise[:, self.step - 1]
