"""Small grammars, all of their trees by enumeration, and the nodes of one tree from its arrays."""

from fractions import Fraction
from itertools import pairwise, product
from math import prod

import numpy as np
from hypothesis import strategies as st

from canonlm.tasks.lano.grammar import Grammar


def few_trees(grammar, most):
    counts = [1] * grammar.sizes[-1]
    for level in reversed(grammar.rules):
        counts = [sum(prod(counts[child] for child in row) for row in rows) for rows in level]
    return counts[0] <= most


@st.composite
def grammars(draw):
    """Up to three levels of up to three symbols. Rows may repeat a symbol."""
    sizes = (1, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    rules = []
    for size, below in pairwise(sizes):
        row = st.lists(st.integers(0, below - 1), min_size=1, max_size=4 if len(sizes) == 2 else 3).map(tuple)
        rows = st.lists(row, min_size=1, max_size=3, unique=True).map(tuple)
        rules.append(tuple(draw(rows) for _ in range(size)))
    return Grammar("small", sizes, tuple(rules))


SMALL = grammars().filter(lambda grammar: few_trees(grammar, 3000))


def trees(grammar, level=0, symbol=0):
    """Every (string of terminals, probability) below a symbol, one per tree, so a string can occur twice."""
    if level == len(grammar.rules):
        return [((symbol + 1,), Fraction(1))]
    rows = grammar.rules[level][symbol]
    below = {child: trees(grammar, level + 1, child) for row in rows for child in row}
    return [
        (sum((string for string, _ in parts), ()), prod((p for _, p in parts), start=Fraction(1, len(rows))))
        for row in rows
        for parts in product(*(below[child] for child in row))
    ]


def sentences(grammar):
    """{sentence: (number of derivations, probability)}"""
    result = {}
    for string, p in trees(grammar):
        count, total = result.get(string, (0, Fraction(0)))
        result[string] = (count + 1, total + p)
    return result


def rebuild(grammar, tree):
    """[(level, symbol, children)] of every node, from tokens, labels and boundaries; checks that it is one tree."""
    n, depth = len(tree.tokens), len(grammar.sizes) - 1
    assert tree.labels.shape == tree.ordinals.shape == tree.boundaries.shape == (n, depth)
    assert tree.boundaries[-1].all()
    assert tree.boundaries[:-1, 0].sum() == 0  # one root
    nodes, below = [], [(i, i + 1, token - 1) for i, token in enumerate(tree.tokens.tolist())]
    for level in range(depth - 1, -1, -1):
        folder, start = [], 0
        for stop in (np.flatnonzero(tree.boundaries[:, level]) + 1).tolist():
            (symbol,) = {*tree.labels[start:stop, level].tolist()}  # the same above all of its tokens
            assert {*tree.ordinals[start:stop, level].tolist()} == {len(folder)}
            children = [child for a, b, child in below if start <= a < stop]
            assert all(b <= stop for a, b, _ in below if start <= a < stop)  # no child sticks out
            nodes.append((level, symbol, tuple(children)))
            folder.append((start, stop, symbol))
            start = stop
        assert tree.nodes(level) == [(symbol, start, stop) for start, stop, symbol in folder]
        below = folder
    return nodes
