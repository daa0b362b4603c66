"""The sampler: trees rebuilt by hand, every choice by chi-square, whole sentences by their exact distribution."""

from collections import Counter
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_grammars import rebuild

from canonlm import tasks
from canonlm.tasks.lano import BUILT_IN, Grammar

SPLIT = st.sampled_from(["train", "valid", "test"])
SEED = st.integers(0, 2**63 - 1)
ANY = st.one_of(
    st.sampled_from([Grammar.load(name) for name in BUILT_IN]),
    st.builds(
        Grammar.random,
        st.integers(0, 2**40),
        sizes=st.sampled_from([(1, 2), (1, 3, 2), (1, 2, 5, 4), (1, 2, 2, 3)]),
        lengths=st.sampled_from([(1, 2), (2, 4), (3, 3)]),
        alternatives=st.just((2, 2)),
        repeat_rules=st.just(True),
    ),
)


@given(ANY, SPLIT, SEED, st.integers(0, 2**62), st.integers(0, 2**62))
def test_every_tree_follows_the_rules(grammar, split, seed, index, j):
    tree = grammar.sample(split, seed, index, j)
    for level, symbol, children in rebuild(grammar, tree):
        assert children in grammar.rules[level][symbol]
    assert grammar.min_len <= len(tree.tokens) <= grammar.max_len
    assert (tree.tokens.dtype, tree.labels.dtype, tree.ordinals.dtype, tree.boundaries.dtype) == (
        np.int32, np.int32, np.int32, bool,
    )  # fmt: skip
    assert grammar.contains(tree.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfg3f", "cfg3h", "cfg3e2"])
def test_every_alternative_is_equally_likely(name, fits):
    grammar = Grammar.load(name)
    counts = Counter(node for index in range(300) for node in rebuild(grammar, grammar.sample("train", 1, index)))
    tested = 0
    for level, symbols in enumerate(grammar.rules):
        for symbol, rows in enumerate(symbols):
            observed = [counts.pop((level, symbol, row)) for row in rows]
            if sum(observed) > 5 * len(rows):  # a symbol can be rare
                fits(observed)
                tested += 1
    assert not counts
    assert tested >= 0.9 * sum(grammar.sizes[:-1])


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_sentences_follow_their_exact_distribution(split, documents, fits, tmp_path):
    """All 36 trees of a grammar of three levels, some with the same sentence; choices must not depend on each other."""
    path = tmp_path / "small.txt"
    path.write_text("root = a b | b a a | a\na = 1 2 | 2 2 | 1\nb = 3 | 1 1\n")
    task = tasks.get("lano", grammar=str(path))
    strings = {"a": ["12", "22", "1"], "b": ["3", "11"]}
    distribution = Counter()
    for row in ("ab", "baa", "a"):
        for parts in product(*(strings[symbol] for symbol in row)):
            distribution["".join(parts)] += Fraction(1, 3) * prod(Fraction(1, len(strings[symbol])) for symbol in row)
    assert sum(distribution.values()) == 1
    observed = Counter("".join(map(str, doc[1:])) for doc in documents(task, split, 20_000))
    assert set(observed) == set(distribution)
    fits([observed[string] for string in distribution], [float(p) for p in distribution.values()])
