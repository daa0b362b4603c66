"""Flip-flop: what was the last bit that was written? Measures recall of the newest write over the gap since it.

    bos  w 1  i 0  i 1  r 1  i 0  w 0  r 0            w: write, i: ignore, r: read

n pairs of an instruction and a bit. The first writes, the last reads; each other one is `i` with probability p_ignore,
else `w` or `r`, equally likely. A bit after `r` is that of the last write; others are random. The language of Liu et
al. (Exposing attention glitches with flip-flop language modeling, arXiv 2306.00946).
"""

from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab, register
from canonlm.tasks.describe import Scale
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, draw_index, one_of
from canonlm.tasks.spec import MAX_LENGTH, LengthSpec

BOS, WRITE, READ, FREE, ZERO = range(5)
RARE = 1e-3  # answers per test sample; longer gaps that are rarer count with shorter ones

Probability = Annotated[float, Field(ge=0, lt=1)]


@register("flipflop")
class FlipFlop(LengthTask):
    """Read the bit of the last write. Loss on the bits that are read."""

    class Spec(LengthSpec):
        one_length = True
        N: int = Field(64, ge=2, le=MAX_LENGTH)  # training: n = N pairs
        p_ignore: Probability = 0.8  # training
        test_p_ignore: list[Probability] = [0.1, 0.8, 0.98]  # test: uniform on these, from dense to sparse

        @model_validator(mode="after")
        def _sensible(self) -> "FlipFlop.Spec":
            if not 0 < len(self.test_p_ignore) == len({*self.test_p_ignore}):
                raise self.refuse("test_p_ignore", "at least one probability, and each once", self.test_p_ignore)
            return self

    difficulties = {f"flipflop-{N}": {"N": N} for N in (64, 256)}
    about = "The model reads bits that are written, ignored or read, and must say which bit was written last."
    scales = {"gap": Scale("pairs since the write", lambda gap: f"{gap} or more" if gap != "1" else "1",
                           "Up to twice as many; the largest one: any more.")}  # fmt: skip

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, Vocab(["bos", "w", "r", "i", "0", "1"], ["bos"]))
        self.max_len = 1 + 2 * self.longest
        powers = [1 << i for i in range(self.test_lengths[-1].bit_length()) if 1 << i < self.test_lengths[-1]]
        self.gaps = [gap for gap in powers if self.answers_per_sample(gap) >= RARE or gap == 1]

    def answers_per_sample(self, gap: int) -> float:
        """The expected number of answers of a test sample with a gap of at least `gap`, but less than twice that."""
        total = 0.0
        for n in self.test_lengths:
            for p in self.spec.test_p_ignore:
                at, write = np.arange(1, n), (1 - p) / 2  # also the probability of a read, but for the last pair
                later = (1 - write) ** (gap - 1.0) * (at >= gap)  # that the last write is at least `gap` pairs before
                at_least_twice = (1 - write) ** (2 * gap - 1.0) * (at >= 2 * gap)
                total += float(((later - at_least_twice) * np.where(at == n - 1, 1, write)).sum())
        return total / len(self.test_lengths) / len(self.spec.test_p_ignore)

    def slices(self) -> list[Slice]:
        return [{"gap": gap} for gap in self.gaps]

    def chance(self, slice: Slice) -> float:
        """Written bits are fair, whatever the instructions are."""
        return 0.5

    def explain(self, sample: Sample, query: Query) -> str:
        kinds = sample.tokens[1 : query.start : 2].tolist()
        gap = kinds[::-1].index(WRITE)
        return f"{self.vocab.name(sample.tokens[query.start])} was written {gap} pair{'s' * (gap != 1)} before"

    def sampler(self, test: bool) -> Sampler:
        ignored = np.array(self.spec.test_p_ignore if test else [self.spec.p_ignore])
        # A row for each p_ignore: the cumulative probabilities of w, r and i.
        return _loop, (self.lengths(test), np.stack([(1 - ignored) / 2, 1 - ignored, np.ones_like(ignored)], 1))

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n, odd = divmod(len(tokens) - 1, 2)
        if odd or not 2 <= n <= self.longest:
            raise Malformed(len(tokens), f"expected bos and 2 to {self.longest} pairs, got {len(tokens)} tokens")
        self.vocab.after(tokens, 0, BOS)
        queries, written, kept = [], 0, -1
        for i in range(n):
            kind, bit, at = tokens[2 * i + 1], tokens[2 * i + 2], 2 * i + 1
            allowed = (WRITE,) if i == 0 else (READ,) if i == n - 1 else (WRITE, READ, FREE)
            if kind not in allowed:
                raise self.vocab.unlike(tokens, at, " or ".join(map(self.vocab.name, allowed)))
            if bit not in ((kept,) if kind == READ else (ZERO, ZERO + 1)):
                raise self.vocab.unlike(tokens, at + 1, self.vocab.name(kept) if kind == READ else "a bit")
            if kind == WRITE:
                written, kept = i, bit
            elif kind == READ:
                slot = max(gap for gap in self.gaps if gap <= i - written)
                queries.append(Query(at + 1, at + 2, {"gap": slot}, at))
        return {"n": n}, tuple(queries)


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, cumulative_by_p = tables
    state, n = one_of(state, gamma, lengths)
    state, cumulative = one_of(state, gamma, cumulative_by_p)
    tokens[0], targets[0] = BOS, IGNORE
    bits = kept = 0
    for i in range(n):
        if i % 32 == 0:
            state, bits = below(state, gamma, 1 << 32)
        bit = bits & 1
        bits >>= 1
        kind = WRITE if i == 0 else READ
        if 0 < i < n - 1:
            state, drawn = draw_index(state, gamma, cumulative)
            kind = WRITE + drawn
        if kind == WRITE:
            kept = bit
        elif kind == READ:
            bit = kept
        tokens[2 * i + 1], targets[2 * i + 1] = kind, IGNORE
        tokens[2 * i + 2] = ZERO + bit
        targets[2 * i + 2] = ZERO + bit if kind == READ else IGNORE
    return 2 * n + 1


_loop = compile_loop(_draw)
