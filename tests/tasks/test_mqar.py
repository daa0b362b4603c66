"""MQAR: the format by an independent reader, and the distribution."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks


@given(st.integers(1, 30), st.data(), st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_sample_parses_back(pairs, data, split, seed):
    keys, values = data.draw(st.integers(pairs, 60)), data.draw(st.integers(pairs, 60))
    max_pairs = min(keys, values)
    sizes = data.draw(st.none() | st.lists(st.integers(1, max_pairs), min_size=1, max_size=4, unique=True))
    task = tasks.get("mqar", pairs=pairs, keys=keys, values=values, test_pairs=sizes)
    sample = task.sample(split, seed, 0)
    shown, questions = task.vocab.show(sample).removeprefix("bos ").split(" ask ")
    shown, questions = (list(zip(*[iter(part.split())] * 2, strict=True)) for part in (shown, questions))
    assert sorted(shown) == sorted(questions)
    n = len(shown)
    assert len(dict(shown)) == len({value for _, value in shown}) == n
    assert {key for key, _ in shown} <= {f"k{i}" for i in range(1, keys + 1)}
    assert {value for _, value in shown} <= {f"v{i}" for i in range(1, values + 1)}
    assert {"pairs": n} in task.slices() if split == "test" else 1 <= n <= pairs
    assert sample.meta == {"n": n, "pairs": dict(shown), "queries": sample.queries}
    targets = np.flatnonzero(sample.labels != -100)
    assert [(q.start, q.stop, q.question_start) for q in sample.queries] == [(t, t + 1, t - 1) for t in targets]
    assert [task.vocab.names[sample.tokens[t]] for t in targets] == [value for _, value in questions]
    assert task.explain(sample, sample.queries[0]) == f"{questions[0][0]} came with {questions[0][1]}"


def test_distribution(documents, fits):
    """n = 1 or 2 out of 3 keys and 2 values: every sample of a size is equally likely."""
    docs = documents(tasks.get("mqar", pairs=2, keys=3, values=2), "train", 20_000)
    counts = Counter(tuple(doc[1:]) for doc in docs)
    small = [(k, v, 1, k, v) for k in (2, 3, 4) for v in (5, 6)]
    large = [
        (a, x, b, y, 1, *order)
        for a, b in permutations((2, 3, 4), 2)
        for x, y in permutations((5, 6))
        for order in ((a, x, b, y), (b, y, a, x))
    ]
    assert set(counts) <= {*small, *large}
    fits([counts[doc] for doc in small + large], [1 / 2 / 6] * 6 + [1 / 2 / 24] * 24)


def test_sizes(documents, fits):
    task = tasks.get("mqar", pairs=12)
    assert task.slices() == [{"pairs": n} for n in (4, 8, 12)]
    assert tasks.get("mqar", pairs=3).slices() == [{"pairs": 3}]
    for split, sizes in (("train", range(1, 13)), ("test", (4, 8, 12))):
        counts = Counter((len(doc) - 2) // 4 for doc in documents(task, split, 5000))
        assert set(counts) == {*sizes}
        fits([counts[n] for n in sizes])
    beyond = tasks.get("mqar", pairs=4, test_pairs=[32, 4])  # longer than in training
    assert beyond.slices() == [{"pairs": 4}, {"pairs": 32}]
    assert beyond.max_len == 4 * 32 + 2


def test_guessing_among_the_remaining_values_scores_chance():
    task, rng = tasks.get("mqar", pairs=8, test_pairs=[3, 8]), np.random.default_rng(0)
    hits = {3: [], 8: []}
    for i in range(1500):
        sample = task.sample("test", 0, i)
        n = sample.meta["n"]
        left = sample.tokens[2 : 2 * n + 1 : 2].tolist()
        answer = []
        for query in sample.queries:
            answer.append([rng.choice(left)])
            left.remove(sample.tokens[query.start])
        hits[n].append(np.mean([verdict.correct for verdict in task.grade(sample, answer)]))
    assert task.chance({"pairs": 3}) == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    for n, scored in hits.items():
        error = np.std(scored) / np.sqrt(len(scored))
        assert abs(np.mean(scored) - task.chance({"pairs": n})) < 4 * error
