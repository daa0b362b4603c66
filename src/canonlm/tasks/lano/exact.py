"""Exact distributions that follow from the rules alone, each by one pass from the terminals up to the root.

The distribution of a symbol is an array over lengths: index n stands for "n tokens". That of a row of symbols is the
convolution of theirs, that of a symbol the mean (or the sum) over its alternatives.
"""

from collections.abc import Callable
from functools import reduce

import numpy as np


def extreme_length(rules: tuple, terminals: int, choose: Callable) -> int:
    """The length of the shortest (choose = min) or longest (max) sentence."""
    lengths = [1] * terminals
    for level in reversed(rules):
        lengths = [choose(sum(lengths[child] for child in row) for row in rows) for rows in level]
    return lengths[0]


def derivation_entropy(rules: tuple, terminals: int) -> float:
    """The entropy of a tree in bits: log2 k at a node with k alternatives, plus the mean entropy of its children."""
    bits = [0.0] * terminals
    for level in reversed(rules):
        bits = [np.log2(len(rows)) + sum(bits[child] for row in rows for child in row) / len(rows) for rows in level]
    return float(bits[0])


def length_distribution(rules: tuple, terminals: int) -> np.ndarray:
    """P(n tokens), float64 [longest + 1]; probabilities below 5e-324 are 0."""
    distributions = [np.array([0.0, 1.0])] * terminals
    for level in reversed(rules):
        distributions = [_sum(_row(distributions, row) for row in rows) / len(rows) for rows in level]
    return distributions[0]


def random_strings(rules: tuple, terminals: int) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds for n uniformly random terminals: P(they are a sentence), P(they are the end of one). Float64 [n].

    They are bounds because they count trees, not strings: a string with several trees counts several times. The end of
    a sentence is the part after a cut between two children of one of its nodes.
    """
    sentences = [np.array([0.0, 1.0 / terminals])] * terminals
    ends = [np.zeros(1)] * terminals  # of ends that begin inside the symbol
    for level in reversed(rules):
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
