"""Words: the base of tasks that read a row of inputs, each of which moves a state, and ask about the state.

    bos  x_1 … x_n  ans  y                answers=end: y is the output of the state after the word
    bos  x_1 … x_n  ans                   answers=every: after each x_i, the target is the output of the state

Inputs are independent and equally likely. `table[state, input]` is the next state; words start in state 0.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from canonlm.core.errors import expected
from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import one_of, two_below
from canonlm.tasks.spec import LengthSpec

BOS, ANS, FIRST = 0, 1, 2


class WordsSpec(LengthSpec):
    answers: Literal["end", "every"] = "end"  # one answer after the word, or one at every position of it


class Words(LengthTask):
    """Input i is the token FIRST + i. inputs: those of which words are made. outputs: the answer's token, by state."""

    an_input: str  # for errors
    the_answer: str

    def __init__(self, spec: Any, vocab: Vocab, inputs: list[int], table: np.ndarray, outputs: np.ndarray) -> None:
        super().__init__(spec, vocab)
        self.inputs, self.every = inputs, spec.answers == "every"
        self.separate_answers = not self.every
        self.table, self.outputs = table.astype(np.int32), outputs.astype(np.int32)
        self.max_len = self.longest + 3 - self.every

    def chance(self, slice: Slice) -> float:
        """The likeliest output after n inputs."""
        step = np.zeros((len(self.table), len(self.table)))
        for each in self.inputs:
            np.add.at(step, (np.arange(len(step)), self.table[:, each]), 1 / len(self.inputs))
        states = np.linalg.matrix_power(step, int(slice["n"]))[0]
        return float(np.bincount(self.outputs, weights=states).max())

    def sampler(self, test: bool) -> Sampler:
        lengths = self.lengths(test)
        if test and self.every:  # such a sample has an answer at every test length
            lengths = lengths[-1:]
        return _loop, (lengths, np.array(self.inputs, np.int32), self.table, self.outputs, self.every)

    def show(self, sample: Sample) -> list[tuple[str, str]]:
        if not self.every:
            return super().show(sample)
        names = map(self.vocab.name, sample.tokens.tolist())
        return [(name, "marker" if name in ("bos", "ans") else "context") for name in names]

    def _loss_on(self, loss_on: str | None) -> str:
        if self.every and loss_on == "all":  # targets are not the next tokens
            raise expected("loss_on", f'"answer" with {self.Spec.task}.answers=every', loss_on)
        return super()._loss_on(loss_on)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n = len(tokens) - 3 + self.every
        if not 1 <= n <= self.longest:
            shape = f"bos, 1 to {self.longest} {self.an_input.split()[1]}s, ans"
            shape += "" if self.every else f" and {self.the_answer}"
            raise Malformed(len(tokens), f"expected {shape}, got {len(tokens)} tokens")
        self.vocab.after(tokens, 0, BOS)
        allowed, states = {*self.inputs}, [0]
        for at, token in enumerate(tokens[1 : n + 1], 1):
            if token - FIRST not in allowed:
                few = len(allowed) < self.table.shape[1]
                what = self.vocab.text(FIRST + i for i in self.inputs) if few else self.an_input
                raise self.vocab.unlike(tokens, at, what)
            states.append(int(self.table[states[-1], token - FIRST]))
        self.vocab.after(tokens, n + 1, ANS)
        if self.every:
            queries = tuple(Query(i + 1, i + 2, {"n": i}) for i in self.test_lengths if i <= n)
            return {"n": n, self.states_are: states[1:]}, queries
        self.vocab.after(tokens, n + 2, int(self.outputs[states[n]]))
        return {"n": n}, (Query(n + 2, n + 3, {"n": n}, n + 1),)

    states_are = "states"  # the name of this fact of a sample

    def _labelled(self, ids: np.ndarray, facts: Mapping[str, Any], queries: tuple[Query, ...], loss_on: str) -> Sample:
        sample = super()._labelled(ids, facts, queries, loss_on)
        if self.every:
            sample.labels[2:] = self.outputs[facts[self.states_are]]
        return sample


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, inputs, table, outputs, every = tables
    state, n = one_of(state, gamma, lengths)
    tokens[0], at = BOS, 0
    targets[0] = targets[1] = IGNORE
    for i in range(0, n, 2):
        state, a, b = two_below(state, gamma, len(inputs), len(inputs))
        first, second = inputs[a], inputs[b]
        at = table[at, first]
        tokens[i + 1] = FIRST + first
        targets[i + 2] = outputs[at] if every else IGNORE
        tokens[i + 2] = FIRST + second
        if i + 1 < n:
            at = table[at, second]
            targets[i + 3] = outputs[at] if every else IGNORE
    tokens[n + 1] = ANS
    if not every:
        tokens[n + 2] = targets[n + 2] = outputs[at]
    return n + 3 - every


_loop = compile_loop(_draw)
