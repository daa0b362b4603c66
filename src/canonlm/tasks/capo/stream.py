"""Capo's stream: pass after pass over all documents, each pass in an order of its own, cut into windows.

In every pass each document (a biography or, where some people are asked about in training, a question with its answer)
comes exactly once, at the place that a keyed permutation gives it. The documents of a pass follow one another without a
gap, so one may lie on both sides of a window's border; behind the last one its window is padded: bos, label -100, a doc
id of its own.

To find the document with which a window starts, a pass keeps where every EVERY-th of its documents begins. The table is
made when the pass is first needed, out of lengths alone.

This is not the packing of the other tasks (`tasks.packing`). There a window is made of instances of its own, and the
end of the last one is lost; here every token of a pass comes up once.
"""

import threading
from collections.abc import Callable

import numpy as np
from numba import njit

from canonlm.tasks.capo.documents import (
    LONGEST_PLAN,
    OF_VALUE,
    TEMPLATE,
    Law,
    fixed_length,
    length_of,
    pieces_of,
    told_length,
)
from canonlm.tasks.capo.people import name_index
from canonlm.tasks.capo.tokens import BOS
from canonlm.tasks.packing import IGNORE, Windows
from canonlm.tasks.random import stream

EVERY = 128  # documents between two entries of a pass's table: 63 kB per million documents
TABLES = 4  # passes whose tables are kept; sampler threads are at most in two at a time
ORDER = 200  # stands in the key where texts have their split: orders share no stream with them


class Stream:
    """The windows of `passes` passes. `text_number(split, e)`: which of a person's texts pass e has."""

    def __init__(self, law: Law, passes: int, text_number: Callable[[int, int], int]) -> None:
        self.law, self.passes, self.text_number = law, passes, text_number
        self._fixed: dict[int, int] = {}  # by seed
        self._told: dict[tuple[int, int, int], int] = {}  # by seed, split and text number
        self._tables: dict[tuple[int, int, int], np.ndarray] = {}

    def windows(self, seed: int, split: int, seq_len: int) -> int:
        """How many windows there are before the stream ends."""
        return sum(self._windows_of(seed, split, e, seq_len) for e in range(self.passes))

    def fill(self, seed: int, split: int, start: int, loss_on_all: bool, out: Windows) -> None:
        """The rows of `out` become windows start, start + 1, …; those after the end are padding."""
        count, seq_len = out.input_ids.shape
        e, begin, row = 0, 0, 0  # pass e begins with window `begin`
        while row < count and e < self.passes:
            end = begin + self._windows_of(seed, split, e, seq_len)
            if start + row < end:
                rows = slice(row, min(count, end - start))
                skipped = (start + row - begin) * seq_len  # tokens of the pass
                table = self._table(seed, split, e)
                entry = int(np.searchsorted(table, skipped, "right")) - 1
                at = int(table[entry]) - skipped, entry * EVERY
                _fill(seed, split, e, self.text_number(split, e), self.law, *at, loss_on_all, *(x[rows] for x in out))
                row = rows.stop
            e, begin = e + 1, end
        out.input_ids[row:], out.labels[row:], out.doc_ids[row:] = BOS, IGNORE, 0

    def documents(self, seed: int, split: int, text: int, numbers: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        """(ids int32, what int8, lengths int64) of these documents, [count, width]; behind a document: bos, -1."""
        ids, what = np.full((len(numbers), width), BOS, np.int32), np.full((len(numbers), width), -1, np.int8)
        return ids, what, _documents(seed, split, text, self.law, numbers, ids, what)

    def _windows_of(self, seed: int, split: int, e: int, seq_len: int) -> int:
        return -(-self._total(seed, split, self.text_number(split, e)) // seq_len)

    def _total(self, seed: int, split: int, text: int) -> int:
        """Tokens of a pass; the order of the documents does not matter to it."""
        with _MAKING:
            if seed not in self._fixed:
                self._fixed[seed] = _total_fixed(seed, self.law)
            if (key := (seed, split, text)) not in self._told:
                self._told[key] = _total_told(seed, split, text, self.law)
            return self._fixed[seed] + self._told[key]

    def _table(self, seed: int, split: int, e: int) -> np.ndarray:
        """int64 [ceil(documents / EVERY)]: how many tokens of the pass come before document 0, EVERY, 2 EVERY, …"""
        key = seed, split, e
        with _MAKING:
            if (table := self._tables.get(key)) is None:
                table = np.empty(-(-self.law.documents // EVERY), np.int64)
                _begins(seed, split, e, self.text_number(split, e), self.law, table)
                while len(self._tables) >= TABLES:
                    del self._tables[next(iter(self._tables))]
                self._tables[key] = table
        return table


_MAKING = threading.Lock()  # not a stream's own: streams travel to other processes, locks do not


@njit(cache=True, nogil=True)
def _total_fixed(seed, law):
    total = 0
    for document in range(law.documents):
        total += fixed_length(seed, document, law)
    return total


@njit(cache=True, nogil=True)
def _total_told(seed, split, text, law):
    total = 0
    for i in range(law.people):
        total += told_length(seed, split, text, i, law)
    return total


@njit(cache=True, nogil=True)
def _begins(seed, split, e, text, law, table):
    order, at = _order(seed, split, e), 0
    for place in range(law.documents):
        if place % EVERY == 0:
            table[place // EVERY] = at
        at += length_of(seed, split, text, _document_at(order, place, law), law)


@njit(cache=True, nogil=True)
def _fill(seed, split, e, text, law, at, place, loss_on_all, ids, labels, docs):
    """Rows of one pass; the document at `place` begins at token `at` of the first row (<= 0: before it)."""
    plan, what = np.empty(LONGEST_PLAN, np.int64), np.empty(LONGEST_PLAN, np.int8)
    order, tokens, start = _order(seed, split, e), law.pieces.tokens, law.pieces.start
    size, seq_len, doc = ids.size, ids.shape[1], -1
    flat_ids, flat_labels, flat_docs = ids.reshape(-1), labels.reshape(-1), docs.reshape(-1)
    while at < 0:
        length = length_of(seed, split, text, _document_at(order, place, law), law)
        if at + length > 0:
            break
        at += length
        place += 1
    column = at % seq_len
    while at < size and place < law.documents:
        count = pieces_of(seed, split, text, _document_at(order, place, law), law, plan, what)
        place += 1
        column, doc = (0, 0) if column == seq_len else (column, doc + 1)
        if at >= 0:
            flat_ids[at] = BOS
            flat_labels[at] = BOS if loss_on_all else IGNORE
            flat_docs[at] = doc
        at += 1
        column += 1
        for i in range(count):
            labelled = loss_on_all or what[i] >= OF_VALUE
            for t in range(start[plan[i]], start[plan[i] + 1]):
                column, doc = (0, 0) if column == seq_len else (column, doc)
                if 0 <= at < size:
                    flat_ids[at] = tokens[t]
                    flat_labels[at] = tokens[t] if labelled else IGNORE
                    flat_docs[at] = doc
                at += 1
                column += 1
    for rest in range(at, size):  # of the last row
        flat_ids[rest] = BOS
        flat_labels[rest] = IGNORE
        flat_docs[rest] = doc + 1


@njit(cache=True, nogil=True)
def _documents(seed, split, text, law, numbers, ids, what_of):
    plan, what = np.empty(LONGEST_PLAN, np.int64), np.empty(LONGEST_PLAN, np.int8)
    lengths = np.empty(len(numbers), np.int64)
    tokens, start = law.pieces.tokens, law.pieces.start
    for row in range(len(numbers)):
        count = pieces_of(seed, split, text, numbers[row], law, plan, what)
        ids[row, 0] = BOS
        what_of[row, 0] = TEMPLATE
        at = 1
        for i in range(count):
            for t in range(start[plan[i]], start[plan[i] + 1]):
                ids[row, at] = tokens[t]
                what_of[row, at] = what[i]
                at += 1
        lengths[row] = at
    return lengths


@njit(cache=True)
def _order(seed, split, e):
    """The key of a pass's order."""
    key, _ = stream(seed, ORDER + split, e, 0)
    return np.int64(key >> np.uint64(1))


@njit(cache=True)
def _document_at(order, place, law):
    """The permutation that hands out names serves here, too: O(1) for any place."""
    return name_index(order, place, (law.documents, 1, 1, 1, 1, 1, 1))
