"""Names of one or more tokens, for Depo and Brevo.

`w7 w3.` is one name. The dot marks its last token, so names need no separators.

A name's length is uniform on low..high, then each token is uniform; a name that the sample already has is drawn again.
Short names are few, so their share falls with the number of names in a sample.
"""

from itertools import takewhile
from typing import Any

import numpy as np

from canonlm.core.numba_cache import njit
from canonlm.tasks.base import Malformed, Vocab, token_id
from canonlm.tasks.random import shuffle, two_below
from canonlm.tasks.spec import TaskSpec

MAX_CELLS = 2**22  # bounds the table of names (16 MiB)
_U1 = np.uint64(1)


def leading(answer: list[Any], words: range, most: int) -> list[Any]:
    """The first tokens of an answer, at most `most`, up to one that is not among `words`: values without an end token
    end there."""
    return [*takewhile(lambda token: token_id(token) in words, answer[:most])]


class Names:
    """All names of low to high tokens over m tokens; their token ids are `first` … `stop` - 1.

    tables, for the samplers: cells int32 [c], tokens int32 [names, high rounded up to even], lengths int32 [names]. A
    name of length l has m^(high-l) of the c equally likely cells, so one bounded draw picks a name.
    """

    def __init__(self, m: int, low: int, high: int, first: int) -> None:
        self.low, self.high = low, high
        self.first, self.first_final, self.stop = first, first + m, first + 2 * m
        self.tokens = [f"w{t}{dot}" for dot in ("", ".") for t in range(1, m + 1)]
        cells, rows, lengths, count = [], [], [], 0
        for length in range(low, high + 1):
            codes = np.arange(m**length)
            digits = codes[:, None] // m ** np.arange(length)[::-1] % m + first
            digits[:, -1] += m
            rows.append(np.pad(digits, ((0, 0), (0, high + high % 2 - length))))
            lengths.append(np.full(len(codes), length))
            cells.append(np.repeat(count + codes, m ** (high - length)))
            count += len(codes)
        joined = (np.concatenate(parts).astype(np.int32) for parts in (cells, rows, lengths))
        self.tables: tuple[np.ndarray, np.ndarray, np.ndarray] = tuple(joined)  # type: ignore[assignment]

    def read(self, vocab: Vocab, tokens: list[int], at: int) -> tuple[tuple[int, ...], int]:
        """The name that starts at `at`, and where it ends."""
        stop = at
        while stop < len(tokens) and self.first <= tokens[stop] < self.first_final:
            stop += 1
        if stop >= len(tokens) or not self.first_final <= tokens[stop] < self.stop:
            raise vocab.unlike(tokens, stop, "a name" if stop == at else "the rest of a name")
        length = stop + 1 - at
        if not self.low <= length <= self.high:
            lengths = f"{self.low} to {self.high}" if self.low < self.high else f"{self.low}"
            raise Malformed(at, f"expected a name of {lengths} tokens, got {length}")
        return tuple(tokens[at : stop + 1]), stop + 1


class PlainNames(Names):
    """N names of one token each, w1 … wN, all equally likely; they have no cells."""

    def __init__(self, N: int, first: int) -> None:
        self.low = self.high = 1
        self.first = self.first_final = first
        self.stop = first + N
        self.tokens = [f"w{t}" for t in range(1, N + 1)]
        row = np.arange(first, first + N, dtype=np.int32)
        self.tables = np.empty(0, np.int32), np.stack([row, np.zeros_like(row)], 1), np.ones_like(row)


def check_names(spec: TaskSpec, m: int, low: int, high: int, N: int) -> None:
    """Validate the name_vocab, min_name_len and max_name_len of a Spec: there must be N different names."""
    if high < low:
        raise spec.refuse("max_name_len", f"an integer >= min_name_len ({low})", high)
    if (high - low + 1) * m**high > MAX_CELLS:
        raise spec.refuse("name_vocab", f"fewer names (lengths x name_vocab^max_name_len <= {MAX_CELLS})", m)
    if (available := sum(m**length for length in range(low, high + 1))) < N:
        raise spec.refuse(
            "N", f"at most {available}, the number of different names of {low} to {high} tokens out of {m}", N
        )


@njit(cache=True)
def room_for_names(lengths):
    """The arrays `seen` and `stamp` of `draw_names`."""
    return np.zeros(len(lengths), np.int32), np.zeros(1, np.int32)


@njit(cache=True)
def draw_names(state, gamma, n, cells, seen, stamp, names):
    """Set names[:n] to n different names in random order. It needs room for n + 2 names, or for all without cells.
    seen[name] == stamp[0]: the name has been drawn already."""
    stamp[0] += 1
    now = stamp[0]
    if len(cells) == 0:
        for name in range(len(seen)):
            names[name] = name
        return shuffle(state, gamma, names, len(seen), n)
    count = 0
    while count < n:  # the next draw overwrites duplicates; a surplus name at the end is not used
        state, a, b = two_below(state, gamma, len(cells), len(cells))
        for cell in (a, b):
            name = cells[cell]
            names[count] = name
            count += seen[name] != now
            seen[name] = now
    if count > n:
        seen[names[n]] = 0
    # Likely (short) names tend to be drawn first.
    return shuffle(state, gamma, names, n, n)


@njit(cache=True)
def write_name(tokens, at, names, lengths, name):
    """Write a name at position `at`; returns the position after it. It always writes names.shape[1] tokens: the next
    write overwrites the surplus, and no branch depends on the draw.

    Two tokens per step and unsigned indices (numba checks others for negative ones) make all of Depo twice as fast.
    """
    row = np.uint64(name)
    for t in range(0, names.shape[1], 2):
        place, column = np.uint64(at + t), np.uint64(t)
        tokens[place] = names[row, column]
        tokens[place + _U1] = names[row, column + _U1]
    return at + lengths[row]
