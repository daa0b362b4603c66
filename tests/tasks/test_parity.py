"""Parity: an independent reader and the distribution."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks


@given(st.integers(1, 100), st.data(), st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_sample_is_its_parity(N, data, split, seed):
    lengths = data.draw(st.none() | st.lists(st.integers(1, 150), min_size=1, max_size=4, unique=True))
    task = tasks.get("parity", N=N, test_lengths=lengths)
    sample = task.sample(split, seed, 0)
    bos, *bits, ans, answer = task.vocab.show(sample).split()
    assert (bos, ans, {*bits} | {"0", "1"}) == ("bos", "ans", {"0", "1"})
    assert answer == ("even", "odd")[sum(map(int, bits)) % 2]
    n = len(bits)
    assert {"n": n} in task.slices() if split == "test" else 1 <= n <= N
    assert np.flatnonzero(sample.labels != -100).tolist() == [n + 2]
    (query,) = sample.queries
    assert (query.start, query.stop, query.slice) == (n + 2, n + 3, {"n": n})
    ones = bits.count("1")
    assert task.explain(sample, query) == f"{ones} one{'s' * (ones != 1)}"


def test_all_rows_of_a_length_are_equally_likely(documents, fits):
    docs = documents(tasks.get("parity", N=5), "train", 20_000)
    counts = Counter(tuple(doc[1:-2]) for doc in docs)
    rows = [row for n in range(1, 6) for row in np.ndindex(*[2] * n)]
    fits([counts[tuple(1 + bit for bit in row)] for row in rows], [1 / 5 / 2 ** len(row) for row in rows])


def test_bits_beyond_a_word_are_fair_and_independent(documents, fits):
    """One draw gives 32 bits: test the positions where a draw ends."""
    docs = np.array(documents(tasks.get("parity", N=70, test_lengths=[70]), "test", 4000))
    bits = docs[:, 1:71] - 1
    for at in (0, 31, 32, 63, 64, 69):
        fits(np.bincount(bits[:, at], minlength=2))
    for a, b in ((31, 32), (0, 32), (63, 64)):
        fits(np.bincount(2 * bits[:, a] + bits[:, b], minlength=4))
    fits(np.bincount(bits.sum(1) % 2, minlength=2))


def test_sizes_and_chance():
    task = tasks.get("parity", N=12)
    assert task.slices() == [{"n": n} for n in (4, 8, 12)]
    assert {task.chance(where) for where in task.slices()} == {0.5}
    assert tasks.get("parity", N=3).slices() == [{"n": 3}]
    assert tasks.get("parity", N=4, test_lengths=[20]).max_len == 23
