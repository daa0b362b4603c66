"""Dictionary: what did this key mean before? In-context recall of MAD, where keys come again anywhere in the row.

    bos  k3 v1  k5 v2  n n  k3 v1  …  k5 v2          n: noise

n slots of two tokens or, with long keys and values, more. A slot has noise, or a key and its value, which is drawn when
the key first comes. The last slot has a key that came before. The three tasks "in-context recall" of MAD (arXiv
2403.17844): plain, noisy and fuzzy.
"""

import re
from math import perm
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.guessing import largest_shares
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.slots import BOS, FIRST, Tables, loop, rows_of
from canonlm.tasks.spec import LengthSpec
from canonlm.tasks.tokens import MAX_CELLS, leading

MAX_SLOTS = 2**11


@register("dictionary")
class Dictionary(LengthTask):
    """The values of keys that came before. Loss on these values."""

    class Spec(LengthSpec):
        one_length = True
        N: int = Field(64, ge=2, le=MAX_SLOTS)  # training: n = N slots
        keys: int = Field(8, ge=1, le=2**20)
        values: int = Field(8, ge=1, le=2**20)
        noise: float = Field(0.0, ge=0, le=0.95)  # the probability of noise in a slot
        noise_words: int = Field(16, ge=1, le=2**10)
        key_length: int = Field(
            1, ge=1, le=8
        )  # different tokens of a key: as many in the test, 1..key_length in training
        value_length: int = Field(1, ge=1, le=8)  # different tokens of a value: 1..value_length

        @model_validator(mode="after")
        def _sensible(self) -> "Dictionary.Spec":
            for kind, words, length in (("key", self.keys, self.key_length), ("value", self.values, self.value_length)):
                if not 0 < length * perm(words, length) <= MAX_CELLS:
                    what = f"at most {kind}s ({words}), and {kind}_length x their orders at most {MAX_CELLS}"
                    raise self.refuse(f"{kind}_length", what, length)
            return self

    difficulties = {
        "dictionary-64": {},
        "dictionary-64-noisy": {"noise": 0.2},
        "dictionary-32-fuzzy": {"N": 32, "keys": 7, "key_length": 3, "value_length": 3},
    }
    about = "The model reads keys and their values. Where a key comes again, it must give the same value."
    scales = {"n": Scale("number of slots", counted("slot"), trained="N")}

    def __init__(self, spec: Spec) -> None:
        keys, values, noise = (
            [f"{letter}{i}" for i in range(1, count + 1)]
            for letter, count in (("k", spec.keys), ("v", spec.values), ("n", spec.noise_words if spec.noise else 0))
        )
        super().__init__(spec, Vocab(["bos", *keys, *values, *noise], ["bos"]))
        self.max_len = 1 + self.longest * (spec.key_length + spec.value_length)
        self.slot = re.compile(f"(?P<key>k{{1,{spec.key_length}}})v{{1,{spec.value_length}}}|nn")

    def chance(self, slice: Slice) -> float:
        """The guess is the value that most of the keys before it have. It is a whole value: in windows, where no more
        tokens are read than the right value has, a long guess is also right if it begins with that value."""
        spec, right, asked = self.spec, 0.0, 0.0
        values = [perm(spec.values, length) for length in range(1, spec.value_length + 1)]
        for n in self.lengths_of(slice):
            known = _known(n, perm(spec.keys, spec.key_length), spec.noise)[1:]
            right += known @ largest_shares(len(known), *values)
            asked += known.sum()
        return float(right / asked)

    def explain(self, sample: Sample, query: Query) -> str:
        key, value = (sample.tokens[a:b] for a, b in ((query.question_start, query.start), (query.start, query.stop)))
        before = sample.meta["before"][sample.queries.index(query)]
        return f"{self.vocab.text(key)} had {self.vocab.text(value)}, {before} slot{'s' * (before > 1)} before"

    def sampler(self, test: bool) -> Sampler:
        spec = self.spec
        keys = rows_of(spec.keys, range(spec.key_length if test else 1, spec.key_length + 1), FIRST)
        values = rows_of(spec.values, range(1, spec.value_length + 1), FIRST + spec.keys)
        return loop, Tables(
            self.lengths(test), *keys, *values, spec.noise, FIRST + spec.keys + spec.values, spec.noise_words
        )

    def _complete(self, answer: list[Any], length: int) -> list[Any]:
        first = FIRST + self.spec.keys
        return leading(answer, range(first, first + self.spec.values), self.spec.value_length)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        kinds = "".join(self.vocab.name(token)[0] for token in tokens)
        at, slots = self.vocab.after(tokens, 0, BOS), list[tuple[tuple[int, ...], int, int]]()
        while at < len(tokens):
            if (match := self.slot.match(kinds, at)) is None:
                raise self.vocab.unlike(tokens, at, "a key and its value" + ", or noise" * bool(self.spec.noise))
            start = match.end("key") if match["key"] else at
            for part in (tokens[at:start], tokens[start : match.end()]):
                if match["key"] and len({*part}) < len(part):
                    raise Malformed(at, f"expected different tokens, got {self.vocab.text(part)}")
            slots.append((tuple(tokens[at:start]), start, at := match.end()))
        if not 2 <= len(slots) <= self.longest:
            raise Malformed(at, f"expected 2 to {self.longest} slots before it, got {len(slots)}")
        newest, values = dict[tuple[int, ...], int](), dict[tuple[int, ...], list[int]]()
        queries, before = list[Query](), list[int]()
        for place, (key, start, stop) in enumerate(slots):
            if key in newest:
                if tokens[start:stop] != values[key]:
                    text = self.vocab.text
                    raise Malformed(start, f"expected {text(values[key])}, got {text(tokens[start:stop])}")
                queries.append(Query(start, stop, {"n": len(slots)}, start - len(key)))
                before.append(place - newest[key])
            elif place == len(slots) - 1:
                raise self.vocab.unlike(tokens, start - len(key), "a key that came before")
            if key:
                newest[key], values[key] = place, tokens[start:stop]
        return {"n": len(slots), "before": before}, tuple(queries)


def _known(n: int, keys: int, noise: float) -> np.ndarray:
    """By a number of keys: in how many slots of a row a key is asked for after that many different ones, on average."""
    later = np.zeros(min(n, keys) + 1)  # how many were drawn, and the slot that never has noise is still to come
    later[0] = 1
    past, asked, count = np.zeros_like(later), np.zeros_like(later), np.arange(len(later))

    def drawn(known: np.ndarray) -> np.ndarray:
        new = known * (1 - count / keys)
        return known - new + np.append(0, new[:-1])

    for left in range(n - 1, 0, -1):
        here, later = later / left, later * (1 - 1 / left)
        asked += (here + (1 - noise) * (later + past)) * count / keys
        past = noise * past + (1 - noise) * drawn(past) + drawn(here)
        later = noise * later + (1 - noise) * drawn(later)
    return asked + past
