"""Copying: the format by an independent reader, and the distribution."""

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks


@given(st.integers(1, 40), st.data(), st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_sample_parses_back(N, data, split, seed):
    min_items = data.draw(st.integers(1, N))
    task = tasks.get("copying", N=N, min_items=min_items)
    sample = task.sample(split, seed, 0)
    names = task.vocab.show(sample).split()
    n = names.index("ans") - 1
    items = names[1 : n + 1]
    assert names == ["bos", *items, "ans", *items]
    assert len(set(items)) == n
    assert set(items) <= {f"x{i}" for i in range(1, N + 1)}
    assert n == N if split == "test" else min_items <= n <= N
    assert sample.meta["n"] == n
    assert [query.slice["first"] for query in sample.queries] == [t for t in (1, 2, 4) if t <= n] + ["all"]
    if n == N:
        assert [query.slice for query in sample.queries] == task.slices()


def test_distribution(documents, fits):
    """n uniform on 1..3, then every ordered sample of n of the 3 items equally likely."""
    counts = Counter(
        tuple(doc[1 : len(doc) // 2]) for doc in documents(tasks.get("copying", N=3, min_items=1), "train", 30_000)
    )
    outcomes = sorted(counts)
    assert Counter(map(len, outcomes)) == {1: 3, 2: 6, 3: 6}
    fits([counts[o] for o in outcomes], [1 / 3 / {1: 3, 2: 6, 3: 6}[len(o)] for o in outcomes])


def test_length_distribution(documents, fits):
    lengths = [len(doc) // 2 - 1 for doc in documents(tasks.get("copying"), "train", 20_000)]
    fits(np.bincount(lengths)[8:])  # min_items = 32 // 4
    assert min(lengths) == 8
    assert max(lengths) == 32


def test_the_papers_setting():
    task = tasks.get("copying", difficulty="copying-500")
    for split in ("train", "test"):
        assert len(task.sample(split, 0, 0).tokens) == 1002
    assert len(task.instances("test", 0, 0, 1024)) == 1


def test_explanations_and_chance():
    task = tasks.get("copying", N=5)
    sample = task.sample("test", 0, 0)
    assert [task.chance({"first": first}) for first in (1, 2, "all")] == [1 / 5, 1 / 20, 1 / 120]
    lines = [task.explain(sample, query) for query in sample.queries]
    assert lines[1] == "the first 2 of 5 items, in the order of the list"
    assert lines[-1] == "all 5 items, in the order of the list"


@given(st.integers(2, 12), st.integers(0, 2**40))
def test_lists_longer_than_those_of_training(max_items, seed):
    task = tasks.get("copying", N=24, min_items=1, max_items=max_items, test_lengths=["x1", "x1.5", "x2"])
    lengths = [int(max_items * times) for times in (1, 1.5, 2)]
    assert task.sample("train", seed, 0).meta["n"] <= max_items
    sample = task.sample("test", seed, 0)
    n = sample.meta["n"]
    assert n in lengths
    assert sample.queries[-1].slice == {"first": "all", "n": n}
    assert all("n" not in query.slice for query in sample.queries[:-1])
    assert [where for where in task.slices() if "n" in where] == [{"n": length} for length in lengths]
    assert task.chance({"n": 2}) == 1 / 2
    assert task.chance({"first": "all"}) == sum(1 / math.factorial(length) for length in lengths) / len(lengths)
