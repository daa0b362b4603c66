"""Sampling that depends on (seed, prompt) alone, so it is the same in any batch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from canonlm.core.errors import expected

COLDEST = 1e-30
"""The lowest temperature: logits of up to 1e8, divided by it, fit into float32."""


@dataclass(frozen=True)
class Sampling:
    """Tokens drawn from softmax(logits / temperature), restricted to the `top_k` likeliest, then to the likeliest whose
    probabilities sum to `top_p`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not COLDEST <= self.temperature < float("inf"):
            raise expected("--temperature", f"a number >= {COLDEST}", self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise expected("--top-k", "an integer >= 1", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise expected("--top-p", "a number > 0 and <= 1", self.top_p)

    def processors(self, prompts: Sequence[int]) -> LogitsProcessorList:
        """Processors for greedy decoding of the prompts with these numbers, in this order: the largest of the scores
        that they return is a sample."""
        chosen: list[LogitsProcessor] = [TemperatureLogitsWarper(float(self.temperature))]
        if self.top_k is not None:
            chosen.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            chosen.append(TopPLogitsWarper(self.top_p))
        return LogitsProcessorList([*chosen, _Noise(self.seed, prompts)])


class _Noise(LogitsProcessor):
    """argmax(logits + Gumbel noise) is a sample of softmax(logits). Each row has a generator of its own."""

    def __init__(self, seed: int, prompts: Sequence[int]) -> None:
        keys = (hashlib.sha256(f"sampling {seed} {prompt}".encode()).digest() for prompt in prompts)
        self.generators = [torch.Generator().manual_seed(int.from_bytes(key[:7], "big")) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        rows = [torch.empty(size).exponential_(generator=generator) for generator in self.generators]
        return scores - torch.stack(rows).log().to(scores.device)
