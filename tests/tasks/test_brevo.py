"""Brevo: the released format by an independent reader (in original ids), every distribution of the sampler, the grader.

Reference numbers: measured on 20 000 training and 5 000 test samples of the original generator.
"""

from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations
from math import perm
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks
from canonlm.tasks.brevo import bucket, graph_counts

REFERENCE = {  # (mean, standard error) of the length, the edges and the answer's nodes; P(depth = 1, 2, 3, 4)
    ("brevo1-70", "train"): ((127.0891, 0.66582), (54.1291, 0.30393), (13.8309, 0.06823), (0.2452, 0.446, 0.22, 0.072)),
    ("brevo1-70", "test"): ((336.2452, 0.5326), (151.0824, 0.21214), (29.0804, 0.16989), (0.115, 0.382, 0.293, 0.148)),
    ("brevo1-90", "train"): ((154.832, 0.84884), (67.0109, 0.38992), (15.8101, 0.08184), (0.2295, 0.442, 0.228, 0.078)),
    ("brevo1-90", "test"): ((429.0498, 0.67561), (194.8904, 0.27012), (34.269, 0.21195), (0.111, 0.381, 0.29, 0.142)),
    ("brevo1-110", "train"): ((183.89, 1.03478), (80.5761, 0.47767), (17.7374, 0.09522), (0.217, 0.434, 0.237, 0.083)),
    ("brevo1-110", "test"): ((520.68, 0.80259), (238.3718, 0.31862), (38.9372, 0.2506), (0.104, 0.379, 0.291, 0.139)),
    ("brevo2-30", "train"): ((188.8982, 0.90598), (25.4156, 0.1301), (8.5776, 0.03574), (0.336, 0.459, 0.172, 0.029)),
    ("brevo2-30", "test"): ((448.946, 0.8415), (63.117, 0.10346), (16.3242, 0.08054), (0.131, 0.426, 0.319, 0.11)),
    ("brevo2-40", "train"): ((237.7775, 1.21676), (32.4843, 0.17469), (9.981, 0.04482), (0.302, 0.456, 0.191, 0.045)),
    ("brevo2-40", "test"): ((607.8112, 1.0356), (85.6824, 0.12788), (20.138, 0.10188), (0.114, 0.401, 0.309, 0.141)),
    ("brevo2-50", "train"): ((289.0356, 1.51348), (39.8396, 0.21664), (11.3506, 0.05296), (0.279, 0.452, 0.207, 0.054)),
    ("brevo2-50", "test"): ((762.7824, 1.3083), (107.4848, 0.15985), (23.3488, 0.12741), (0.114, 0.396, 0.303, 0.143)),
}


def parse(ids, m=None):
    """(edges, query, answer) of a sample in original ids; m: non-final tokens, if names have several tokens."""

    def name(at):
        stop = at
        while m and ids[stop] <= m:
            stop += 1
        assert ids[stop] <= (2 * m if m else 9996)
        return tuple(ids[at : stop + 1]), stop + 1

    def names(at, marker):
        collected = []
        while ids[at] != marker:
            one, at = name(at)
            collected.append(one)
        return collected, at + 1

    assert ids[0] == 9999
    ends, at = names(1, 9997)
    query, at = name(at)
    assert ids[at] == 9998
    answer, at = names(at + 1, 9998)
    assert at == len(ids)
    return [*zip(ends[::2], ends[1::2], strict=True)], query, answer


def parsed(task, docs):
    return [parse(task.original_ids[doc].tolist(), task.spec.name_vocab) for doc in docs]


def parents_of(edges):
    parents = {name: set() for edge in edges for name in edge}
    for parent, child in edges:
        parents[child].add(parent)
    return parents


def closure(parents, query):
    """The query and its ancestors, by adding parents until nothing changes."""
    known = {query}
    while (more := known.union(*(parents[name] for name in known))) != known:
        known = more
    return known


def valid(edges, query, answer):
    """The rule, checked by the edges: every needed node once, and no edge backwards."""
    expected = closure(parents_of(edges), query)
    at = {name: i for i, name in enumerate(answer)}
    if sorted(answer) != sorted(expected):
        return False
    return all(at[parent] < at[child] for parent, child in edges if parent in expected and child in expected)


def depth_of(edges, query):
    parents, level, depth = parents_of(edges), {query}, 0
    while all(parents[name] for name in level):
        level, depth = set().union(*(parents[name] for name in level)), depth + 1
    return depth


@st.composite
def specs(draw):
    query = draw(st.sampled_from(["last", "last_quarter"]))
    if draw(st.booleans()):
        return {"N": draw(st.integers(3, 60)), "query": query}
    m, low = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    high = draw(st.integers(low, 4))
    max_count = min(40, sum(m**length for length in range(low, high + 1)))
    N = draw(st.integers(3, max(3, max_count)))
    low = max(low, 2) if max_count < 3 else low
    high = max(low, high, 2) if max_count < 3 else high
    return {"N": N, "query": query, "name_vocab": m, "min_name_len": low, "max_name_len": high}


@given(specs(), st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_sample_parses_back(spec, split, seed):
    task = tasks.get("brevo", **spec)
    sample = task.sample(split, seed, 0)
    original = task.to_original(sample)
    edges, query, answer = parse(original, task.spec.name_vocab)
    parents = parents_of(edges)
    assert len(set(edges)) == len(edges)
    assert max(map(len, parents.values())) <= 4
    assert max(Counter(parent for parent, _ in edges).values()) <= 4
    roots = [name for name, group in parents.items() if not group]
    # Nodes without edges are among the first ones, of which there are at most (n - 1) // 4 + 1.
    max_count, min_count = task.spec.N, task.spec.N if split == "test" else 3
    assert 3 <= len(parents) <= max_count
    assert len(parents) >= min_count - (min_count - 1) // 4
    assert 1 <= len(roots) <= (max_count - 1) // 4 + 1
    assert task.spec.min_name_len <= min(map(len, parents))
    assert max(map(len, parents)) <= task.spec.max_name_len
    assert parents[query]
    assert valid(edges, query, answer)
    assert not any(name in closure(parents, parent) for name in parents for parent in parents[name])  # no cycle
    (queried,) = sample.queries
    depth = depth_of(edges, query)
    assert queried.slice == {"n": max_count, "depth": depth if depth < 6 else "6+", "nodes": bucket(len(answer))}
    assert [original[queried.start - 1], original[queried.stop - 1], original[queried.question_start]] == [
        9998,
        9998,
        9997,
    ]
    assert queried.stop == len(original) <= task.max_len
    assert all({key: value} in task.slices() for key, value in queried.slice.items())
    targets = np.flatnonzero(sample.labels != -100)
    np.testing.assert_array_equal(targets, np.arange(queried.start - 1, queried.stop))
    again = task.from_original(original)
    np.testing.assert_array_equal(again.tokens, sample.tokens)
    np.testing.assert_array_equal(again.labels, sample.labels)
    assert again.meta == sample.meta
    assert task.grade(again, again.tokens)[0].correct


def test_by_hand():
    """2 → 9, 2 → 4, 9 → 4, 7 → 4, and 4 → 1, which the question does not need."""
    task = tasks.get("brevo")
    ids = [9999, 9, 4, 4, 1, 2, 9, 7, 4, 2, 4, 9997, 4, 9998, 7, 2, 9, 4, 9998]
    sample = task.from_original(ids)
    assert task.vocab.show(sample) == (
        "bos w9 w4 w4 w1 w2 w9 w7 w4 w2 w4 query w4 ans w7 w2 w9 w4 end"
    )  # fmt: skip
    assert sample.tokens[13] == task.vocab.ids["ans"] != sample.tokens[-1] == task.vocab.ids["end"]
    (query,) = sample.queries
    assert (query.start, query.stop, query.question_start) == (14, 19, 11)
    assert query.slice == {"n": 70, "depth": 1, "nodes": "2-4"}
    assert sample.meta["answer"] == ("w7", "w2", "w9", "w4")
    assert sample.meta["parents"] == {"w9": ("w2",), "w4": ("w9", "w7", "w2"), "w1": ("w4",), "w2": (), "w7": ()}
    assert task.to_original(sample) == ids
    assert task.explain(sample, query) == (
        "w4 and its ancestors, parents first: w7, w2, w9 (after w2), w4 (after w9, w7, w2)"
    )


def test_by_hand_with_names_of_several_tokens():
    """1.5 → 2.3.6 and 2.3.6 → 4.8: with m = 4 a name ends with a token above 4."""
    task = tasks.get("brevo", difficulty="brevo2-30")
    ids = [9999, 2, 3, 6, 4, 8, 1, 5, 2, 3, 6, 9997, 4, 8, 9998, 1, 5, 2, 3, 6, 4, 8, 9998]
    sample = task.from_original(ids)
    assert task.vocab.show(sample) == (
        "bos w2 w3 w2. w4 w4. w1 w1. w2 w3 w2. query w4 w4. ans w1 w1. w2 w3 w2. w4 w4. end"
    )
    assert sample.queries[0].slice == {"n": 30, "depth": 2, "nodes": "2-4"}
    assert task.to_original(sample) == ids


# -- distributions ----------------------------------------------------------------------------------------------------


def graphs(N, quarter=False, test=False):
    """[(probability, n, parents of node i as sets, query)]: the distribution of n and of the graph, enumerated."""
    sizes = [N] if test else range(3, N + 1)
    weights = [Fraction(1) if test else Fraction(1 / (n + N**0.5)) for n in sizes]
    for n, weight in zip(sizes, weights, strict=True):
        firsts, queries = (n - 1) // 4 + 1, range(3 * n // 4, n) if quarter else [n - 1]
        for roots in range(1, firsts + 1):
            drawn = [(weight / sum(weights) / firsts / len(queries), [set() for _ in range(roots)])]
            for i in range(roots, n):
                longer = []
                for p, parents in drawn:
                    free = [j for j in range(i) if sum(j in group for group in parents) < 4]
                    degrees = range(1, min(4, len(free)) + 1)
                    for degree in degrees:
                        subsets = [*combinations(free, degree)]
                        longer += [(p / len(degrees) / len(subsets), [*parents, set(s)]) for s in subsets]
                drawn = longer
            yield from ((p, n, parents, query) for p, parents in drawn for query in queries)


def signature(parents, query):
    """A graph without its names: every node that has an edge, as (parents, children, whether it is the query), and the
    depth and size of the answer. parents: {node: set}."""
    children = Counter(parent for group in parents.values() for parent in group)
    nodes = sorted((len(g), children[v], v == query) for v, g in parents.items() if g or children[v])
    return tuple(nodes), len(closure(parents, query))


@pytest.mark.every(3)
@pytest.mark.parametrize("quarter", [False, True])
@pytest.mark.parametrize("test", [False, True])
def test_graph_distribution_by_enumeration(quarter, test, documents, fits):
    """N = 6 is the smallest with a node that can have its four children before the last node chooses parents."""
    task = tasks.get("brevo", N=6, query="last_quarter" if quarter else "last")
    distribution = Counter()
    for p, _, parents, query in graphs(6, quarter, test):
        distribution[signature(dict(enumerate(parents)), query)] += float(p)
    assert sum(distribution.values()) == pytest.approx(1)
    count = 25_000
    samples = parsed(task, documents(task, "test" if test else "train", count))
    seen = Counter(signature(parents_of(edges), query) for edges, query, _ in samples)
    assert set(seen) <= set(distribution)
    common = [key for key in distribution if distribution[key] * count > 20]
    rest = 1 - sum(distribution[key] for key in common)
    assert len(common) > 70
    counts = [*(seen[key] for key in common), count - sum(seen[key] for key in common)]
    fits(counts, [*(distribution[key] for key in common), rest])


def test_size_distribution(documents, fits):
    """With N = 4 every node has an edge, so the sample shows its n."""
    docs = documents(tasks.get("brevo", N=4), "train", 20_000)
    sizes = Counter(len({*doc[1 : doc.index(1)]}) for doc in docs)  # token 1 is `query`
    distribution = np.array([1 / (3 + 2), 1 / (4 + 2)])
    fits([sizes[3], sizes[4]], distribution / distribution.sum())


def test_edges_are_shuffled_and_names_are_random(documents, fits):
    """Three nodes: v0 → v1, v0 → v2, v1 → v2. Six edge orders, and 5 · 4 · 3 ways to name the nodes."""
    orders, names = Counter(), Counter()
    for edges, query, answer in parsed(task := tasks.get("brevo", N=5), documents(task, "train", 40_000)):
        if len(edges) == len(answer) == len(parents_of(edges)) == 3:
            first, middle, last = answer
            assert last == query
            orders[tuple(edges.index(edge) for edge in ((first, middle), (first, last), (middle, last)))] += 1
            names[first, middle, last] += 1
    fits([orders[order] for order in permutations(range(3))])
    fits([names[three] for three in permutations([(i,) for i in range(1, 6)], 3)])


def order_distribution(parents, query):
    """The distribution of the answer, by following every path of the process that builds it from its end."""
    nodes, distribution = closure(parents, query), Counter()

    def go(p, taken):
        pool = [v for v in nodes - {*taken} if all(v not in parents[c] or c in taken for c in nodes)]
        if not pool:
            distribution[tuple(reversed(taken))] += p
        for node in pool:
            go(p / len(pool), (*taken, node))

    go(Fraction(1), ())
    return distribution


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"c": set(), "a": {"c"}, "b": set(), "q": {"a", "b"}},  # three right orders: 1/2, 1/4, 1/4
        {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b"}, "q": {"c", "d"}},
    ],
)
def test_answer_order_distribution(shape, documents, fits):
    """The distribution is exact, and not uniform over the right orders."""
    distribution = order_distribution(shape, "q")
    assert sum(distribution.values()) == 1
    assert len({*distribution.values()}) > 1
    seen, key = Counter(), sorted((len(group), sum(v in g for g in shape.values())) for v, group in shape.items())
    for edges, query, answer in parsed(task := tasks.get("brevo", N=6), documents(task, "train", 40_000)):
        parents = parents_of(edges)
        inside = {v: parents[v] for v in closure(parents, query)}
        degrees = sorted((len(group), sum(v in g for g in inside.values())) for v, group in inside.items())
        if degrees == key:
            named = (dict(zip(shape, names, strict=True)) for names in permutations(inside))
            same = [to for to in named if all({to[u] for u in shape[v]} == inside[to[v]] for v in shape)]
            for letter in ({name: v for v, name in to.items()} for to in same):
                seen[tuple(letter[name] for name in answer)] += 1
    orders = sorted(distribution)
    assert set(seen) <= set(orders)
    fits([seen[order] for order in orders], [float(distribution[order]) for order in orders])


@pytest.mark.slow
@pytest.mark.parametrize(
    "difficulty",
    [
        "brevo1-70",
        "brevo2-30",
        *(pytest.param(f"brevo{kind}", marks=pytest.mark.slow) for kind in ("1-90", "1-110", "2-40", "2-50")),
    ],
)
def test_reference_means(difficulty, documents):
    task = tasks.get("brevo", difficulty=difficulty)
    for split, count, size in (("train", 5000, 20_000), ("test", 1000, 5000)):
        length, edge_count, nodes, depth_shares = REFERENCE[difficulty, split]
        docs = documents(task, split, count)
        samples = parsed(task, docs)
        measured = {
            "length": ([len(doc) for doc in docs], length),
            "edges": ([len(edges) for edges, _, _ in samples], edge_count),
            "nodes": ([len(answer) for _, _, answer in samples], nodes),
        }
        for what, (values, (mean, error)) in measured.items():
            ours = np.std(values) / np.sqrt(count)
            assert abs(np.mean(values) - mean) < 4 * np.hypot(ours, error), (split, what, np.mean(values))
        depths = Counter(depth_of(edges, query) for edges, query, _ in samples)
        for depth, p in enumerate(depth_shares, 1):
            error = np.sqrt(p * (1 - p) * (1 / count + 1 / size))
            assert abs(depths[depth] / count - p) < 4 * error + 0.0005, (split, depth)  # p has three digits


def test_degrees_and_unused_nodes(documents):
    """brevo1-70, n = 70: shares of nodes with 1 … 4 parents and children; 69.9312 nodes have an edge."""
    task = tasks.get("brevo")
    parents, children, used, count = Counter(), Counter(), [], 1500
    for edges, _, _ in parsed(task, documents(task, "test", count)):
        used.append(len(parents_of(edges)))
        parents.update(Counter(child for _, child in edges).values())
        children.update(Counter(parent for parent, _ in edges).values())
    error = 0.2794 * np.sqrt(1 / count + 1 / 5000)
    assert np.mean(used) == pytest.approx(69.9312, abs=4 * error)
    reference = {1: (0.25128, 0.23206), 2: (0.25001, 0.19057), 3: (0.24961, 0.15596), 4: (0.2491, 0.42141)}
    for degree, shares in reference.items():
        for counts, share in zip((parents, children), shares, strict=True):
            total = sum(counts.values())
            error = np.sqrt(share * (1 - share) * (1 / total + 1 / (total * 5000 / count)))
            assert counts[degree] / total == pytest.approx(share, abs=4 * error)


@pytest.mark.parametrize(
    ("difficulty", "probabilities"),
    [("brevo2-30", (0.27489, 0.35065, 0.37445)), ("brevo2-50", (0.23488, 0.3591, 0.40602))],
)
def test_short_names_saturate(difficulty, probabilities, documents):
    """Shares of names of 2, 3 and 4 tokens, which would be thirds if names could repeat."""
    task = tasks.get("brevo", difficulty=difficulty)
    samples = [[*map(len, parents_of(edges))] for edges, _, _ in parsed(task, documents(task, "test", 1500))]
    for length, expected in zip((2, 3, 4), probabilities, strict=True):
        shares = [lengths.count(length) / len(lengths) for lengths in samples]
        error = np.std(shares) * np.sqrt(1 / 1500 + 1 / 5000)
        assert np.mean(shares) == pytest.approx(expected, abs=4 * error)


@pytest.mark.parametrize("query", ["last", "last_quarter"])
def test_simulated_graphs_follow_the_distribution(query, fits):
    distribution = np.zeros((7, 7))
    for p, _, parents, queried in graphs(6, query == "last_quarter", test=True):
        named = dict(enumerate(parents))
        distribution[
            depth_of([(p, c) for c, g in named.items() for p in g], queried), len(closure(named, queried))
        ] += float(p)
    counts = graph_counts(6, query)
    assert counts.sum() == 2**22 // 6
    assert (counts[distribution == 0] == 0).all()
    fits(counts[distribution > 0], distribution[distribution > 0])


@pytest.mark.slow
def test_slices_are_those_of_test_samples():
    for N in (3, 4, 5, 40):
        task = tasks.get("brevo", N=N, query="last_quarter")
        seen = {str({k: v}) for i in range(2000) for k, v in task.sample("test", 0, i).queries[0].slice.items()}
        expected = {str(where) for where in task.slices()}
        assert seen <= expected
        assert seen == expected or N == 40
    names = tasks.get("brevo").slices()
    assert names[0] == {"n": 70}
    assert names[1:7] == [{"depth": depth} for depth in (1, 2, 3, 4, 5, "6+")]
    assert [where["nodes"] for where in names[7:]] == ["2-4", "5-8", "9-16", "17-32", "33-64", "65-128"]


# -- the grader -------------------------------------------------------------------------------------------------------


@given(specs(), st.integers(0, 2**40), st.data())
def test_the_grader_follows_the_rule(spec, seed, data):
    """Right answers, changed in one or two ways; whether they are still right is read off the edges."""
    task = tasks.get("brevo", **spec)
    sample = task.sample("test", seed, 0)
    edges, query, answer = parse(task.to_original(sample), task.spec.name_vocab)
    names = sorted(parents_of(edges))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(answer)))
        change = data.draw(st.sampled_from(["swap", "drop", "insert", "shuffle"]))
        if change == "swap":
            answer[at : at + 2] = reversed(answer[at : at + 2])
        elif change == "drop":
            del answer[at : at + 1]
        elif change == "insert":
            answer.insert(at, data.draw(st.sampled_from(names)))
        else:
            answer = data.draw(st.permutations(answer))
    written = [task.original_ids.tolist().index(token) for name in answer for token in name] + [task.vocab.ids["end"]]
    (verdict,) = task.grade(sample, [written])
    assert verdict.correct == valid(edges, query, answer)
    assert bool(verdict.why) != verdict.correct
    assert not task.grade(sample, [written[:-1]])[0].correct


def test_explanations_of_verdicts():
    task = tasks.get("brevo", N=6, name_vocab=4, min_name_len=1, max_name_len=2)
    text = "bos w2. w3 w1. w4. w3 w1. w3 w1. w1. w4. w1. w1. w2 w2. query w1. ans w4. w2. w3 w1. w1. end"
    sample = task.read([task.vocab.ids[name] for name in text.split()])
    for answer, why in {
        "w2. w4. w3 w1. w1. end": "",
        "w2. w4. w3 w1. w1. end w1. end": "",  # the grader stops at `end`
        "w4. w3 w1. w2. w1. end": "w3 w1. comes before its parent w2.",
        "w2. w3 w1. w1. end": "misses w4.",
        "w1. end": "misses w3 w1., w4., w2.",
        "w2. w4. w3 w1. w2 w2. w1. end": "w2 w2. is not an ancestor of w1.",
        "w2. w4. w3. w1. end": "w3. is not an ancestor of w1.",
        "w2. w4. w2. w3 w1. w1. end": "repeats w2.",
        "w2. w4. w3 w1. w1.": "no end token",
        "w2. w4. w3 w1. w1. w2 end": "unfinished name w2",
        "w2. w4. w3 end": "unfinished name w3",
        "w2. bos w4. w3 w1. w1. end": "bos w4. is not an ancestor of w1.",
        "end": "empty answer",
        "": "empty answer",
        "bos": "no end token",
    }.items():
        (verdict,) = task.grade(sample, [[task.vocab.ids[name] for name in answer.split()]])
        assert (verdict.correct, verdict.why) == (not why, why), answer
    big = tasks.get("brevo").sample("test", 0, 0)
    assert tasks.get("brevo").grade(big, [[3]])[0].why == "empty answer"
    last = [tasks.get("brevo").vocab.ids[big.meta["query"]], 3]
    assert f"and {len(big.meta['answer']) - 4} more" in tasks.get("brevo").grade(big, [last])[0].why


def test_the_best_list_of_few_nodes():
    """By brute force: every list of other nodes, then the node in the question. docs/tasks/brevo.md has the numbers."""
    for N, best in ((3, 3 / 8), (4, 0.12), (5, 0.06)):
        task, scores = tasks.get("brevo", N=N), Counter()
        for i in range(300):
            sample = task.sample("test", 0, i)
            question, others = sample.meta["query"], [*sample.meta["parents"].keys() - {sample.meta["query"]}]
            for length in range(1, len(others) + 1):
                for guess in permutations(others, length):
                    answer = [task.vocab.ids[name] for name in (*guess, question, "end")]
                    right = task.grade(sample, [answer])[0].correct
                    scores[length + 1] += right / perm(len(others), length) / 300
        assert max(scores, key=scores.get) == N
        assert scores[N] == pytest.approx(best, abs=0.03)
        assert scores[2] == pytest.approx(task.chance({"n": N}), abs=0.03)


@pytest.mark.slow
def test_chance_is_what_guessing_scores():
    """The guess is another node of the sample, then the one asked about."""
    rng, task = np.random.default_rng(0), tasks.get("brevo", N=7)
    scored = {str(where): [] for where in task.slices()}
    for i in range(4000):
        sample = task.sample("test", 0, i)
        others = [name for name in task.vocab.names[4:] if name != sample.meta["query"]]
        answer = [task.vocab.ids[name] for name in (rng.choice(others), sample.meta["query"], "end")]
        (verdict,) = task.grade(sample, [answer])
        for key, value in verdict.slice.items():
            scored[str({key: value})].append(verdict.correct)
    for where in task.slices():
        chance, hits = task.chance(where), scored[str(where)]
        error = np.sqrt(chance * (1 - chance) / max(1, len(hits)))
        assert abs(np.mean(hits or [0]) - chance) <= 4 * error, where
    assert task.chance({"n": 7}) > 0.005
    assert task.chance({"depth": 2}) == task.chance({"nodes": "5-8"}) == 0
    assert task.chance({"n": 7, "depth": 1, "nodes": "2-4"}) > task.chance({"depth": 1}) > task.chance({"n": 7})


def test_reading_a_large_sample_takes_time_in_proportion():
    task = tasks.get("brevo", N=9996)
    sample, began = task.sample("test", 0, 0), process_time()
    task.read(sample.tokens)
    assert process_time() - began < 3  # 0.1 s; it was 6 s
