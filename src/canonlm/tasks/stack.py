"""Stack: what is on top of this stack? Measures the tracking of several last-in, first-out stacks.

    bos  push s3 x7  push s1 x2  push s3 x4  pop s3 x4  pop s3 x7 …

n operations on `stacks` stacks. Each names a stack, uniformly; it pushes a random element if the stack is empty, and
else pushes one or pops, equally likely. The model has to give the popped element. Our reading of the task "stack" of
Kimi Linear (arXiv 2510.26692), which states neither the distribution of operations nor the number of elements.
"""

from functools import lru_cache

import numpy as np
from pydantic import Field

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.guessing import largest_shares
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import one_of, two_below
from canonlm.tasks.spec import LengthSpec

BOS, PUSH, POP, FIRST = 0, 1, 2, 3
MAX_LENGTH = 2**14


@register("stack")
class Stack(LengthTask):
    """The elements that n operations pop. Loss on the popped elements."""

    class Spec(LengthSpec):
        one_length = True
        N: int = Field(64, ge=2, le=MAX_LENGTH)  # training: n = N operations
        stacks: int = Field(64, ge=1, le=4096)
        elements: int = Field(26, ge=2, le=2**16)

    difficulties = {f"stack-{N}": {"N": N} for N in (85, 341, 682)}  # 256, 1024 and 2047 tokens
    about = "The model reads operations on several stacks, and must give the element that each `pop` takes off."
    scales = {"n": Scale("number of operations", counted("operation"), trained="N")}

    def __init__(self, spec: Spec) -> None:
        self.first_element = FIRST + spec.stacks
        stacks, elements = (f"s{i}" for i in range(1, spec.stacks + 1)), (f"x{i}" for i in range(1, spec.elements + 1))
        super().__init__(spec, Vocab(["bos", "push", "pop", *stacks, *elements], ["bos"]))
        self.max_len = 1 + 3 * self.longest

    def chance(self, slice: Slice) -> float:
        """The guess is the element that is on the stacks most often, whichever stack is asked about."""
        right = asked = 0.0
        for n in self.lengths_of(slice):
            on_stacks = _heights(n, self.spec.stacks)
            right += on_stacks @ largest_shares(n, self.spec.elements)
            asked += on_stacks.sum()
        return float(right / asked)

    def explain(self, sample: Sample, query: Query) -> str:
        stack, element = map(self.vocab.name, sample.tokens[query.start - 1 : query.stop])
        pushed = sample.meta["pushed"][(query.start - 1) // 3]
        return f"{element} was pushed onto {stack} by operation {pushed + 1}, and not popped since"

    def sampler(self, test: bool) -> Sampler:
        return _loop, (self.lengths(test), self.spec.stacks, self.spec.elements)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n = (len(tokens) - 1) // 3
        if len(tokens) != 1 + 3 * n or not 1 <= n <= self.longest:
            raise Malformed(len(tokens), f"expected bos and 1 to {self.longest} operations, got {len(tokens)} tokens")
        self.vocab.after(tokens, 0, BOS)
        stacks: dict[int, list[int]] = {}
        queries, pushed = [], {}
        for i in range(n):
            at, (kind, stack, element) = 3 * i + 1, tokens[3 * i + 1 : 3 * i + 4]
            if kind not in (PUSH, POP):
                raise self.vocab.unlike(tokens, at, "push or pop")
            if not FIRST <= stack < self.first_element:
                raise self.vocab.unlike(tokens, at + 1, "a stack")
            on_it = stacks.setdefault(stack, [])
            if kind == PUSH:
                if not self.first_element <= element < len(self.vocab):
                    raise self.vocab.unlike(tokens, at + 2, "an element")
                on_it.append(i)
                continue
            if not on_it:
                raise Malformed(at, f"expected push, as {self.vocab.name(stack)} is empty")
            pushed[i] = on_it.pop()
            self.vocab.after(tokens, at + 2, tokens[3 * pushed[i] + 3])
            queries.append(Query(at + 2, at + 3, {"n": n}, at))
        return {"n": n, "pushed": pushed}, tuple(queries)


@lru_cache(maxsize=64)
def _heights(n: int, stacks: int) -> np.ndarray:
    """[n]: how often, in simulated samples, 1 … n elements are on the stacks when one is popped."""
    rng, rows = np.random.default_rng(0), max(16, 2**22 // max(n, stacks) // 64)
    height, row = np.zeros((rows, stacks), np.int32), np.arange(rows)
    counts = np.full(n, 1e-9)  # where no simulated sample pops, all heights count alike
    for _ in range(n):
        stack = rng.integers(stacks, size=rows)
        pops = (height[row, stack] > 0) & (rng.random(rows) < 0.5)
        np.add.at(counts, height.sum(1)[pops] - 1, 1)
        height[row, stack] += np.where(pops, -1, 1)
    return counts


def _make_room(tables):
    """The last element of each stack, and what was below each operation's element: an operation, or -1."""
    lengths, stacks, _ = tables
    return np.empty(stacks, np.int32), np.empty(lengths.max(), np.int32)


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, stacks, elements = tables
    top, under = room
    state, n = one_of(state, gamma, lengths)
    tokens[0] = BOS
    targets[: 3 * n + 1] = IGNORE
    top[:] = -1
    for i in range(n):
        at = 3 * i + 1
        state, which, element = two_below(state, gamma, 2 * stacks, elements)
        stack = which >> 1
        tokens[at + 1] = FIRST + stack
        last = top[stack]
        if which & 1 and last >= 0:
            tokens[at] = POP
            tokens[at + 2] = targets[at + 2] = tokens[3 * last + 3]
            top[stack] = under[last]
        else:
            tokens[at] = PUSH
            tokens[at + 2] = FIRST + stacks + element
            under[i] = last
            top[stack] = i
    return 3 * n + 1


_loop = compile_loop(_draw, _make_room)
