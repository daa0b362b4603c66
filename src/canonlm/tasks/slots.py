"""How samples of `dictionary` are drawn: slot by slot."""

from functools import lru_cache
from itertools import permutations
from math import perm
from typing import NamedTuple

import numpy as np

from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, one_of, two_below

BOS, FIRST = 0, 1


@lru_cache(maxsize=8)
def rows_of(words: int, lengths: range, first: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows of different tokens, the shorter ones first, and by length where they begin and the last one ends."""
    rows = np.zeros((sum(perm(words, length) for length in lengths), lengths[-1]), np.int32)
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + perm(words, length))
        some = list(permutations(range(first, first + words), length))
        rows[ends[-2] : ends[-1], :length] = some
    return rows, np.array(ends)


class Tables(NamedTuple):
    lengths: np.ndarray  # the values from which n is drawn
    keys: np.ndarray  # rows of tokens, then zeros
    key_ends: np.ndarray
    values: np.ndarray
    value_ends: np.ndarray
    noise: float
    first_noise: int
    noise_words: int


def _make_room(tables):
    """The value of each key that came (-1: it did not), and these keys. Every draw leaves no key."""
    return np.full(len(tables.keys), -1), np.empty(tables.lengths.max(), np.int64)


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, keys, key_ends, values, value_ends, noise, first_noise, noise_words = tables
    value_of, known = room
    state, n = one_of(state, gamma, lengths)
    state, never_noise = below(state, gamma, n - 1)
    tokens[0], targets[0] = BOS, IGNORE
    at, count, few = 1, 0, int(noise * 2.0**32)
    for slot in range(n):
        if noise > 0 and slot not in (never_noise, n - 1):
            state, draw = below(state, gamma, 2**32)
            if draw < few:
                state, one, two = two_below(state, gamma, noise_words, noise_words)
                tokens[at], tokens[at + 1] = first_noise + one, first_noise + two
                targets[at] = targets[at + 1] = IGNORE
                at += 2
                continue
        if slot < n - 1:
            state, length = below(state, gamma, len(key_ends) - 1)
            state, key = below(state, gamma, key_ends[length + 1] - key_ends[length])
            key += key_ends[length]
        else:
            state, key = below(state, gamma, count)
            key = known[key]
        for i in range(keys.shape[1]):
            if keys[key, i]:
                tokens[at], targets[at] = keys[key, i], IGNORE
                at += 1
        is_new = value_of[key] < 0
        if is_new:
            state, length = below(state, gamma, len(value_ends) - 1)
            state, value = below(state, gamma, value_ends[length + 1] - value_ends[length])
            known[count], value_of[key] = key, value_ends[length] + value
            count += 1
        for i in range(values.shape[1]):
            token = values[value_of[key], i]
            if token:
                tokens[at], targets[at] = token, IGNORE if is_new else token
                at += 1
    for i in range(count):
        value_of[known[i]] = -1
    return at


loop = compile_loop(_draw, _make_room)
