"""The generator: known words, exact bounded draws, uniform shuffles, unrelated streams."""

from itertools import permutations

import numpy as np
import pytest
from numba import njit
from scipy import stats

from canonlm.tasks.random import below, draw_index, mix, shuffle, stream, two_below

GOLDEN = 0x9E3779B97F4A7C15


def test_mix_is_splitmix64():  # the first outputs of SplitMix64 seeded with 0, as published
    words = [int(mix(np.uint64(i * GOLDEN % 2**64))) for i in range(3)]
    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@njit
def _draw(kind, n, count, out):
    state, gamma = stream(1, 1, 2, 3)
    for i in range(count):
        if kind == 0:
            state, out[i] = below(state, gamma, n)
        elif kind == 1:
            state, out[i], _ = two_below(state, gamma, n, 7)
        else:
            state, _, out[i] = two_below(state, gamma, 7, n)


def draw(kind, n, count=60_000):
    out = np.empty(count, np.int64)
    _draw(kind, n, count, out)
    return out


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_bounded_draws_are_uniform(kind, fits):
    for n in (1, 2, 3, 23, 1000):
        fits(np.bincount(draw(kind, n), minlength=n)) if n > 1 else None
        assert draw(kind, n).max() == n - 1


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_bounded_draws_have_no_multiply_bias(kind, fits):
    """Without rejection, i = floor(3/4 x) hits the multiples of 3 twice as often as the others."""
    fits(np.bincount(draw(kind, 3 * 2**30) % 3))


@njit
def _shuffles(n, first, count, out):
    items = np.empty(n, np.int64)
    for i in range(count):
        state, gamma = stream(5, 1, 0, i)
        for t in range(n):
            items[t] = t
        shuffle(state, gamma, items, n, first)
        out[i] = items[:first]


@pytest.mark.every(3)
@pytest.mark.parametrize(("n", "first"), [(3, 3), (4, 4), (5, 5), (6, 2), (7, 4)])
def test_shuffle_is_uniform(n, first, fits):
    out = np.empty((60_000, first), np.int64)
    _shuffles(n, first, len(out), out)
    code = out @ (10 ** np.arange(first)[::-1])
    outcomes = [int("".join(map(str, p))) for p in permutations(range(n), first)]
    fits([np.count_nonzero(code == outcome) for outcome in outcomes])


def test_shuffle_positions_are_uniform(fits):
    out = np.empty((20_000, 37), np.int64)
    _shuffles(37, 37, len(out), out)
    assert (np.sort(out, 1) == np.arange(37)).all()
    for place in range(37):
        fits(np.bincount(out[:, place]))


def test_two_draws_from_one_half_word_have_no_multiply_bias():
    """a * b = 2.5e9 does not divide 2^32: without rejection 72 % of the pairs would come up twice as often."""
    n = 50_000
    out = np.empty((20_000, 4), np.int64)
    _shuffles(n, 4, len(out), out)
    first, second = out[:, 0], np.where(out[:, 1] == 0, out[:, 0], out[:, 1]) - 1  # undo the first swap
    pair, pairs = first * (n - 1) + second, n * (n - 1)
    images = ((pair + 1) * 2**32 - 1) // pairs - (pair * 2**32 - 1) // pairs  # number of 32-bit words for this pair
    assert set(images) == {1, 2}
    assert stats.binomtest(int((images == 2).sum()), len(pair), 2**32 / pairs - 1).pvalue > 1e-4


def test_draws_from_a_distribution(fits):
    distribution = np.array([0.5, 0.2, 0.05, 0.25])

    @njit
    def many(cumulative, out):
        state, gamma = stream(9, 3, 0, 0)
        for i in range(len(out)):
            state, out[i] = draw_index(state, gamma, cumulative)

    out = np.empty(50_000, np.int64)
    many(np.cumsum(distribution), out)
    fits(np.bincount(out), distribution)


def test_neighbouring_streams_are_unrelated(fits):
    """The first words of streams whose keys differ in one number only: uniform, and pairwise independent."""
    base = (7, 1, 5, 9)
    for part in range(4):
        first = []
        for i in range(4000):
            key = tuple(x + i * (p == part) for p, x in enumerate(base))
            state, gamma = stream(*key)
            assert int(gamma) % 2 == 1
            first.append(int(mix(np.uint64((int(state) + int(gamma)) % 2**64))) >> 60)
        first = np.array(first)
        fits(np.bincount(first, minlength=16))
        fits(np.bincount(first[1:] // 2 * 8 + first[:-1] // 2, minlength=64))


def test_keys_do_not_collide():  # they once did: seed 1 of split 2 equalled seed 2 of split 1
    keys = {
        int(stream(seed, split, w, j)[0])
        for seed in range(4)
        for split in (1, 2, 3)
        for w in range(60)
        for j in range(60)
    }
    assert len(keys) == 4 * 3 * 60 * 60
