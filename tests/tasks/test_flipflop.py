"""Flip-flop: an independent reader and the distribution."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks

PROBABILITY = st.floats(0, 0.99)


@given(
    st.integers(2, 50), PROBABILITY, st.lists(PROBABILITY, min_size=1, max_size=3, unique=True), st.data(),
    st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40),
)  # fmt: skip
def test_every_read_is_the_last_write(N, p, test_p, data, split, seed):
    lengths = data.draw(st.none() | st.lists(st.integers(2, 70), min_size=1, max_size=3, unique=True))
    task = tasks.get("flipflop", N=N, p_ignore=p, test_p_ignore=test_p, test_lengths=lengths)
    sample = task.sample(split, seed, 0)
    bos, *rest = task.vocab.show(sample).split()
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    assert (bos, pairs[0][0], pairs[-1][0]) == ("bos", "w", "r")
    assert len(pairs) in (lengths or [N] if split == "test" else [N])
    expected, last, since = {}, None, 0
    for at, (kind, bit) in enumerate(pairs):
        assert kind in "wri"
        assert bit in "01"
        since += 1
        if kind == "w":
            last, since = bit, 0
        if kind == "r":
            assert bit == last
            expected[2 * at + 2] = since
    assert np.flatnonzero(sample.labels != -100).tolist() == [*expected]
    assert [(q.start, q.stop, q.question_start) for q in sample.queries] == [(t, t + 1, t - 1) for t in expected]
    gaps = [where["gap"] for where in task.slices()]
    for query, gap in zip(sample.queries, expected.values(), strict=True):
        assert query.slice == {"gap": max(each for each in gaps if each <= gap)}
        bit = task.vocab.names[sample.tokens[query.start]]
        assert task.explain(sample, query) == f"{bit} was written {gap} pair{'s' * (gap != 1)} before"


def test_instructions_and_bits_have_the_stated_probabilities(documents, fits):
    docs = np.array(documents(tasks.get("flipflop", N=12, p_ignore=0.7), "train", 3000))
    kinds, bits = docs[:, 1::2], docs[:, 2::2] - 4
    for at in (1, 5, 10):
        fits(np.bincount(kinds[:, at], minlength=4)[1:], [0.15, 0.15, 0.7])
    together = 3 * (kinds[:, 4] - 1) + kinds[:, 5] - 1
    fits(np.bincount(together, minlength=9), np.outer([0.15, 0.15, 0.7], [0.15, 0.15, 0.7]).ravel())
    fits(np.bincount(bits[:, 0], minlength=2))
    fits(np.bincount(bits[:, 3][kinds[:, 3] == 3], minlength=2))
    fits(np.bincount(2 * bits[:, 0] + bits[:, 1], weights=kinds[:, 1] == 3, minlength=4))
    fits(np.bincount(bits[:, -1], minlength=2))  # chance: what is read is a fair bit


def test_the_test_mixes_dense_and_sparse_and_its_lengths(documents, fits):
    task = tasks.get("flipflop", N=10, test_p_ignore=[0.0, 0.9], test_lengths=[10, 20])
    docs = documents(task, "test", 4000)
    fits(list(Counter(map(len, docs)).values()))
    dense = sum(3 not in doc[1::2] for doc in docs)
    by_chance = np.mean([0.1**8, 0.1**18])  # that the sparse ones, too, have no ignored pair
    fits([dense, len(docs) - dense], [(1 + by_chance) / 2, (1 - by_chance) / 2])


@pytest.mark.parametrize("settings", [{"N": 20}, {"N": 20, "test_p_ignore": [0.5], "test_lengths": [5, 33]}])
def test_slices_are_the_gaps_that_occur_and_the_numbers_of_their_answers(settings):
    task = tasks.get("flipflop", **settings)
    counts = Counter(q.slice["gap"] for i in range(3000) for q in task.sample("test", 0, i).queries)
    assert {*counts} == {where["gap"] for where in task.slices()}
    for gap in task.gaps[:-1]:
        expected = 3000 * task.answers_per_sample(gap)
        assert abs(counts[gap] - expected) < 5 * np.sqrt(expected) + 0.05 * expected
    assert {task.chance(where) for where in task.slices()} == {0.5}
