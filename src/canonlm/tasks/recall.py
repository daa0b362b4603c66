"""Recall: which value is bound to this key? MQAR with what makes recall hard: noise, filler, keys that interfere.

    bos  k v  n n  k v  k' v' …  ask  k' v'  n n  k v …        n: noise

n bindings of a key to a value, in slots among noise; then a question about every key, in slots among filler. Keys of
a sample differ, and so do values. The settings are those of Zoology's MQAR and its variants (arXiv 2312.04927).
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from canonlm.core.errors import expected
from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Vocab, register
from canonlm.tasks.bindings import ASK, BOS, FIRST, Tables, loop, tables_of_names
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.spec import Sizes, TaskSpec
from canonlm.tasks.tokens import MAX_CELLS

MAX_PAIRS = 2**12
Fraction = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[int, Field(ge=1, le=2**20)]


@register("recall")
class Recall(Task):
    """The values of n keys. Loss on the values asked for."""

    class Spec(TaskSpec):
        pairs: int = Field(16, ge=1, le=MAX_PAIRS)  # training: n uniform on 1..pairs; in a grid, on its squares
        train_pairs: int | None = Field(None, ge=1)  # training: n = train_pairs; None: as above
        test_pairs: Sizes = None  # test: n uniform on these; None: 4, 8, 16, … and `pairs`
        keys: Words = 64
        values: Words = 64
        noise: float = Field(0, ge=0, le=0.95)  # the share of the context's slots that are noise
        noise_words: Words = 16
        space: int = Field(1, ge=1, le=64)  # slots for each question; those without one are filler
        gaps: float | None = Field(None, gt=0, le=1)  # slot i has probability ∝ i^(gaps-1); None: all alike
        filler: Literal["noise", "words"] = "noise"  # or any word except the keys of the sample
        answers: Literal["shown", "hidden"] = "shown"  # hidden: filler stands in place of the answer
        updates: Fraction = 0  # the share of keys that are bound again, after all others: the newest value counts
        key_length: int = Field(1, ge=1, le=8)  # tokens of a key: uniform on 1..key_length
        value_length: int = Field(1, ge=1, le=8)
        grid: bool = False  # keys are all pairs of √n first and √n second words: neither is enough
        levels: int = Field(1, ge=1, le=16)  # the value of a key is the next key, and only the last one is asked for

        def possible(self) -> range:
            keys = min(self.keys**2, MAX_PAIRS) if self.grid else _rows(self.keys, self.key_length) // self.levels
            largest = min(MAX_PAIRS, keys, int(_rows(self.values, self.value_length) / (1 + self.updates)))
            return range(1, largest + 1)

        def test_sizes(self) -> list[int]:
            return self.sizes(
                "test_pairs",
                self.pairs,
                self.possible(),
                self._squares(self.pairs)[1:] or self._squares(self.pairs) or None,
            )

        def _squares(self, most: int) -> list[int]:
            return [side * side for side in range(1, int(most**0.5) + 1)] if self.grid else []

        def training_sizes(self) -> list[int]:
            if self.train_pairs is not None:
                return [self.train_pairs]
            return self._squares(self.pairs) or [*range(1, self.pairs + 1)]

        @model_validator(mode="after")
        def _sensible(self) -> "Recall.Spec":
            for kind, words, length in (("key", self.keys, self.key_length), ("value", self.values, self.value_length)):
                if length * words**length > MAX_CELLS:
                    what = f"less, so that {kind}_length x {kind}s^{kind}_length is at most {MAX_CELLS}"
                    raise self.refuse(f"{kind}_length", what, length)
            if not self.grid and _rows(self.keys, self.key_length) < self.levels:
                raise self.refuse("keys", f"at least levels ({self.levels}), as each chain has as many", self.keys)
            if not self.possible():
                raise self.refuse("values", "at least 2 with updates, as values of a sample differ", self.values)
            if self.pairs > (largest := self.possible()[-1]):
                raise self.refuse("pairs", f"at most {largest}, as there are no more keys or values", self.pairs)
            if self.train_pairs not in (None, *(self._squares(self.pairs) or range(1, self.pairs + 1))):
                what = f"an integer from 1 to pairs ({self.pairs}){', a square' if self.grid else ''}"
                raise self.refuse("train_pairs", what, self.train_pairs)
            longest = max(self.key_length, self.value_length)
            if self.grid and any(int(n**0.5) ** 2 != n for n in self.test_sizes()):
                raise self.refuse("test_pairs", "square numbers with grid=true", self.test_pairs)
            if self.levels > 1 and (self.grid or longest > 1 or self.updates):
                raise self.refuse("levels", "1 with a grid, long keys or values, or updates", self.levels)
            if self.grid and longest > 1:
                raise self.refuse("value_length, key_length", "1 with grid=true", longest)
            if longest > 1 and (self.answers, self.filler) != ("shown", "noise"):
                raise self.refuse("value_length, key_length", "1 with these answers or filler", longest)
            if self.grid and self.filler == "words":
                raise self.refuse("filler", '"noise" with grid=true', self.filler)
            return self

    difficulties: ClassVar[dict[str, dict[str, Any]]] = {
        "recall-zoology": {"pairs": 4, "keys": 4095, "values": 4096, "space": 7, "gaps": 0.01, "filler": "words",
                           "answers": "hidden"},
        "recall-noisy": {"noise": 0.5, "space": 4},
        "recall-fuzzy": {"keys": 8, "values": 8, "key_length": 3, "value_length": 3},
        "recall-forgetting": {"updates": 0.5},
        "recall-grid": {"grid": True},
        "recall-stacked": {"pairs": 8, "levels": 3},
    }  # fmt: skip
    about = "The model reads bindings of keys to values, then keys, and must give the value that is bound to each."
    scales = {
        "pairs": Scale("number of pairs", counted("pair"), trained="train_pairs pairs"),
        "hops": Scale("look-ups from the key to the value", counted("look-up")),
        "bound": Scale("whether the key was bound again", lambda value: f"bound {value}"),
    }

    def __init__(self, spec: Spec) -> None:
        self.spec, self.hidden = spec, spec.answers == "hidden"
        keys = [f"k{i}" for i in range(1, spec.keys + 1)]
        seconds = [f"q{i}" for i in range(1, spec.keys + 1)] if spec.grid else []
        values, noise = (
            [f"{kind}{i}" for i in range(1, n + 1)] for kind, n in (("v", spec.values), ("n", spec.noise_words))
        )
        self.vocab = Vocab(["bos", "ask", *keys, *seconds, *values, *noise], ["bos", "ask"])
        self.words = len(keys + seconds + values)
        self.test_pairs = spec.test_sizes()
        self.some_again = any(map(self.updates, self.test_pairs))
        n, key = max(spec.pairs, *self.test_pairs), 2 if spec.grid else spec.key_length
        bindings, filler = n * spec.levels + self.updates(n), n * (spec.space - 1)
        self.max_len = 2 + (bindings + n) * (key + spec.value_length) + 2 * (self.noise(n) + filler)
        of_key, of_value = "kq" if spec.grid else f"k{{1,{spec.key_length}}}", f"v{{1,{spec.value_length}}}"
        self.slot = re.compile(f"(?P<key>{of_key})({'[kv]' if spec.levels > 1 else of_value})|nn")
        self.filler = "[kv]" if spec.filler == "words" else "n"
        self.question = re.compile(f"(?P<key>{of_key})({self.filler if self.hidden else of_value})")

    def updates(self, n: int) -> int:
        return int(n * self.spec.updates)

    def noise(self, n: int) -> int:
        bindings = n * self.spec.levels + self.updates(n)
        return round(bindings * self.spec.noise / (1 - self.spec.noise))

    def slices(self) -> list[Slice]:
        some_once = any(self.updates(n) < n for n in self.test_pairs)
        slices: list[Slice] = [{"pairs": n} for n in self.test_pairs]
        slices += [{"hops": hops} for hops in range(1, self.spec.levels + 1) if self.spec.levels > 1]
        bound = ["once"] * some_once + ["again"] if self.some_again else []
        slices += [{"bound": each} for each in bound]
        return slices

    def chance(self, slice: Slice) -> float:
        """A guess among the values of all keys; where answers are shown, among those that are not yet one."""
        sizes = [int(slice["pairs"])] if "pairs" in slice else self.test_pairs
        again, bound = [self.updates(n) for n in sizes], slice.get("bound")
        questions = (
            again if bound == "again" else [n - a * (bound == "once") for n, a in zip(sizes, again, strict=True)]
        )
        of_size = [1 / n if self.hidden else sum(1 / left for left in range(1, n + 1)) / n for n in sizes]
        return float(np.average(of_size, weights=questions))

    def explain(self, sample: Sample, query: Query) -> str:
        return sample.meta["why"][sample.queries.index(query)]

    def sampler(self, test: bool) -> Sampler:
        spec, sizes = self.spec, self.test_pairs if test else self.spec.training_sizes()
        slots = np.arange(1.0, 1 + max(sizes) * spec.space * (spec.gaps is not None))
        weights = np.cumsum(
            np.where(slots <= np.array(sizes)[:, None] * spec.space, slots ** ((spec.gaps or 1) - 1), 0), 1
        )
        keys = tables_of_names(spec.keys, spec.key_length, FIRST)
        values = tables_of_names(spec.values, spec.value_length, FIRST + self.words - spec.values)
        again, noise = (np.array([*map(count, sizes)]) for count in (self.updates, self.noise))
        return loop, Tables(
            np.array(sizes), again, noise, weights / weights[:, -1:], spec.space, spec.levels, spec.grid, self.hidden,
            spec.filler == "words", self.words, spec.noise_words, keys, values,
        )  # fmt: skip

    def _loss_on(self, loss_on: str | None) -> str:
        if self.hidden and loss_on == "all":  # targets are not the next tokens
            raise expected("loss_on", '"answer" with recall.answers=hidden', loss_on)
        return super()._loss_on(loss_on)

    def _labelled(self, ids: np.ndarray, facts: Mapping[str, Any], queries: tuple[Query, ...], loss_on: str) -> Sample:
        sample = super()._labelled(ids, facts, queries, loss_on)
        for query, value in zip(queries, facts["answers"], strict=True):
            sample.labels[query.start : query.stop] = value
        return sample

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        spec, text = self.spec, self.vocab.text
        kinds = "".join(self.vocab.name(token)[0] for token in tokens)
        at, noise, pairs = self.vocab.after(tokens, 0, BOS), 0, list[tuple[tuple[int, ...], tuple[int, ...]]]()
        while kinds[at : at + 1] not in ("a", ""):
            if (match := self.slot.match(kinds, at)) is None:
                raise self.vocab.unlike(tokens, at, "a binding, noise or ask")
            if match["key"]:
                pairs.append((tuple(tokens[at : match.end("key")]), tuple(tokens[match.end("key") : match.end()])))
            noise += not match["key"]
            at = match.end()
        at = self.vocab.after(tokens, at, ASK)
        bound = dict(pairs)
        n = len(bound) // spec.levels
        if not n or len({value for _, value in pairs}) < len(pairs):
            raise Malformed(at - 1, "expected bindings before it, to different values")
        for what, counted_, right in (
            ("keys", len(bound), n * spec.levels),
            ("bindings", len(pairs), n * spec.levels + self.updates(n)),
            ("slots of noise", noise, self.noise(n)),
        ):
            if counted_ != right:
                raise Malformed(at - 1, f"expected {right} {what} before it, got {counted_}")
        queries, answers, why = list[Query](), list[tuple[int, ...]](), list[str]()
        for _ in range(n * spec.space):
            match = self.question.match(kinds, at)
            key = tuple(tokens[at : match.end("key")]) if match else ()
            if match is None or key not in bound:
                if re.match(self.filler * 2, kinds[at : at + 2]) is None:
                    raise self.vocab.unlike(
                        tokens, at, f"a question about one of the keys{' or filler' * (spec.space > 1)}"
                    )
                at += 2
                continue
            chain = [key]
            while chain[-1] in bound:
                chain.append(bound[chain[-1]])
            start, at, value = match.end("key"), match.end(), chain[-1]
            if not self.hidden and tuple(tokens[start:at]) != value:
                raise Malformed(start, f"expected {text(value)}, got {text(tokens[start:at])}")
            before = [old for other, old in pairs if other == key][:-1]
            where: Slice = {"pairs": n}
            where |= {"hops": len(chain) - 1} if spec.levels > 1 else {}
            where |= {"bound": "again" if before else "once"} if self.some_again else {}
            queries.append(Query(start, at, where, start - len(key)))
            answers.append(value)
            links = (
                " was bound to ".join(map(text, chain))
                if spec.levels > 1
                else f"{text(key)} was bound to {text(value)}"
            )
            why.append(links + "".join(f", and before to {text(old)}" for old in before))
        if at < len(tokens) or len({*answers}) < n:
            raise Malformed(at, f"expected {n} questions, one about every key, and nothing after them")
        facts = {"n": n, "bindings": {text(key): text(value) for key, value in bound.items()}}
        return {**facts, "answers": answers, "why": why}, tuple(queries)


def _rows(words: int, length: int) -> int:
    """The number of rows of 1 to `length` words."""
    return sum(words**each for each in range(1, length + 1))
