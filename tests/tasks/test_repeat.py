"""Palindrome and selective: an independent reader and the distribution."""

import itertools
from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks


@given(st.integers(1, 40), st.integers(2, 9), st.sampled_from(["train", "test"]), st.integers(0, 2**40))
def test_a_palindrome_reads_backwards(N, words, split, seed):
    task = tasks.get("palindrome", N=N, words=words)
    sample = task.sample(split, seed, 0)
    bos, *row = task.vocab.show(sample).split()
    n = len(row) // 2
    assert (bos, row[n]) == ("bos", "ans")
    assert row[:n] == row[:n:-1]
    assert 1 <= n <= N
    assert split == "train" or {"n": n} in task.slices()
    assert [(q.start, q.stop) for q in sample.queries] == [(at, at + 1) for at in range(n + 2, 2 * n + 2)]
    assert task.explain(sample, sample.queries[-1]) == f"word {n} from the end is {row[0]}"


@given(st.integers(1, 40), st.data(), st.sampled_from(["train", "test"]), st.integers(0, 2**40))
def test_selective_repeats_the_words_without_noise(N, data, split, seed):
    items, noise = data.draw(st.integers(1, N)), data.draw(st.integers(1, 3))
    task = tasks.get("selective", N=N, items=items, words=5, noise=noise, test_lengths=["x1", "x2"])
    bos, *row = task.vocab.show(sample := task.sample(split, seed, 0)).split()
    n = row.index("ans")
    assert bos == "bos"
    assert n in ([N, 2 * N] if split == "test" else [N])
    assert row[n + 1 :] == [word for word in row[:n] if word[0] == "x"]
    assert len(row) - n - 1 == items == len(sample.queries)
    assert {word for word in row[:n] if word[0] == "n"} <= {f"n{i}" for i in range(1, noise + 1)}


def test_rows_are_equally_likely(documents, fits):
    docs = [tuple(doc[1:4]) for doc in documents(tasks.get("palindrome", N=3, words=2, test_lengths=[3]), "test", 2000)]
    fits([Counter(docs)[row] for row in itertools.product((2, 3), repeat=3)])
    fits(Counter(len(doc) for doc in documents(tasks.get("palindrome", N=3), "train", 2000)).values())
    docs = documents(tasks.get("selective", N=5, items=2, words=2, noise=2), "train", 10_000)
    counts = Counter(tuple(token if token < 4 else -1 for token in doc[1:6]) for doc in docs)
    assert len(counts) == comb(5, 2) * 4
    fits(counts.values())
    fits(Counter(token for doc in docs for token in doc[1:6] if token > 3).values())


@pytest.mark.parametrize(("name", "settings"), [("palindrome", {"N": 9, "test_lengths": [9]}), ("selective", {})])
def test_chance_is_what_guessing_scores(name, settings):
    task, right = tasks.get(name, **settings), []
    for index in range(1_500):
        left = (answers := task.sample("test", 0, index).tokens.tolist())[answers.index(1) + 1 :]
        while left:
            right.append(Counter(sorted(left)).most_common(1)[0][0] == left.pop(0))
    assert np.mean(right) == pytest.approx(task.chance(task.slices()[0]), abs=0.015)
