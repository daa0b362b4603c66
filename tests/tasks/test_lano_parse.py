"""Lano's exact answers against all sentences of tiny grammars, enumerated, and against closed forms of large ones."""

import math
from collections import defaultdict
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_grammars import SMALL, rebuild, sentences

from canonlm.tasks.lano.grammar import Grammar
from canonlm.tasks.lano.parse import kl
from canonlm.tasks.lano.spans import SUM_OF_PRODUCTS, find_prefixes, find_spans


def strings(terminals, longest):
    return [s for n in range(1, longest + 1) for s in product(range(1, terminals + 1), repeat=n)]


def check_tree(grammar, tokens, tree):
    """Every node of the tree has the children of one of its symbol's alternatives, and the leaves are the tokens."""
    assert tree.tokens.tolist() == list(tokens)
    assert all(children in grammar.rules[level][symbol] for level, symbol, children in rebuild(grammar, tree))


@given(SMALL)
def test_membership_counts_and_trees_of_every_string(grammar):
    truth = sentences(grammar)
    everything = {*truth, *strings(grammar.sizes[-1], 8 if grammar.sizes[-1] < 3 else 5)}
    for tokens in everything:
        assert grammar.contains(tokens) is (tokens in truth)
    for tokens in [*sorted(truth)[::7], *sorted(everything)[:: len(everything) // 20 + 1]]:
        count, _ = truth.get(tokens, (0, 0))
        assert grammar.count_parses(tokens) == count
        tree = grammar.parse(tokens)
        assert (tree is not None) == (count > 0)
        if tree is not None:
            check_tree(grammar, tokens, tree)


@pytest.mark.slow
@given(SMALL, st.integers(0, 2**32))
def test_substitutions_are_the_hamming_distance_to_the_nearest_sentence(grammar, seed):
    rng = np.random.default_rng(seed)
    of_length = defaultdict(list)
    for text in sentences(grammar):
        of_length[len(text)].append(text)
    for n in range(1, 11):
        for tokens in rng.integers(1, grammar.sizes[-1] + 1, (3, n)):
            distances = (np.array(of_length[n]) != tokens).sum(1) if of_length[n] else [None]
            assert grammar.min_substitutions(tokens) == min(distances)


@given(SMALL, st.data())
def test_next_token_distributions_and_dead_prefixes(grammar, data):
    truth = sentences(grammar)
    weight = defaultdict(Fraction)  # of all sentences with this prefix
    for text, (_, share) in truth.items():
        for i in range(len(text) + 1):
            weight[text[:i]] += share
    assert weight[()] == 1
    texts = data.draw(st.lists(st.sampled_from(sorted(truth)), min_size=1, max_size=3))
    noise = data.draw(st.lists(st.integers(1, grammar.sizes[-1]), max_size=10))
    for text in texts:
        cut = data.draw(st.integers(0, len(text)))
        for tokens in (text, text[:cut], (*text[:cut], *noise)):
            rows = grammar.next_token_probs(tokens)
            assert rows.shape == (len(tokens) + 1, grammar.sizes[-1] + 1)
            alive = [tokens[:i] in weight for i in range(len(tokens) + 1)]
            assert grammar.first_dead(tokens) == (None if all(alive) else alive.index(False) - 1)
            for i, row in enumerate(rows):
                if not alive[i]:
                    assert np.isnan(row).all()
                    continue
                prefix = tokens[:i]
                shares = [truth.get(prefix, (0, Fraction(0)))[1]]
                shares += [weight.get((*prefix, t), Fraction(0)) for t in range(1, grammar.sizes[-1] + 1)]
                np.testing.assert_allclose(row, [float(s / weight[prefix]) for s in shares], rtol=1e-12)
            share = truth.get(tokens, (0, Fraction(0)))[1]
            assert grammar.log_probability(tokens) == pytest.approx(math.log(share) if share else -math.inf, abs=1e-12)


# -- large grammars ---------------------------------------------------------------------------------------------------


def interchangeable(depth, symbols, lengths):
    """One terminal; on each level in between, `symbols` equal symbols with all rows of these lengths."""
    sizes = (1, *[symbols] * (depth - 1), 1)
    rows = [tuple(row for n in lengths for row in product(range(size), repeat=n)) for size in sizes[1:]]
    return Grammar("many", sizes, tuple((rows[level],) * sizes[level] for level in range(depth)))


@pytest.mark.parametrize("depth", [7, 11])  # 2^126; 2^2046, which overflows a double
def test_more_than_2_to_the_64_parses(depth):
    """Full binary trees: every node but the root and the leaves is one of two symbols."""
    grammar = interchangeable(depth, 2, (2,))
    assert grammar.count_parses([1] * 2**depth) == 2 ** (2**depth - 2)
    assert grammar.contains([1] * 2**depth)


def test_counts_around_2_to_the_53_and_far_above():
    """The number of trees with n leaves is the coefficient of x^n in a polynomial composed with itself."""
    grammar = interchangeable(4, 3, (2, 3))
    trees = np.array([0, 1], object)  # by number of leaves
    for symbols in (1, 3, 3, 3):  # that a child can be
        pairs = np.convolve(symbols * trees, symbols * trees)
        trees = np.convolve(pairs, symbols * trees)
        trees[: len(pairs)] += pairs
    lengths = [*range(27, 38, 2), 60]
    expected = [int(trees[n]) for n in lengths]
    doubtful = [count for count in expected if count != int(float(count))]
    assert expected[0] < 2**53 < min(doubtful) < 2**60
    assert max(expected) > 2**64
    assert [grammar.count_parses([1] * n) for n in lengths] == expected


def test_substitutions_of_far_strings():
    """cfg3b with random tokens, against min-plus products of full matrices."""
    grammar, n = Grammar.load("cfg3b"), 150
    tokens = np.random.default_rng(5).integers(1, 4, n)
    costs = np.full((3, n + 1, n + 1), np.inf)
    for t in range(3):
        costs[t, range(n), range(1, n + 1)] = tokens != t + 1
    for level in reversed(grammar.rules):
        folder = []
        for rows in level:
            best = np.full((n + 1, n + 1), np.inf)
            for row in rows:
                total = costs[row[0]]
                for child in row[1:]:
                    total = np.stack([(total[i][:, None] + costs[child]).min(0) for i in range(n + 1)])
                best = np.minimum(best, total)
            folder.append(best)
        costs = folder
    assert costs[0][0, n] > 20
    assert grammar.min_substitutions(tokens) == costs[0][0, n]


@pytest.mark.parametrize(("alternatives", "token"), [(1, 1), (64, 2)], ids=["certain", "rare"])
def test_distributions_survive_where_doubles_underflow(alternatives, token):
    """1024 tokens of probability 1 or 1/64 each, before or after 1024 tokens of probability 1/8."""
    biased = ((0,),) if alternatives == 1 else ((0,), (1,), *((i,) for i in range(10, 8 + alternatives)))
    uniform = tuple((i,) for i in range(2, 10))
    names = tuple(((i if i < 10 else 0,),) for i in range(8 + max(alternatives, 2)))  # those from 10 on: terminal 1
    halves = [(((0, 0),), ((1, 1),))] * 10
    grammar = Grammar(
        "stretches",
        (1, *[2] * 11, len(names), 10),
        ((((0, 1), (1, 0)),), *halves, (biased, uniform), names),
    )
    stretches = {alternatives: [token] * 1024, 8: (np.arange(1024) % 8 + 3).tolist()}
    for order in ([alternatives, 8], [8, alternatives]):
        tokens = stretches[order[0]] + stretches[order[1]]
        rows = grammar.next_token_probs(tokens)
        np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-12)
        for stretch, alike in enumerate(order):
            inside = np.arange(1, 1024) + 1024 * stretch  # the first token of all chooses the order
            np.testing.assert_allclose(rows[inside, np.array(tokens)[inside]], 1 / alike, rtol=1e-9)
        exact = -math.log(2) - 1024 * math.log(8 * alternatives)
        assert grammar.log_probability(tokens) == pytest.approx(exact, rel=1e-11)


def test_memory_stays_small():
    """The arrays for long sentences of the grammars with the longest ones; the original's took 1.3 to 3.9 GB."""
    for name in ("cfg3j", "cfg3k"):
        grammar = Grammar.load(name)
        tokens = max((grammar.sample("test", 0, i).tokens for i in range(50)), key=len).astype(np.int32) - np.int32(1)
        flat = grammar.flat
        weights = 1 / np.maximum(np.diff(flat.rules), 1)
        spans = find_spans(flat, tokens, weights, np.full(len(tokens), 2.2), SUM_OF_PRODUCTS)
        prefixes = find_prefixes(flat, spans, weights, len(tokens))
        assert len(tokens) > 650
        assert sum(array.nbytes for array in (*spans, prefixes)) < 5e6


# -- the released grammars --------------------------------------------------------------------------------------------

# Of the original release's sampler, by an independent program: nats per token (-ln P / tokens), share of sentences with
# more than one parse, sentences.
RELEASED = {
    "cfg3b": (0.424604, 0.0, 150),
    "cfg3i": (0.415214, 0.826667, 150),
    "cfg3h": (0.597935, 0.153333, 150),
    "cfg3g": (0.735087, 0.833333, 150),
    "cfg3f": (0.743725, 0.44, 200),
    "cfg3e1": (0.754887, 0.0, 80),
    "cfg3e2": (0.721884, 0.0, 80),
    "cfg3j": (0.786738, 0.4, 40),
    "cfg3k": (0.813702, 0.8, 40),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", RELEASED)
def test_floors_and_ambiguity_of_the_released_grammars(name):
    grammar, draws = Grammar.load(name), 300
    trees = [grammar.sample("test", 1, i) for i in range(draws)]
    assert all(grammar.contains(tree.tokens) for tree in trees)
    lengths = np.array([len(tree.tokens) for tree in trees])
    nats = -np.array([grammar.log_probability(tree.tokens) for tree in trees])
    ambiguous = np.mean([grammar.count_parses(tree.tokens) > 1 for tree in trees])
    floor, share, theirs = RELEASED[name]
    both = math.sqrt(1 / draws + 1 / theirs)
    error = np.std(nats - floor * lengths) / lengths.mean() * both
    assert nats.sum() / lengths.sum() == pytest.approx(floor, abs=4 * error)
    assert error < 0.006
    assert ambiguous == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share)) * both)
    check_tree(grammar, trees[0].tokens.tolist(), grammar.parse(trees[0].tokens))


@pytest.mark.parametrize("name", ["cfg3f", "cfg3k"])
def test_rows_are_distributions_and_a_few_wrong_tokens_are_counted(name):
    grammar, rng = Grammar.load(name), np.random.default_rng(3)
    for i in range(5):
        tokens = grammar.sample("valid", 2, i).tokens
        np.testing.assert_allclose(grammar.next_token_probs(tokens).sum(1), 1, rtol=1e-13)
        assert grammar.first_dead(tokens) is None
        assert grammar.min_substitutions(tokens) == 0
        wrong = tokens.copy()
        at = rng.choice(len(tokens), 3, replace=False)
        wrong[at] = wrong[at] % 3 + 1
        distance = grammar.min_substitutions(wrong)
        assert (distance > 0) == (not grammar.contains(wrong))
        assert distance <= 3
        dead = grammar.first_dead(wrong)
        assert dead is None or dead >= at.min()


# -- invalid sequences ------------------------------------------------------------------------------------------------

NOT_TOKENS = [
    *(None, 3, "123", b"\1\2", {1, 2}, {1: 2}, iter([1, 2]), object()),
    *([], [[1, 2]], [[1], [2, 3]], [1.0, 2.0], [True, True], [1, True], [0, 1], [1, 4], [-1], [2**70], ["1"], [None]),
    *(np.ones(4), np.ones(3, bool), np.ones((2, 2), int)),
]


@pytest.mark.parametrize("tokens", NOT_TOKENS)
def test_invalid_sequences_of_terminals(tokens):
    grammar = Grammar.load("cfg3b")
    assert grammar.contains(tokens) is False
    if isinstance(tokens, list) and not tokens:
        return  # the empty sequence: see below
    for question in ("count_parses", "parse", "min_substitutions", "next_token_probs", "log_probability", "first_dead"):
        with pytest.raises(ValueError, match=r"^tokens.*: expected .*terminal.*3, got [^\n]*$"):
            getattr(grammar, question)(tokens)


def test_the_empty_sequence_is_a_prefix_but_not_a_sentence():
    grammar = Grammar.load("cfg3b")
    assert grammar.count_parses([]) == 0
    assert grammar.parse([]) is None
    assert grammar.min_substitutions([]) is None
    assert grammar.first_dead([]) is None
    assert grammar.log_probability([]) == -math.inf
    np.testing.assert_allclose(grammar.next_token_probs([])[:, 1:].sum(), 1)


def test_the_first_wrong_token_is_named():
    with pytest.raises(ValueError, match=r"^tokens\[2\]: expected a terminal from 1 to 3, got 9$"):
        Grammar.load("cfg3b").count_parses([1, 2, 9, 0])


def test_sequences_of_every_kind():
    grammar = Grammar.load("cfg3b")
    tokens = grammar.sample("test", 0, 0).tokens
    for same in (tokens.tolist(), tuple(tokens.tolist()), tokens.astype(np.uint8), [np.int64(t) for t in tokens]):
        assert grammar.contains(same)


# -- the divergence of two distributions ------------------------------------------------------------------------------


def test_kl_by_hand():
    sure, even = np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]])
    assert kl(even, even) == 0
    # Both rows grow to 1.00002 in sum, which cancels.
    assert kl(sure, even) == pytest.approx(math.log(1.00001 / 0.50001), abs=1e-12)
    assert kl(even, sure) == pytest.approx(
        0.5 * math.log(0.50001 / 1.00001) + 0.5 * math.log(0.50001 / 1e-5), abs=1e-12
    )
    # One certain mistake among four rows, in the smoothing's own size.
    true = np.eye(4)
    model = np.eye(4)
    model[3] = [1, 0, 0, 0]
    assert kl(true, model) == pytest.approx([0, 0, 0, math.log(1.00001 / 1e-5)], abs=1e-12)
    assert kl(sure, even, smoothing=1.0) == pytest.approx(math.log(2 / 1.5), abs=1e-12)


def test_kl_of_a_row_does_not_depend_on_the_others():
    true, model = np.random.default_rng(0).dirichlet(np.ones(7), (2, 50))
    parts = [kl(true[i:j], model[i:j]) for i, j in ((0, 1), (1, 18), (18, 50))]
    np.testing.assert_array_equal(np.concatenate(parts), kl(true, model))
