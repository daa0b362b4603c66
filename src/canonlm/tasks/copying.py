"""Copying: repeat a list. Measures whether a model can look back exactly n tokens.

    bos  x_1 … x_n  ans  x_1 … x_n

The x are n different items out of N, in random order. The grader looks at the first 1, 2 and 4 tokens and at the whole
copy, as in the paper (arXiv 2512.17351, Fig. 5: N = 500, a permutation of all items).
"""

import math

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import one_of, shuffle
from canonlm.tasks.spec import Sizes, TaskSpec

BOS, ANS, FIRST_ITEM = 0, 1, 2
PREFIXES = (1, 2, 4)


@register("copying")
class Copying(Task):
    """Copy n different items. Loss on the n copied tokens, not on the marker (as in the paper)."""

    class Spec(TaskSpec):
        N: int = Field(32, ge=1, le=2**20)  # number of possible items
        min_items: int = Field(0, ge=1)  # training: n uniform on min_items..max_items; default N // 4, at least 1
        max_items: int | None = Field(None, ge=1)  # None: N
        test_lengths: Sizes = None  # test: n uniform on these, and whole lists are sliced by n, too; None: n = N

        @model_validator(mode="before")
        @classmethod
        def _default(cls, values: dict) -> dict:
            N = values.get("N", 32)
            return {"min_items": max(N // 4, 1) if isinstance(N, int) else 1, **values}

        @model_validator(mode="after")
        def _in_range(self) -> "Copying.Spec":
            if self.min_items > self.N:
                raise self.refuse("min_items", f"an integer from 1 to N ({self.N})", self.min_items)
            if not self.min_items <= self.longest() <= self.N:
                what = f"an integer from min_items ({self.min_items}) to N ({self.N})"
                raise self.refuse("max_items", what, self.max_items)
            self.lengths()
            return self

        def longest(self) -> int:
            """The largest n of training."""
            return self.max_items or self.N

        def lengths(self) -> list[int]:
            return self.sizes("test_lengths", self.longest(), range(1, self.N + 1), [self.N])

    difficulties = {"copying-32": {"N": 32}, "copying-500": {"N": 500, "min_items": 500}}
    loss_on = "answer"

    about = "The model reads a list of random items and must repeat it, in order and without a mistake."
    scales = {
        "first": Scale(
            "length of the start", lambda v: {"all": "whole list", "1": "first item"}.get(v, f"first {v} items")
        ),
        "n": Scale("number of items", counted("item"), trained="max_items N"),
    }

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.vocab = Vocab(["bos", "ans", *(f"x{i}" for i in range(1, spec.N + 1))], ["bos", "ans"])
        self.max_len = 2 * spec.N + 2

    def slices(self) -> list[Slice]:
        lengths = self.spec.lengths()
        starts = [query.slice for query in _queries(lengths[-1])]
        return [*starts, *({"n": n} for n in lengths if self.spec.test_lengths)]

    def chance(self, slice: Slice) -> float:
        """The guess is a random order of the list's items."""
        lengths = [int(slice["n"])] if "n" in slice else self.spec.lengths()
        prefix = slice.get("first", "all")
        parts = [(n, n if prefix == "all" else int(prefix)) for n in lengths if prefix == "all" or n >= int(prefix)]
        return sum(1 / math.perm(n, part) for n, part in parts) / len(parts)

    def explain(self, sample: Sample, query: Query) -> str:
        items, prefix = sample.meta["items"], query.slice["first"]
        which = f"all {len(items)} items" if prefix == "all" else f"the first {prefix} of {len(items)} items"
        return f"{which}, in the order of the list"

    def sampler(self, test: bool) -> Sampler:
        spec = self.spec
        sizes = spec.lengths() if test else range(spec.min_items, spec.longest() + 1)
        return _loop, (np.array(sizes), spec.N)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n, items = len(tokens) // 2 - 1, set()
        if len(tokens) % 2 or not 1 <= n <= self.spec.N:
            shape = f"bos, 1 to {self.spec.N} items, ans and the items again"
            raise Malformed(len(tokens), f"expected {shape}, got {len(tokens)} tokens")
        for i, token in enumerate(tokens):
            right = {0: BOS, n + 1: ANS}.get(i, tokens[i - n - 1] if i > n else None)
            if (token != right) if right is not None else not FIRST_ITEM <= token < len(self.vocab):
                raise self.vocab.unlike(tokens, i, "an item" if right is None else self.vocab.name(right))
            if right is None and token in items:
                raise Malformed(i, f"{self.vocab.name(token)} a second time")
            items.add(token)
        return {"n": n, "items": tuple(map(self.vocab.name, tokens[1 : n + 1]))}, _queries(
            n, bool(self.spec.test_lengths)
        )


def _queries(n: int, by_length: bool = False) -> tuple[Query, ...]:
    """All queries start at the first copied token. Prefixes longer than the copy are left out."""
    start = n + 2
    prefixes = tuple(Query(start, start + t, {"first": t}, start - 1) for t in PREFIXES if t <= n)
    of_length: Slice = {"n": n} if by_length else {}
    return (*prefixes, Query(start, start + n, {"first": "all", **of_length}, start - 1))


def _make_room(tables):
    _, N = tables
    return np.empty(N, np.int32)


def _draw(state, gamma, tables, items, tokens, targets):
    sizes, N = tables
    state, n = one_of(state, gamma, sizes)
    for i in range(N):
        items[i] = FIRST_ITEM + i
    state = shuffle(state, gamma, items, N, n)
    tokens[0] = BOS
    tokens[n + 1] = ANS
    targets[: n + 2] = IGNORE
    for i in range(n):
        tokens[1 + i] = items[i]
        tokens[n + 2 + i] = items[i]
        targets[n + 2 + i] = items[i]
    return 2 * n + 2


_loop = compile_loop(_draw, _make_room)
