"""Induction: what came after this trigger? Measures recall of one word over the n tokens of a row.

    bos  w w w T3 x w w T1 y w  T3 x

A row of n tokens: random words, and among them `shown` triggers, each of which occurs once, before another word. Then
one of them again, followed by its word. The task "induction heads" of H3 (arXiv 2212.14052) and Mamba (2312.00752),
which have one trigger. With many triggers of which few are shown, each of them is rare in training.
"""

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.guessing import largest_shares
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, one_of, shuffle, two_below, unshuffle
from canonlm.tasks.spec import MAX_LENGTH, LengthSpec

BOS, FIRST = 0, 1
MAX_WORDS = 2**20


@register("induction")
class Induction(LengthTask):
    """The word after a trigger. Loss on the answer."""

    class Spec(LengthSpec):
        one_length = True
        N: int = Field(64, ge=2, le=MAX_LENGTH)  # training: n = N
        words: int = Field(15, ge=2, le=MAX_WORDS)
        triggers: int = Field(1, ge=1, le=MAX_WORDS)  # different triggers
        shown: int = Field(1, ge=1, le=MAX_LENGTH // 2)  # triggers in a row, uniform among all

        @model_validator(mode="after")
        def _sensible(self) -> "Induction.Spec":
            if self.shown > (largest := min(self.triggers, self.N // 2)):
                what = f"at most {largest}, as there are {self.triggers} triggers and N is {self.N}"
                raise self.refuse("shown", what, self.shown)
            return self

        def shortest(self) -> int:
            return 2 * self.shown

    difficulties = {"induction-256": {"N": 256}, "induction-256-rare": {"N": 256, "triggers": 1024, "shown": 4}}
    about = "The model reads a row of random words, then a trigger that was in it, and must give the word after it."
    scales = {"n": Scale("length of the row", counted("token"), trained="N")}

    def __init__(self, spec: Spec) -> None:
        words, triggers = (f"w{i}" for i in range(1, spec.words + 1)), (f"T{i}" for i in range(1, spec.triggers + 1))
        super().__init__(spec, Vocab(["bos", *words, *triggers], ["bos"]))
        self.max_len = self.longest + 3

    def chance(self, slice: Slice) -> float:
        """The guess is the most frequent of the words after triggers; where only one is shown, of all words."""
        shown = self.spec.shown
        words = [shown if shown > 1 else n - 1 for n in self.lengths_of(slice)]
        return float(np.mean([largest_shares(m, self.spec.words)[-1] for m in words]))

    def explain(self, sample: Sample, query: Query) -> str:
        trigger, word = map(self.vocab.name, sample.tokens[query.start - 1 : query.stop])
        before = sample.meta["n"] + 1 - sample.tokens.tolist().index(sample.tokens[query.start - 1])
        return f"{trigger} was followed by {word}, {before} tokens before"

    def sampler(self, test: bool) -> Sampler:
        return _loop, (self.lengths(test), self.spec.words, self.spec.triggers, self.spec.shown)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n, first = len(tokens) - 3, FIRST + self.spec.words
        if not 2 * self.spec.shown <= n <= self.longest:
            lengths = f"{2 * self.spec.shown} to {self.longest}"
            raise Malformed(
                len(tokens), f"expected bos, {lengths} tokens, a trigger and its word, got {len(tokens)} tokens"
            )
        self.vocab.after(tokens, 0, BOS)
        came_with: dict[int, int] = {}
        for at, token in enumerate(tokens[1 : n + 1], 1):
            if not FIRST <= token < len(self.vocab):
                raise self.vocab.unlike(tokens, at, "a word or a trigger")
            if token >= first:
                if token in came_with or tokens[at - 1] >= first or at == n:
                    raise self.vocab.unlike(tokens, at, "each trigger once, and before a word")
                came_with[token] = tokens[at + 1]
        if len(came_with) != self.spec.shown:
            raise Malformed(n + 1, f"expected {self.spec.shown} triggers before it, got {len(came_with)}")
        if tokens[n + 1] not in came_with:
            raise self.vocab.unlike(tokens, n + 1, "a trigger of the row")
        self.vocab.after(tokens, n + 2, came_with[tokens[n + 1]])
        return {"n": n}, (Query(n + 2, n + 3, {"n": n}, n + 1),)


def _make_room(tables):
    """All triggers in order: every draw leaves them as they were."""
    _, _, triggers, _ = tables
    return np.arange(triggers)


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, words, triggers, shown = tables
    state, n = one_of(state, gamma, lengths)
    state = shuffle(state, gamma, room, triggers, shown)
    state, asked = below(state, gamma, shown)
    tokens[0], at, left = BOS, 1, shown
    for slot in range(n - shown, 0, -1):
        state, place, word = two_below(state, gamma, slot, words)
        if place < left:
            left -= 1
            tokens[at] = FIRST + words + room[left]
            at += 1
            if left == asked:
                tokens[n + 1], tokens[n + 2] = tokens[at - 1], FIRST + word
        tokens[at] = FIRST + word
        at += 1
    targets[: n + 2] = IGNORE
    targets[n + 2] = tokens[n + 2]
    unshuffle(room, shown)
    return n + 3


_loop = compile_loop(_draw, _make_room)
