"""Depo: the released format by an independent reader (in original ids), and every distribution of the sampler.

Reference means: measured on 20 000 training and 5 000 test samples of the original generator (mean, standard error).
"""

import random
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from canonlm import tasks
from canonlm.tasks.depo import test_hops as hops_of

REFERENCE = {  # length in tokens: (mean, standard error) in training, the same in test
    "depo1-225": ((284.1251, 1.56183), (859.361, 0.04311)),
    "depo1-300": ((358.5569, 2.09816), (1158.2724, 0.02765)),
    "depo1-375": ((437.4049, 2.69434), (1458.3968, 0.02241)),
    "depo2-75": ((459.3537, 1.86599), (1043.9562, 0.2252)),
    "depo2-100": ((551.4452, 2.42166), (1345.5518, 0.24766)),
    "depo2-125": ((640.1463, 2.98566), (1648.0454, 0.26959)),
}


def parse(ids, m):
    """(edges, queries) of a sample in original ids; edges and queries hold names as tuples."""

    def name(at):
        stop = at
        while ids[stop] <= m:
            stop += 1
        assert m < ids[stop] <= 2 * m
        return tuple(ids[at : stop + 1]), stop + 1

    assert ids[0] == 9999
    at, edges, queries = 1, [], []
    while at < len(ids) and ids[at] < 9000:
        source, at = name(at)
        target, at = name(at)
        edges.append((source, target))
    while at < len(ids):
        k = ids[at] - 9000
        start, at = name(at + 1)
        assert ids[at] == 9500
        answer, at = name(at + 1)
        queries.append((k, start, answer))
    return edges, queries


def parsed(task, docs):
    return [parse(task.original_ids[doc].tolist(), task.spec.name_vocab) for doc in docs]


@st.composite
def specs(draw):
    m, low = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    high = draw(st.integers(low, 5))
    available = sum(m**length for length in range(low, high + 1))
    if available < 3 or (high - low + 1) * m**high > 50_000:
        m, low, high, available = 8, 1, 1, 8
    sizes = {"name_vocab": m, "min_name_len": low, "max_name_len": high}
    largest = min(available, 80)
    N = draw(st.integers(3, largest))
    K = draw(st.integers(1, min(N - 1, 40)))
    lengths = draw(st.none() | st.lists(st.integers(K + 1, largest), min_size=1, max_size=3, unique=True))
    return {"N": N, "test_lengths": lengths, "K": K, "M": draw(st.integers(1, 12)), **sizes}


@given(specs(), st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_sample_parses_back(spec, split, seed):
    task = tasks.get("depo", **spec)
    sample = task.sample(split, seed, 0)
    original = task.to_original(sample)
    edges, queries = parse(original, task.spec.name_vocab)
    successor = dict(edges)
    n = len(edges)
    lengths = task.spec.test_lengths
    assert n in (lengths or [task.spec.N]) if split == "test" else 3 <= n <= task.spec.N
    assert sample.meta["n"] == n == len(successor)
    name, seen = edges[0][0], set()
    while name not in seen:
        seen.add(name)
        name = successor[name]
    assert len(seen) == n  # one cycle through all names
    assert all(task.spec.min_name_len <= len(name) <= task.spec.max_name_len for name in seen)
    assert len(queries) == len({start for _, start, _ in queries}) == min(n, task.spec.M)
    for k, start, answer in queries:
        assert k in hops_of(task.spec.K) if split == "test" else 1 <= k <= task.spec.K
        for _ in range(k):
            start = successor[start]
        assert start == answer
    of_length = {"n": n} if lengths else {}
    assert [query.slice for query in sample.queries] == [{"k": k, **of_length} for k, _, _ in queries]
    for query, (_, _, answer) in zip(sample.queries, queries, strict=True):
        assert tuple(original[query.start : query.stop]) == answer
        assert original[query.question_start] > 9000
    again = task.from_original(original)
    np.testing.assert_array_equal(again.tokens, sample.tokens)
    np.testing.assert_array_equal(again.labels, sample.labels)
    assert again.meta == sample.meta


def test_by_hand():
    """Names 2.51, 7, 60 in original ids: 2.51 -> 60 -> 57 -> 2.51 (m = 50; a name ends with a token above 50)."""
    task = tasks.get("depo")
    ids = [9999, 60, 57, 2, 51, 60, 57, 2, 51, 9001, 57, 9500, 2, 51, 9005, 2, 51, 9500, 57]
    sample = task.from_original(ids)
    assert task.vocab.show(sample) == "bos w10. w7. w2 w1. w10. w7. w2 w1. q1 w7. ans w2 w1. q5 w2 w1. ans w7."
    assert sample.meta["n"] == 3
    assert sample.meta["cycle"] == ("w10.", "w7.", "w2 w1.")
    assert [(q.start, q.stop, q.slice) for q in sample.queries] == [(12, 14, {"k": 1}), (18, 19, {"k": 5})]
    assert np.flatnonzero(sample.labels != -100).tolist() == [11, 12, 13, 17, 18]
    assert task.to_original(sample) == ids


def test_longer_rings_in_the_test(fits):
    """Each length equally often; chance is that of guessing, pooled over the questions."""
    task = tasks.get("depo", N=4, K=2, M=6, name_vocab=12, max_name_len=1, test_lengths=["x1", "x1.5", "x2"])
    assert task.slices() == [{"k": 1}, {"k": 2}, {"n": 4}, {"n": 6}, {"n": 8}]
    samples = [task.sample("test", 0, index) for index in range(600)]
    counts = Counter(sample.meta["n"] for sample in samples)
    fits(np.array([counts[4], counts[6], counts[8]]))
    assert task.chance({"n": 8}) == 1 / 7
    assert task.chance({"k": 1}) == pytest.approx((4 / 3 + 6 / 5 + 6 / 7) / 16)
    assert max(len(sample.tokens) for sample in samples) == task.max_len
    assert all(sample.meta["n"] <= 4 for sample in (task.sample("train", 0, index) for index in range(100)))


@pytest.mark.parametrize(("lengths", "most"), [([3, 13], 12), (["x4"], 12), ([2], 12), ([], 12)])
def test_lengths_that_the_test_cannot_have(lengths, most):
    what = rf"^depo\.test_lengths: expected different integers from 3 to {most}, or multiples of 4 such as x1\.5, got"
    with pytest.raises(ValueError, match=what):
        tasks.get("depo", N=4, K=2, name_vocab=12, max_name_len=1, test_lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize(("difficulty", "mean"), [("depo1-225", 70.10), ("depo2-75", 27.48)])
def test_cycle_length_distribution(difficulty, mean, documents, fits):
    task = tasks.get("depo", difficulty=difficulty)
    N, K = task.spec.N, task.spec.K
    first_final = 2 + K + task.spec.name_vocab
    docs = documents(task, "train", 20_000)
    queries = np.array([sum(2 <= t < 2 + K for t in doc) for doc in docs])
    finals = np.array([sum(t >= first_final for t in doc) for doc in docs])
    n = (finals - 2 * queries) // 2  # a name has one final token; a query names two
    distribution = np.array([1 / (n + N**0.5) for n in range(3, N + 1)])
    distribution /= distribution.sum()
    assert distribution @ np.arange(3, N + 1) == pytest.approx(mean, abs=0.005)
    fits(np.bincount(n, minlength=N + 1)[3:], distribution)
    assert (queries == np.minimum(n, 10)).all()
    ks = np.concatenate([[t - 1 for t in doc if 2 <= t < 2 + K] for doc in docs])
    fits(np.bincount(ks.astype(int), minlength=K + 1)[1:])


@pytest.mark.parametrize(
    ("K", "probabilities"),
    [
        (1, {1: 1}),
        (3, {1: 1, 2: 1, 3: 1}),
        (8, {1: 1, 2: 1, 4: 1, 8: 1}),
        (16, {1: 1, 2: 1, 4: 1, 8: 1, 16: 1}),
        (24, {1: 1, 2: 1, 4: 1, 8: 1, 16: 1, 24: 1}),
        (32, {1: 1, 2: 1, 4: 1, 8: 1, 16: 1, 24: 1, 32: 2}),  # the release lists 32 twice
    ],
)
def test_distribution_of_k_in_the_test_split(K, probabilities, documents, fits):
    task = tasks.get("depo", N=K + 9, K=K)
    ks = Counter(t - 1 for doc in documents(task, "test", 2000) for t in doc if 2 <= t < 2 + K)
    assert set(ks) == set(probabilities)
    assert task.slices() == [{"k": k} for k in probabilities]
    if len(probabilities) > 1:
        fits([ks[k] for k in probabilities], np.array(list(probabilities.values())) / sum(probabilities.values()))


def test_training_on_one_number_of_hops(documents):
    task = tasks.get("depo", N=12, K=8, train_k=8)
    questions = {split: Counter(t - 1 for doc in documents(task, split, 300) for t in doc if 2 <= t < 10)
             for split in ("train", "valid", "test")}  # fmt: skip
    assert set(questions["train"]) == set(questions["valid"]) == {8}
    assert set(questions["test"]) == {1, 2, 4, 8}


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", sorted(REFERENCE))
def test_mean_lengths(difficulty, documents):
    task = tasks.get("depo", difficulty=difficulty)
    for split, count, (mean, error) in zip(("train", "test"), (12_000, 1500), REFERENCE[difficulty], strict=True):
        lengths = [len(doc) for doc in documents(task, split, count)]
        ours = np.std(lengths) / np.sqrt(count)
        assert abs(np.mean(lengths) - mean) < 4 * np.hypot(ours, error), (split, np.mean(lengths))
        assert max(lengths) <= task.max_len < 2048


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_chance_is_the_likeliest_answer_over_all_rings(n):
    """Given the name in the question, over the (n - 1)! rings."""
    task = tasks.get("depo", N=n, K=n - 1)
    for where in task.slices():
        answers = Counter()
        for rest in permutations(range(1, n)):
            ring = (0, *rest)
            answers[ring[where["k"] % n]] += 1
        assert task.chance(where) == pytest.approx(max(answers.values()) / answers.total())


def test_short_names_saturate(documents):
    """n = 225 of (50, 1-2): 21.626 % one-token names (5 000 reference samples), not the 50 % of independent lengths."""
    task = tasks.get("depo")
    shares = [np.mean([len(s) == 1 for s, _ in edges]) for edges, _ in parsed(task, documents(task, "test", 1500))]
    assert np.mean(shares) == pytest.approx(0.21626, abs=4 * np.std(shares) * np.sqrt(1 / 1500 + 1 / 5000))


@pytest.mark.slow
def test_names_are_drawn_one_by_one_without_duplicates(documents):
    """Against a simulation: draw a name (length, then tokens) until there are enough different ones."""
    task = tasks.get("depo", N=4, K=3, name_vocab=2, min_name_len=1, max_name_len=3, M=1)
    rng = random.Random(0)

    def simulated():
        drawn = set()
        while len(drawn) < 4:
            drawn.add(tuple(rng.randint(1, 2) for _ in range(rng.randint(1, 3))))
        return tuple(sorted((*name[:-1], name[-1] + 2) for name in drawn))

    expected = Counter(simulated() for _ in range(40_000))
    got = Counter(tuple(sorted(s for s, _ in edges)) for edges, _ in parsed(task, documents(task, "test", 40_000)))
    keys = sorted(set(expected) | set(got))
    common = [key for key in keys if expected[key] + got[key] >= 20]
    rest = [key for key in keys if key not in common]
    table = [[side[key] for key in common] + [sum(side[key] for key in rest) + 1] for side in (expected, got)]
    assert len(common) > 100
    assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("n", [3, 4])
def test_cycles_edges_and_starts_are_uniform(n, documents, fits):
    """Exactly uniform over the few outcomes that a tiny cycle has."""
    task = tasks.get("depo", N=n, K=2, M=2, name_vocab=2, min_name_len=1, max_name_len=2)
    cycles, orders, starts = Counter(), Counter(), Counter()
    for edges, queries in parsed(task, documents(task, "test", 25_000)):
        successor = dict(edges)
        names = sorted(successor, key=lambda name: (len(name), name))
        walk, name = [], names[0]
        for _ in range(n):
            walk.append(names.index(name))
            name = successor[name]
        cycles[tuple(walk)] += 1
        sources = [source for source, _ in edges]
        orders[tuple(names.index(source) for source in sources)] += 1
        starts[tuple(sources.index(start) for _, start, _ in queries)] += 1
    fits([cycles[(0, *rest)] for rest in permutations(range(1, n))])  # (n - 1)! cycles
    fits([orders[order] for order in permutations(range(n))])  # n! edge orders
    fits([starts[pair] for pair in permutations(range(n), 2)])  # without replacement, in random order


def test_edge_order_is_independent_of_the_cycle(documents, fits):
    """How far along the cycle the second written edge lies from the first: uniform on 1..n-1."""
    task, hops = tasks.get("depo", N=6, K=1, M=1, name_vocab=8, max_name_len=1), Counter()
    for edges, _ in parsed(task, documents(task, "test", 15_000)):
        successor, name, steps = dict(edges), edges[0][0], 0
        while name != edges[1][0]:
            name, steps = successor[name], steps + 1
        hops[steps] += 1
    fits([hops[i] for i in range(1, 6)])


def test_names_that_were_drawn_early_are_not_neighbours(documents):
    """Short names are drawn first; on a uniform cycle, h of n names make h (h - 1) / (n - 1) neighbouring pairs."""
    task, excess = tasks.get("depo"), []
    for edges, _ in parsed(task, documents(task, "test", 800)):
        short = sum(len(source) == 1 for source, _ in edges)
        pairs = sum(len(source) == len(target) == 1 for source, target in edges)
        excess.append(pairs - short * (short - 1) / (len(edges) - 1))
    assert abs(np.mean(excess)) < 4 * np.std(excess) / np.sqrt(len(excess))


def test_explanations():
    task = tasks.get("depo", K=12)
    ids = [9999, 60, 57, 2, 51, 60, 57, 2, 51]
    for query, line in {
        (9001, 57, 9500, 2, 51): "w7. → w2 w1.: 1 step",
        (9005, 2, 51, 9500, 57): "w2 w1. → w10. → w7. → w2 w1. → w10. → w7.: 5 steps",
        (9012, 60, 9500, 60): "w10. → w7. → w2 w1. → … → w2 w1. → w10.: 12 steps",
    }.items():
        sample = task.from_original([*ids, *query])
        assert task.explain(sample, sample.queries[0]) == line
