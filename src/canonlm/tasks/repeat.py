"""Palindrome and selective: say a row of words again, backwards, or without its noise. They measure exact memory.

    palindrome:  bos  x_1 … x_n  ans  x_n … x_1
    selective:   bos  n x_1 n n x_2 … x_k n  ans  x_1 … x_k          n positions, k of them items, the others noise

Words are independent and equally likely, so a word may occur more than once; all choices of k positions are equally
likely. Palindrome is the task of Kimi Linear (arXiv 2510.26692), selective copying that of Mamba (arXiv 2312.00752) and
MAD (arXiv 2403.17844).
"""

from typing import Any

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.guessing import largest_shares
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, one_of, two_below
from canonlm.tasks.spec import MAX_LENGTH, LengthSpec

BOS, ANS, FIRST = 0, 1, 2
MAX_WORDS = 2**20


class Repeat(LengthTask):
    """items: how many of the n positions have a word; None: all."""

    items: int | None = None
    separate_answers = False
    noise = 0
    backwards = False

    def __init__(self, spec: Any) -> None:
        names = ["bos", "ans", *(f"x{i}" for i in range(1, spec.words + 1))]
        names += [f"n{i}" for i in range(1, self.noise + 1)]
        super().__init__(spec, Vocab(names, ["bos", "ans"]))
        self.max_len = self.longest + 2 + (self.items or self.longest)

    def chance(self, slice: Slice) -> float:
        """The guess is the word that is in the row most often, without those given."""
        given = [self.items or n for n in self.lengths_of(slice)]
        return float(np.concatenate([largest_shares(k, self.spec.words) for k in given]).mean())

    def explain(self, sample: Sample, query: Query) -> str:
        at = query.start - sample.queries[0].start
        place = f"{at + 1} from the end" if self.backwards else f"{at + 1}"
        return f"word {place} is {self.vocab.name(sample.tokens[query.start])}"

    def sampler(self, test: bool) -> Sampler:
        return _loop, (self.lengths(test), self.items or 0, self.spec.words, self.noise, self.backwards)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n = len(tokens) // 2 - 1 if self.items is None else len(tokens) - 2 - self.items
        if not (self.items or 1) <= n <= self.longest or len(tokens) != n + 2 + (self.items or n):
            raise Malformed(len(tokens), f"expected bos, the row, ans and its words, got {len(tokens)} tokens")
        self.vocab.after(tokens, 0, BOS)
        for at in range(1, n + 1):
            if not FIRST <= tokens[at] < len(self.vocab):
                raise self.vocab.unlike(tokens, at, "a word or noise" if self.noise else "a word")
        words = [token for token in tokens[1 : n + 1] if token < FIRST + self.spec.words]
        self.vocab.after(tokens, n + 1, ANS)
        if len(words) != (self.items or n):
            raise Malformed(n + 1, f"expected {self.items} words before it, got {len(words)}")
        for at, word in enumerate(words[::-1] if self.backwards else words, n + 2):
            self.vocab.after(tokens, at, word)
        return {"n": n}, tuple(Query(at, at + 1, {"n": n}) for at in range(n + 2, len(tokens)))


@register("palindrome")
class Palindrome(Repeat):
    """Repeat n words backwards. Loss on the repeated words."""

    class Spec(LengthSpec):
        words: int = Field(26, ge=2, le=MAX_WORDS)

    difficulties = {f"palindrome-{N}": {"N": N} for N in (32, 128)}
    about = "The model reads a row of random words and must say it backwards."
    scales = {"n": Scale("number of words", counted("word"), trained="N")}
    backwards = True


@register("selective")
class Selective(Repeat):
    """Repeat k words that are scattered among noise. Loss on the repeated words."""

    class Spec(LengthSpec):
        one_length = True
        N: int = Field(64, ge=1, le=MAX_LENGTH)  # training: n = N positions
        items: int = Field(8, ge=1, le=MAX_LENGTH)  # k: the positions that have a word, whatever n is
        words: int = Field(14, ge=2, le=MAX_WORDS)
        noise: int = Field(1, ge=1, le=256)  # different tokens of noise

        @model_validator(mode="after")
        def _sensible(self) -> "Selective.Spec":
            if self.items > self.N:
                raise self.refuse("items", f"at most N ({self.N})", self.items)
            return self

        def shortest(self) -> int:
            return self.items

    difficulties = {"selective-64": {}, "selective-256": {"N": 239, "items": 16}}
    about = "The model reads words among noise and must repeat the words, in order and without the noise."
    scales = {"n": Scale("number of positions", counted("position"), trained="N")}

    def __init__(self, spec: Spec) -> None:
        self.items, self.noise = spec.items, spec.noise
        super().__init__(spec)


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, items, words, noise, backwards = tables
    state, n = one_of(state, gamma, lengths)
    items = items or n
    left = items
    for i in range(n):
        state, place, word = two_below(state, gamma, n - i, words)
        if place < left:  # each choice of positions has one such sequence of draws in as many as there are choices
            at = n + 1 + left if backwards else n + 2 + items - left
            tokens[i + 1] = tokens[at] = targets[at] = FIRST + word
            left -= 1
        else:
            other = 0
            if noise > 1:
                state, other = below(state, gamma, noise)
            tokens[i + 1] = FIRST + words + other
    tokens[0], tokens[n + 1] = BOS, ANS
    targets[: n + 2] = IGNORE
    return n + 2 + items


_loop = compile_loop(_draw)
