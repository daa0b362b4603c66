"""How samples of `recall` are drawn: bindings among noise, then questions among filler."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from canonlm.core.numba_cache import njit
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, draw_index, shuffle
from canonlm.tasks.tokens import Names, draw_names, room_for_names, write_name

BOS, ASK, FIRST = 0, 1, 2


class Tables(NamedTuple):
    """Keys and values are rows of tokens: see `canonlm.tasks.tokens.Names`."""

    sizes: np.ndarray  # the values from which n is drawn
    updates: np.ndarray  # by size: how many keys are bound again
    noise: np.ndarray  # by size: slots of noise in the context
    gaps: np.ndarray  # by size: cumulative probabilities of the slots of questions; [0, 0]: all alike
    space: int  # slots for each question
    levels: int
    grid: bool
    hidden: bool
    any_word: bool  # whether filler is any word but the sample's keys, instead of noise
    words: int  # keys and values of one token
    noise_words: int
    keys: tuple[np.ndarray, np.ndarray, np.ndarray]
    values: tuple[np.ndarray, np.ndarray, np.ndarray]


@lru_cache(maxsize=8)
def tables_of_names(m: int, length: int, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All rows of 1 to `length` of the m tokens from `first` on. Their last token looks like any other."""
    cells, rows, lengths = Names(m, 1, length, first).tables
    return cells, np.where(rows >= first + m, rows - m, rows).astype(np.int32), lengths


@lru_cache(maxsize=2)
def gaps_of(sizes: tuple[int, ...], space: int, gaps: float | None) -> np.ndarray:
    """`Tables.gaps`, where slot i has probability ∝ i^(gaps - 1)."""
    slots = np.arange(1.0, 1 + max(sizes) * space * (gaps is not None))
    weights = np.cumsum(np.where(slots <= np.array(sizes)[:, None] * space, slots ** ((gaps or 1) - 1), 0), 1)
    return weights / weights[:, -1:]


def _make_room(tables):
    most, again = tables.sizes.max(), tables.updates.max()
    bindings = most * tables.levels + again
    of_keys = np.empty(max(bindings, len(tables.keys[2])) + 2, np.int64)
    of_values = np.empty(max(bindings, len(tables.values[2])) + 2, np.int64)
    return (
        (*room_for_names(tables.keys[2]), of_keys, *room_for_names(tables.values[2]), of_values),
        (np.empty(bindings, np.int64), np.empty(bindings, np.int64), np.empty(most * tables.space, np.int64)),
    )


def _draw(state, gamma, tables, room, tokens, targets):
    (seen, stamp, keys, seen_values, stamp_values, values), (order, current, asked) = room
    state, which = below(state, gamma, len(tables.sizes))
    n, again, noise = tables.sizes[which], tables.updates[which], tables.noise[which]
    side = int(np.sqrt(n) + 0.5) if tables.grid else 0
    state = draw_names(state, gamma, side or n * tables.levels, tables.keys[0], seen, stamp, keys)
    if side:  # the second words of the keys, kept behind the first ones
        for i in range(side):
            order[i] = keys[i]
        state = draw_names(state, gamma, side, tables.keys[0], seen, stamp, keys)
        for i in range(side):
            keys[side + i], keys[i] = keys[i], order[i]
    state = draw_names(state, gamma, n + again, tables.values[0], seen_values, stamp_values, values)
    tokens[0] = BOS
    at = 1
    first = n * tables.levels
    for i in range(first):
        order[i] = i
    if side or tables.levels > 1:  # else keys are in random order already
        state = shuffle(state, gamma, order, first, first)
    for i in range(n):
        current[i] = i
    left, total = noise, first + again + noise
    done = 0
    for slot in range(total):
        is_noise = False
        if left > 0:
            state, place = below(state, gamma, total - slot)
            is_noise = place < left
        if is_noise:
            left -= 1
            state, at = _two(state, gamma, at, FIRST + tables.words, tables.noise_words, tokens)
            continue
        if done == first:  # from here on, keys are bound again
            for i in range(n):
                order[i] = i
            state = shuffle(state, gamma, order, n, again)
        value = n + done - first
        binding = order[done if done < first else done - first]
        if done >= first:
            current[binding] = value
        else:
            value = binding // tables.levels
        at = _key(at, binding, side, tables, keys, tokens)
        if done < first and binding % tables.levels < tables.levels - 1:  # the next key of the chain
            at = _key(at, binding + 1, 0, tables, keys, tokens)
        else:
            at = write_name(tokens, at, tables.values[1], tables.values[2], values[value])
        done += 1
    tokens[at] = ASK
    at += 1
    targets[:at] = IGNORE
    slots = n * tables.space
    if tables.gaps.shape[1]:
        asked[:slots] = -1
        for i in range(n):
            state, slot = draw_index(state, gamma, tables.gaps[which])
            while asked[slot] >= 0:
                state, slot = draw_index(state, gamma, tables.gaps[which])
            asked[slot] = i
    else:
        for i in range(slots):
            asked[i] = i
        state = shuffle(state, gamma, asked, slots, slots)
    for slot in range(slots):
        chain, begin = asked[slot], at
        if not 0 <= chain < n:
            if tables.any_word:
                state, at = _two_words(state, gamma, at, tables.words, seen, stamp[0], tokens)
            else:
                state, at = _two(state, gamma, at, FIRST + tables.words, tables.noise_words, tokens)
            targets[begin:at] = IGNORE
            continue
        level = 0
        if tables.levels > 1:
            state, level = below(state, gamma, tables.levels)
        at = _key(at, chain * tables.levels + level, side, tables, keys, tokens)
        targets[begin:at] = IGNORE
        begin = at
        at = write_name(tokens, at, tables.values[1], tables.values[2], values[current[chain]])
        for i in range(begin, at):
            targets[i] = tokens[i]
        if tables.hidden:
            if tables.any_word:
                state, _ = _two_words(state, gamma, begin, tables.words, seen, stamp[0], tokens)
            else:
                state, _ = _two(state, gamma, begin, FIRST + tables.words, tables.noise_words, tokens)
    return at


@njit(cache=True, inline="always")
def _key(at, binding, side, tables, keys, tokens):
    """Write the key of a binding: in a grid of keys, its two words."""
    if side:
        tokens[at] = tables.keys[1][keys[binding // side], 0]
        tokens[at + 1] = tables.keys[1][keys[side + binding % side], 0] + len(tables.keys[2])
        return at + 2
    return write_name(tokens, at, tables.keys[1], tables.keys[2], keys[binding])


@njit(cache=True, inline="always")
def _two(state, gamma, at, first, words, tokens):
    state, word = below(state, gamma, words * words)
    tokens[at], tokens[at + 1] = first + word // words, first + word % words
    return state, at + 2


@njit(cache=True, inline="always")
def _two_words(state, gamma, at, words, seen, now, tokens):
    """Two words, except the keys of this sample."""
    for place in range(at, at + 2):
        state, word = below(state, gamma, words)
        while word < len(seen) and seen[word] == now:
            state, word = below(state, gamma, words)
        tokens[place] = FIRST + word
    return state, at + 2


loop = compile_loop(_draw, _make_room)
