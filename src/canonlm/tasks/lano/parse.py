"""Exact parsing of a token sequence: whether it is a sentence, its number of trees, one of its trees, its number of
wrong tokens, and the probabilities of the next token.

`tokens` is a flat sequence or array of terminals 1 … T. For anything else `contains` returns False, and the other
methods raise a one-line ValueError. The empty sequence is not a sentence, but a prefix of all of them.
"""

from functools import cached_property, reduce
from operator import or_
from typing import Any

import numpy as np

from canonlm.core.errors import expected
from canonlm.tasks.lano.sampling import Derivation
from canonlm.tasks.lano.spans import SUM_OF_PRODUCTS, Flat, Spans, find_prefixes, find_spans, flatten


class Parsing:
    """The base of `Grammar` that parses, with its `sizes` and `rules`."""

    sizes: tuple[int, ...]
    rules: tuple

    @cached_property
    def flat(self) -> Flat:
        return flatten(self.sizes, self.rules)

    def contains(self, tokens: Any) -> bool:
        """Whether `tokens` is a sentence. False, never an exception, for anything but a sequence of terminals."""
        try:
            ids = self._read(tokens)
        except ValueError:
            return False
        return bool(self._count(ids, float))

    def count_parses(self, tokens: Any) -> int:
        """The exact number of trees with these leaves; 0 if it is not a sentence.

        Doubles count exactly below 2**53, and no sum or product on the way to the root exceeds the result. So a result
        below 2**53 is exact. Otherwise the same function counts again with Python's integers.
        """
        ids = self._read(tokens)
        count = self._count(ids, float)
        return int(count if count < 2**53 else self._count(ids, object))

    def parse(self, tokens: Any) -> Derivation | None:
        """One tree with these leaves, or None: labels and ordinals per token and level, as `grammar.sample` returns
        them.

        The choice among several trees is fixed: every node, from the root down, takes its first alternative that fits.
        """
        ids = self._read(tokens)
        if not self._lengths >> len(ids) & 1:
            return None
        flat = self.flat
        spans = find_spans(flat, ids, np.ones(len(flat.rules) - 1), np.ones(len(ids)), SUM_OF_PRODUCTS)
        if len(ids) not in _ends(spans, 0, 0):
            return None
        depth, above = len(self.sizes) - 1, 0
        labels, ordinals = np.empty((len(ids), depth), np.int32), np.empty((len(ids), depth), np.int32)
        nodes = [(0, 0, len(ids))]
        for level in range(depth):
            for ordinal, (symbol, start, end) in enumerate(nodes):
                labels[start:end, level] = symbol - above
                ordinals[start:end, level] = ordinal
            nodes = [child for node in nodes for child in _children(flat, spans, *node)]
            above += self.sizes[level]
        return Derivation(ids + np.int32(1), labels, ordinals)

    def min_substitutions(self, tokens: Any) -> int | None:
        """The min number of tokens to replace to make this a sentence; None if no sentence has its length.

        Insertions and deletions are not considered. Spans with more wrong tokens than a limit are left out, which
        changes no answer up to the limit. Most sequences are nearly right, and have few spans then.
        """
        ids = self._read(tokens)
        if not self._lengths >> len(ids) & 1:
            return None
        flat = self.flat
        free = np.zeros(len(flat.rules) - 1, np.int32), np.zeros(len(ids), np.int32)
        for limit in (1, 4, len(ids)):
            ends, costs = _root(find_spans(flat, ids, *free, limit))
            if len(ids) in ends:
                return int(costs[ends == len(ids)][0])
        raise AssertionError("a sentence of this length exists")

    def next_token_probs(self, tokens: Any) -> np.ndarray:
        """Row i: the probabilities of what follows tokens[:i]. float64 [n + 1, T + 1], columns end, 1, …, T; rows sum
        to 1.

        Row 0 is before any token, row n after all of them. The tokens may be any beginning of a sentence. Where they
        stop being one, nothing has a probability: the rows after the first dead token are NaN (see `first_dead`).

        The method is that of arXiv 2305.13673, in doubles instead of 100 digits: rows are ratios, so every token may
        have any factor. The factors start as T. If the weights still drift out of range, the tokens up to that point
        take the inverse of their probability, which keeps all their prefixes at weight 1, the others take the geometric
        mean of those, and the dynamic program runs again. A token of probability below 1e-160 may count as dead.
        """
        ids = self._read(tokens)
        flat = self.flat
        rule_values = 1 / np.maximum(np.diff(flat.rules), 1)
        factors = np.full(len(ids), float(flat.terminals))
        for _ in range(len(ids) + 1):  # usually one run; each gets further than the one before
            spans = find_spans(flat, ids, rule_values, factors, SUM_OF_PRODUCTS)
            rows = np.zeros((len(ids) + 1, flat.terminals + 1))
            rows[:, 1:] = find_prefixes(flat, spans, rule_values, len(ids))[-flat.terminals :].T
            ends, values = _root(spans)
            rows[ends, 0] = values
            with np.errstate(over="ignore", invalid="ignore"):
                totals = rows.sum(1)  # of the weights of all sentences that begin with tokens[:i]
                rows /= totals[:, None]
            out_of_range = np.flatnonzero((totals > 0) & ((totals < 1e-140) | (totals > 1e140)))
            if not len(out_of_range):
                return rows
            known = out_of_range[0] - 1  # the number of tokens that have a probability
            factors[:known] = 1 / rows[np.arange(known), 1 + ids[:known]]
            factors[known:] = np.exp(np.log(factors[:known]).mean())
        raise ValueError(f"tokens[{known}] is too improbable for double precision")

    def log_probability(self, tokens: Any) -> float:
        """ln P(a drawn sentence is this one), in nats; -inf if it is not a sentence."""
        ids = self._read(tokens)
        rows = self.next_token_probs(tokens)
        with np.errstate(divide="ignore"):
            total = np.log(rows[np.arange(len(ids)), 1 + ids]).sum() + np.log(rows[-1, 0])
        return float(np.nan_to_num(total, nan=-np.inf, neginf=-np.inf))

    def first_dead(self, tokens: Any) -> int | None:
        """The first i such that no sentence begins with tokens[: i + 1]; None if one begins with all of them."""
        dead = np.flatnonzero(np.isnan(self.next_token_probs(tokens)[:, 0]))
        return int(dead[0]) - 1 if len(dead) else None

    def _read(self, tokens: Any) -> np.ndarray:
        """The terminals as int32, from 0. ValueError for anything but a flat sequence of terminals."""
        terminals = self.sizes[-1]
        try:
            array = np.asarray(tokens)
        except (TypeError, ValueError, RuntimeError):  # ragged, or a tensor that cannot become an array
            array = np.asarray(None)
        mixed = isinstance(tokens, list | tuple) and not {bool, np.bool_}.isdisjoint(map(type, tokens))
        if array.ndim != 1 or mixed or (array.size and array.dtype.kind not in "iu"):
            raise expected("tokens", f"a flat sequence of terminals 1 to {terminals}", type(tokens).__name__)
        wrong = np.flatnonzero((array < 1) | (array > terminals))
        if len(wrong):
            raise expected(f"tokens[{wrong[0]}]", f"a terminal from 1 to {terminals}", int(array[wrong[0]]))
        return array.astype(np.int32) - np.int32(1)

    @cached_property
    def _lengths(self) -> int:
        """The lengths of sentences as a bit set: bit n stands for n tokens."""
        lengths = [2] * self.sizes[-1]
        for level in reversed(self.rules):
            lengths = [reduce(or_, (reduce(_sums, (lengths[i] for i in row)) for row in rows)) for rows in level]
        return lengths[0]

    def _count(self, ids: np.ndarray, kind: type) -> Any:
        """The number of trees, computed in numbers of this kind: `float` (compiled) or `object` (Python's integers)."""
        if not self._lengths >> len(ids) & 1:
            return 0
        flat = self.flat
        find = find_spans if kind is float else find_spans.py_func
        one = 1.0 if kind is float else 1
        spans = find(flat, ids, np.full(len(flat.rules) - 1, one, kind), np.full(len(ids), one, kind), SUM_OF_PRODUCTS)
        ends, counts = _root(spans)
        return counts[ends == len(ids)].sum()


def kl(true: np.ndarray, model: np.ndarray, smoothing: float = 1e-5) -> np.ndarray:
    """The divergence of a model's next-token distributions from the true ones in each row, in nats: float64 [rows].
    Both are [rows, T + 1], and rows sum to 1.

    Both are smoothed (`smoothing` added to every entry, rows rescaled). The result is
    sum_t true_t (ln smoothed true_t - ln smoothed model_t), whose mean over rows the original release's demo takes.
    Small negative values are possible, because the weights are not smoothed.
    """
    logs = [np.log((rows + smoothing) / (rows + smoothing).sum(1, keepdims=True)) for rows in (true, model)]
    return (true * (logs[0] - logs[1])).sum(1)


def _sums(left: int, right: int) -> int:
    """The bit set of all sums of a length in `left` and one in `right`."""
    sums = 0
    while right:
        lowest = right & -right
        sums |= left << (lowest.bit_length() - 1)
        right ^= lowest
    return sums


def _root(spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the sentences that begin at the first token, and their values."""
    part = slice(spans.first[0, 0], spans.stop[0, 0])
    return spans.ends[part], spans.values[part]


def _ends(spans: Spans, symbol: int, start: int) -> set[int]:
    return set(spans.ends[spans.first[symbol, start] : spans.stop[symbol, start]].tolist())


def _children(flat: Flat, spans: Spans, symbol: int, start: int, end: int) -> list[tuple[int, int, int]]:
    """The children (symbol, start, end) of a node of the tree."""
    for rule in range(flat.rules[symbol], flat.rules[symbol + 1]):
        row = flat.children[flat.parts[rule] : flat.parts[rule + 1]].tolist()
        cuts = [{start}]  # where each child can start
        for child in row:
            cuts.append({stop for cut in cuts[-1] for stop in _ends(spans, child, cut)})
        if end not in cuts.pop():
            continue
        children = []
        for child, starts in zip(reversed(row), reversed(cuts), strict=True):
            cut = min(cut for cut in starts if end in _ends(spans, child, cut))
            children.append((child, cut, end))
            end = cut
        return children[::-1]
    raise AssertionError("no children for a span")
