"""State: the product of elements of a group, a word. Measures state tracking over the number of elements n.

    bos  x_1 … x_n  ans  y                answers=end: y is the product x_1 x_2 … x_n
    bos  x_1 … x_n  ans                   answers=every: after each x_i, the target is the product x_1 … x_i

The state is an element of the group, and every token moves it. The task of Merrill, Petty and Sabharwal (The illusion
of state in state-space models, arXiv 2404.08819).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from canonlm.core.errors import expected
from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.groups import group, problem
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, two_below
from canonlm.tasks.spec import TaskSpec

BOS, ANS, FIRST = 0, 1, 2
MAX_LENGTH = 2**16


@register("state")
class State(Task):
    """The product of n random elements of a group. Loss on the answers."""

    class Spec(TaskSpec):
        group: str = "S5"  # `canonlm.tasks.groups`: Z2 … Z60, D3 …, S3 …, A4 …, and products such as A5xZ2
        inputs: Literal["all", "generators"] = "all"  # words of all elements, or of the identity and some generators
        answers: Literal["end", "every"] = "end"  # one answer after the word, or one at every position of it
        N: int = Field(32, ge=1, le=MAX_LENGTH)  # training: n uniform on 1..N
        test_lengths: list[int] | None = None  # test: n uniform on these; None: 4, 8, 16, … and N

        @model_validator(mode="after")
        def _sensible(self) -> "State.Spec":
            if what := problem(self.group):
                raise self.refuse("group", what, self.group)
            lengths, possible = self.test_lengths, range(1, MAX_LENGTH + 1)
            if lengths is not None and not 0 < len(lengths) == len({*lengths} & {*possible}):
                raise self.refuse("test_lengths", f"different integers from 1 to {MAX_LENGTH}", lengths)
            return self

    difficulties = {f"state-{name.lower()}": {"group": name} for name in ("S3", "Z60", "A4xZ5", "A5", "S5")}
    about = "The model reads elements of a group, such as permutations of five things, and must give their product."
    scales = {"n": Scale("number of elements", counted("element"))}

    def __init__(self, spec: Spec) -> None:
        self.spec, self.group, self.every = spec, group(spec.group), spec.answers == "every"
        self.vocab = Vocab(["bos", "ans", *(f"g{i}" for i in range(self.group.order))], ["bos", "ans"])
        self.inputs = [*range(self.group.order)] if spec.inputs == "all" else [0, *self.group.generators]
        powers = {1 << i for i in range(2, spec.N.bit_length())}
        self.test_lengths = sorted(spec.test_lengths or powers | {spec.N})
        self.longest = max(spec.N, *self.test_lengths)
        self.max_len = self.longest + 3 - self.every

    def slices(self) -> list[Slice]:
        return [{"n": n} for n in self.test_lengths]

    def chance(self, slice: Slice) -> float:
        """The likeliest product of n elements. With all elements as inputs, every product is equally likely, even if
        all elements but one are known."""
        if self.spec.inputs == "all":
            return 1 / self.group.order
        step = np.zeros(self.group.table.shape)
        for each in self.inputs:
            step[range(len(step)), self.group.table[:, each]] += 1 / len(self.inputs)
        return float(np.linalg.matrix_power(step, int(slice["n"]))[0].max())

    def explain(self, sample: Sample, query: Query) -> str:
        n, answer = counted("element")(str(query.slice["n"])), int(sample.labels[query.start]) - FIRST
        return f"the product of {n} is g{answer} = {self.group.cycles(answer)}"

    def sampler(self, test: bool) -> Sampler:
        lengths = np.array(self.test_lengths if test else range(1, self.spec.N + 1))
        if test and self.every:  # such a sample has an answer at every test length
            lengths = lengths[-1:]
        return _loop, Tables(lengths, np.array(self.inputs, np.int32), self.group.table, self.every)

    def show(self, sample: Sample) -> list[tuple[str, str]]:
        if not self.every:
            return super().show(sample)
        names = map(self.vocab.name, sample.tokens.tolist())
        return [(name, "marker" if name in ("bos", "ans") else "context") for name in names]

    def _loss_on(self, loss_on: str | None) -> str:
        if self.every and loss_on == "all":
            raise expected("loss_on", '"answer" with state.answers=every', loss_on)  # targets are not the next tokens
        return super()._loss_on(loss_on)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n = len(tokens) - 3 + self.every
        if not 1 <= n <= self.longest:
            shape = f"bos, 1 to {self.longest} elements, ans{'' if self.every else ' and the product'}"
            raise Malformed(len(tokens), f"expected {shape}, got {len(tokens)} tokens")
        self.vocab.after(tokens, 0, BOS)
        allowed, products = {*self.inputs}, [0]
        for at, token in enumerate(tokens[1 : n + 1], 1):
            if token - FIRST not in allowed:
                what = "an element" if self.spec.inputs == "all" else self.vocab.text(FIRST + i for i in self.inputs)
                raise Malformed(at, f"expected {what}, got {self.vocab.name(token)}")
            products.append(int(self.group.table[products[-1], token - FIRST]))
        self.vocab.after(tokens, n + 1, ANS)
        if self.every:
            queries = tuple(Query(i + 1, i + 2, {"n": i}) for i in self.test_lengths if i <= n)
            return {"n": n, "products": products[1:]}, queries
        self.vocab.after(tokens, n + 2, FIRST + products[n])
        return {"n": n}, (Query(n + 2, n + 3, {"n": n}, n + 1),)

    def _labelled(self, ids: np.ndarray, facts: Mapping[str, Any], queries: tuple[Query, ...], loss_on: str) -> Sample:
        sample = super()._labelled(ids, facts, queries, loss_on)
        if self.every:
            sample.labels[2:] = np.array(facts["products"]) + FIRST
        return sample


class Tables(NamedTuple):
    lengths: np.ndarray  # the values from which n is drawn
    inputs: np.ndarray  # the elements of which words are made
    table: np.ndarray  # of the group
    every: bool  # whether the products are targets at every position


def _make_room(tables):
    return ()


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, inputs, table, every = tables
    state, which = below(state, gamma, len(lengths))
    n = lengths[which]
    tokens[0], product = BOS, 0
    targets[0] = targets[1] = IGNORE
    for i in range(0, n, 2):
        state, a, b = two_below(state, gamma, len(inputs), len(inputs))
        first, second = inputs[a], inputs[b]
        product = table[product, first]
        tokens[i + 1] = FIRST + first
        targets[i + 2] = FIRST + product if every else IGNORE
        tokens[i + 2] = FIRST + second
        if i + 1 < n:
            product = table[product, second]
            targets[i + 3] = FIRST + product if every else IGNORE
    tokens[n + 1] = ANS
    if not every:
        tokens[n + 2] = targets[n + 2] = FIRST + product
    return n + 3 - every


_loop = compile_loop(_draw, _make_room)
