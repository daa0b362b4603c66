"""MQAR, multi-query associative recall: which value came with this key? Measures memory over the number of pairs.

    bos  k_1 v_1  k_2 v_2 … k_n v_n   ask  k v  k' v'  …

n different keys, each followed by a different value; then every key again, in random order, followed by its value. The
task of Arora et al. (Zoology, arXiv 2312.04927), without the filler tokens between the questions.
"""

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import one_of, shuffle
from canonlm.tasks.spec import Sizes, TaskSpec

BOS, ASK, FIRST_KEY = 0, 1, 2
KINDS = {"b": "bos", "a": "ask", "k": "a key", "v": "a value"}


@register("mqar")
class Mqar(Task):
    """Recall the values of n keys. Loss on the n recalled values."""

    class Spec(TaskSpec):
        pairs: int = Field(16, ge=1, le=2**16)  # training: n uniform on 1..pairs
        test_pairs: Sizes = None  # test: n uniform on these; None: 4, 8, 16, … and `pairs`
        keys: int = Field(64, ge=1, le=2**20)  # number of possible keys
        values: int = Field(64, ge=1, le=2**20)  # number of possible values, which are other tokens

        @model_validator(mode="after")
        def _enough_tokens(self) -> "Mqar.Spec":
            if self.pairs > (max_pairs := min(self.keys, self.values)):
                available = f"as there are {self.keys} keys and {self.values} values"
                raise self.refuse("pairs", f"at most {max_pairs}, {available}", self.pairs)
            self.test_sizes()
            return self

        def test_sizes(self) -> list[int]:
            return self.sizes("test_pairs", self.pairs, range(1, min(self.keys, self.values) + 1))

    difficulties = {"mqar-16": {"pairs": 16}, "mqar-64": {"pairs": 64, "keys": 1024, "values": 1024}}
    loss_on = "answer"

    about = (
        "The model reads pairs of a key and a value, then sees the keys again and must give the value that "
        "came with each."
    )
    scales = {"pairs": Scale("number of pairs", counted("pair"), trained="pairs")}

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        keys, values = (f"k{i}" for i in range(1, spec.keys + 1)), (f"v{i}" for i in range(1, spec.values + 1))
        self.vocab = Vocab(["bos", "ask", *keys, *values], ["bos", "ask"])
        self.test_pairs = spec.test_sizes()
        self.max_len = 2 + 4 * max(spec.pairs, *self.test_pairs)

    def slices(self) -> list[Slice]:
        return [{"pairs": n} for n in self.test_pairs]

    def chance(self, slice: Slice) -> float:
        """A random value that has not been an answer yet is right in 1/n of the first questions, in all of the last."""
        n = int(slice["pairs"])
        return sum(1 / left for left in range(1, n + 1)) / n

    def explain(self, sample: Sample, query: Query) -> str:
        key = self.vocab.name(sample.tokens[query.question_start])
        return f"{key} came with {sample.meta['pairs'][key]}"

    def sampler(self, test: bool) -> Sampler:
        sizes = np.array(self.test_pairs if test else range(1, self.spec.pairs + 1))
        return _loop, (sizes, self.spec.keys, self.spec.values)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n = (len(tokens) - 2) // 4
        if len(tokens) != 4 * n + 2 or n < 1:
            raise Malformed(len(tokens), f"expected bos, n pairs, ask and the pairs again, got {len(tokens)} tokens")
        names = [*map(self.vocab.name, tokens)]
        for at, (name, kind) in enumerate(zip(names, "b" + "kv" * n + "a" + "kv" * n, strict=True)):
            if name[0] != kind:
                raise Malformed(at, f"expected {KINDS[kind]}, got {name}")
        pairs = dict(zip(names[1 : 2 * n : 2], names[2 : 2 * n + 1 : 2], strict=True))
        if len(pairs) < n or len({*pairs.values()}) < n:
            raise Malformed(2 * n + 1, "expected different keys and different values before it")
        questions = range(2 * n + 2, len(tokens), 2)
        for at in questions:
            if pairs.get(names[at]) != names[at + 1]:
                raise Malformed(at, f"{names[at]} {names[at + 1]} is not one of the pairs")
        if len({names[at] for at in questions}) < n:
            raise Malformed(len(tokens), "expected one question about every key")
        return {"n": n, "pairs": pairs}, tuple(Query(at + 1, at + 2, {"pairs": n}, at) for at in questions)


def _make_room(tables):
    """Arrays for the keys, the values, and the order in which the keys are repeated."""
    sizes, keys, values = tables
    return np.empty(keys, np.int32), np.empty(values, np.int32), np.empty(sizes.max(), np.int32)


def _draw(state, gamma, tables, room, tokens, targets):
    sizes, keys, values = tables
    key, value, order = room
    state, n = one_of(state, gamma, sizes)
    for i in range(keys):
        key[i] = FIRST_KEY + i
    for i in range(values):
        value[i] = FIRST_KEY + keys + i
    for i in range(n):
        order[i] = i
    state = shuffle(state, gamma, key, keys, n)
    state = shuffle(state, gamma, value, values, n)
    state = shuffle(state, gamma, order, n, n)
    tokens[0] = BOS
    tokens[2 * n + 1] = ASK
    targets[: 2 * n + 2] = IGNORE
    for i in range(n):
        tokens[2 * i + 1] = key[i]
        tokens[2 * i + 2] = value[i]
        question = 2 * (n + i) + 2
        tokens[question] = key[order[i]]
        tokens[question + 1] = value[order[i]]
        targets[question] = IGNORE
        targets[question + 1] = tokens[question + 1]
    return 4 * n + 2


_loop = compile_loop(_draw, _make_room)
