"""Exact distributions that follow from the rules alone, each by one pass from the terminals up to the root.

The distribution of a symbol is an array over lengths: index n stands for "n tokens". That of a row of symbols is the
convolution of theirs, that of a symbol the mean (or the sum) over its alternatives.
"""

from collections.abc import Callable
from functools import cached_property, reduce

import numpy as np


class Distributions:
    """The base of `Grammar` with these distributions, and its `sizes` and `rules`."""

    sizes: tuple[int, ...]
    rules: tuple

    @cached_property
    def min_len(self) -> int:
        """Tokens in the shortest sentence."""
        return self._extreme_length(min)

    @cached_property
    def max_len(self) -> int:
        """Tokens in the longest sentence."""
        return self._extreme_length(max)

    def _extreme_length(self, choose: Callable) -> int:
        lengths = [1] * self.sizes[-1]
        for level in reversed(self.rules):
            lengths = [choose(sum(lengths[child] for child in row) for row in rows) for rows in level]
        return lengths[0]

    @cached_property
    def length_distribution(self) -> np.ndarray:
        """P(a sentence has n tokens), float64 [max_len + 1]; probabilities below 5e-324 are 0."""
        distributions = [np.array([0.0, 1.0])] * self.sizes[-1]
        for level in reversed(self.rules):
            distributions = [_sum(_row(distributions, row) for row in rows) / len(rows) for rows in level]
        return distributions[0]

    @property
    def mean_len(self) -> float:
        return float(self.length_distribution @ np.arange(self.max_len + 1))

    @property
    def sd_len(self) -> float:
        return float(np.sqrt(self.length_distribution @ (np.arange(self.max_len + 1) - self.mean_len) ** 2))

    def longer_than(self, n: int) -> float:
        """P(a sentence has more than n tokens)."""
        return float(self.length_distribution[max(n + 1, 0) :].sum())

    @cached_property
    def derivation_entropy(self) -> float:
        """Entropy of the tree of a sentence, in bits: log2 k at a node with k alternatives, plus the mean entropy of
        its children. That of the sentence itself only where all parses are unique."""
        bits = [0.0] * self.sizes[-1]
        for level in reversed(self.rules):
            bits = [
                np.log2(len(rows)) + sum(bits[child] for row in rows for child in row) / len(rows) for rows in level
            ]
        return float(bits[0])

    @cached_property
    def random_strings(self) -> tuple[np.ndarray, np.ndarray]:
        """Upper bounds for n uniformly random terminals: P(they are a sentence), P(they are the end of one). Float64
        [n].

        They are bounds because they count trees, not strings: a string with several trees counts several times. The end
        of a sentence is the part after a cut between two children of one of its nodes.
        """
        sentences = [np.array([0.0, 1.0 / self.sizes[-1]])] * self.sizes[-1]
        ends = [np.zeros(1)] * self.sizes[-1]  # of ends that begin inside the symbol
        for level in reversed(self.rules):
            inside = []
            for rows in level:
                parts = []
                for row in rows:
                    after = np.ones(1)  # the children to the right of `child`
                    for i, child in reversed([*enumerate(row)]):
                        parts.append(np.convolve(ends[child], after))
                        after = np.convolve(sentences[child], after)
                        if i:
                            parts.append(after)
                inside.append(_sum(parts))
            sentences, ends = [_sum(_row(sentences, row) for row in rows) for rows in level], inside
        return sentences[0], ends[0]


def _row(distributions: list[np.ndarray], row: tuple[int, ...]) -> np.ndarray:
    return reduce(np.convolve, (distributions[child] for child in row))


def _sum(arrays) -> np.ndarray:
    arrays = list(arrays)
    total = np.zeros(max(map(len, arrays)))
    for array in arrays:
        total[: len(array)] += array
    return total
