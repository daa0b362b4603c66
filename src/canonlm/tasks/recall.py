"""Recall: which value is bound to this key? MQAR with what makes recall hard: noise, filler, keys that interfere.

    bos  k v  n n  k v  k' v' …  ask  k' v'  n n  k v …        n: noise

n bindings of a key to a value, in slots among noise; then a question about every key, in slots among filler. Keys of
a sample differ, and so do values. The settings are those of Zoology's MQAR and its variants (arXiv 2312.04927).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from canonlm.core.errors import expected
from canonlm.tasks.base import Query, Sample, Sampler, Slice, Task, Vocab, register
from canonlm.tasks.bindings import FIRST, Tables, gaps_of, loop, tables_of_names
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.recall_reader import Reader
from canonlm.tasks.recall_settings import RecallSpec
from canonlm.tasks.tokens import leading


@register("recall")
class Recall(Task):
    """The values of n keys. Loss on the values asked for."""

    Spec: ClassVar[type[RecallSpec]] = RecallSpec
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

    def __init__(self, spec: RecallSpec) -> None:
        self.spec = spec
        keys = [f"k{i}" for i in range(1, spec.keys + 1)]
        seconds = [f"q{i}" for i in range(1, spec.keys + 1)] if spec.grid else []
        values, noise = (
            [f"{kind}{i}" for i in range(1, n + 1)] for kind, n in (("v", spec.values), ("n", spec.noise_words))
        )
        self.vocab = Vocab(["bos", "ask", *keys, *seconds, *values, *noise], ["bos", "ask"])
        self.words = len(keys + seconds + values)
        self.value_tokens = range(FIRST + self.words - spec.values, FIRST + self.words)
        self.test_pairs = spec.test_sizes()
        n, key = max(spec.pairs, *self.test_pairs), 2 if spec.grid else spec.key_length
        bindings, filler = n * spec.levels + spec.rebound(n), n * (spec.space - 1)
        self.max_len = 2 + (bindings + n) * (key + spec.value_length) + 2 * (spec.noise_slots(n) + filler)
        self.reader = Reader(spec, self.vocab)

    def slices(self) -> list[Slice]:
        spec = self.spec
        some_once = any(spec.rebound(n) < n for n in self.test_pairs)
        slices: list[Slice] = [{"pairs": n} for n in self.test_pairs]
        slices += [{"hops": hops} for hops in range(1, spec.levels + 1) if spec.levels > 1]
        bound = ["once"] * some_once + ["again"] if spec.some_again else []
        slices += [{"bound": each} for each in bound]
        return slices

    def chance(self, slice: Slice) -> float:
        """A guess among the values of all keys, of keys that are bound again among the last values of the context;
        where answers are shown, among those that are not yet one."""
        sizes = [int(slice["pairs"])] if "pairs" in slice else self.test_pairs
        again, bound = [self.spec.rebound(n) for n in sizes], slice.get("bound")
        questions = (
            again if bound == "again" else [n - a * (bound == "once") for n, a in zip(sizes, again, strict=True)]
        )
        among = [max(a, 1) for a in again] if bound == "again" else sizes
        right = [1 / n if self.spec.hidden else sum(1 / left for left in range(1, n + 1)) / n for n in among]
        return float(np.average(right, weights=questions))

    def explain(self, sample: Sample, query: Query) -> str:
        return sample.meta["why"][sample.queries.index(query)]

    def sampler(self, test: bool) -> Sampler:
        spec, sizes = self.spec, self.test_pairs if test else self.spec.training_sizes()
        keys = tables_of_names(spec.keys, spec.key_length, FIRST)
        values = tables_of_names(spec.values, spec.value_length, self.value_tokens.start)
        again, noise = (np.array([*map(count, sizes)]) for count in (spec.rebound, spec.noise_slots))
        gaps = gaps_of(tuple(sizes), spec.space, spec.gaps)
        return loop, Tables(
            np.array(sizes), again, noise, gaps, spec.space, spec.levels, spec.grid, spec.hidden,
            spec.filler == "words", self.words, spec.noise_words, keys, values,
        )  # fmt: skip

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        return self.reader.read(tokens)

    def _complete(self, answer: list[Any], length: int) -> list[Any]:
        return leading(answer, self.value_tokens, self.spec.value_length)

    def _loss_on(self, loss_on: str | None) -> str:
        if self.spec.hidden and loss_on == "all":  # targets are not the next tokens
            raise expected("loss_on", '"answer" with recall.answers=hidden', loss_on)
        return super()._loss_on(loss_on)

    def _labelled(self, ids: np.ndarray, facts: Mapping[str, Any], queries: tuple[Query, ...], loss_on: str) -> Sample:
        sample = super()._labelled(ids, facts, queries, loss_on)
        for query, value in zip(queries, facts["answers"], strict=True):
            sample.labels[query.start : query.stop] = value
        return sample
