"""Capo's stream: pass after pass over all documents, each pass in an order of its own, cut into windows.

A document is a biography or, where some people are asked about in training, a question with its answer. Number d of the
`documents` is the biography of person d for d < people; from there on, question (d - people) % 6 about person
(d - people) // 6. In every pass each document comes exactly once, at the place that a keyed permutation gives it. The
documents of a pass follow one another without a gap, so one may lie on both sides of a window's border; behind the last
one its window is padded: bos, label -100, a doc id of its own.

To find the document with which a window starts, a pass keeps where every EVERY-th of its documents begins. That table is
made when the pass is first needed, out of lengths alone.
"""

import threading
from collections.abc import Callable
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numba import njit

from canonlm.tasks.capo.people import attributes, name, name_index
from canonlm.tasks.capo.pools import Sizes
from canonlm.tasks.capo.tokens import AFTER, ASK, ASKED, BETWEEN, BOS, DAY, FIRST, LAST, MIDDLE, MONTH
from canonlm.tasks.capo.tokens import PRONOUN, VALUE, YEAR, Pieces
from canonlm.tasks.random import below, stream, two_below
from canonlm.tasks.windows import IGNORE, Windows

EVERY = 128  # documents between two entries of a pass's table: 12 kB per million documents
TABLES = 4  # passes whose tables are kept; sampler threads are at most in two at a time
LONGEST_PLAN = 64  # pieces of a document, at most: 6 sentences of 3 + 1 + 3 + 1
ORDERS = np.array(list(permutations(range(6))), np.int8)  # the first one is ATTRIBUTES as they are
ORDER = 200  # stands in the key where samples have their split: orders share no stream with texts

# What a token is to its document; the value of attribute a is OF_VALUE + a.
TEMPLATE, FIRST_NAME, FIRST_PRONOUN, OF_VALUE = range(4)


class Law(NamedTuple):
    """What the text of a document depends on, beside the keys."""

    pieces: Pieces
    sizes: Sizes
    people: int
    documents: int  # in a pass
    permute: bool
    fullname: bool


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
        total += _fixed_length(seed, document, law)
    return total


@njit(cache=True, nogil=True)
def _total_told(seed, split, text, law):
    total = 0
    for i in range(law.people):
        total += _told_length(seed, split, text, i, law)
    return total


@njit(cache=True, nogil=True)
def _begins(seed, split, e, text, law, table):
    order, at = _order(seed, split, e), 0
    for place in range(law.documents):
        if place % EVERY == 0:
            table[place // EVERY] = at
        at += _length(seed, split, text, _document_at(order, place, law), law)


@njit(cache=True, nogil=True)
def _fill(seed, split, e, text, law, at, place, loss_on_all, ids, labels, docs):
    """Rows of one pass; the document at `place` begins at token `at` of the first row (<= 0: before it)."""
    plan, what = np.empty(LONGEST_PLAN, np.int64), np.empty(LONGEST_PLAN, np.int8)
    order, tokens, start = _order(seed, split, e), law.pieces.tokens, law.pieces.start
    size, seq_len, doc = ids.size, ids.shape[1], -1
    flat_ids, flat_labels, flat_docs = ids.reshape(-1), labels.reshape(-1), docs.reshape(-1)
    while at < 0:
        length = _length(seed, split, text, _document_at(order, place, law), law)
        if at + length > 0:
            break
        at += length
        place += 1
    while at < size and place < law.documents:
        count = _plan(seed, split, text, _document_at(order, place, law), law, plan, what)
        place += 1
        doc = doc + 1 if at % seq_len else 0
        if at >= 0:
            flat_ids[at] = BOS
            flat_labels[at] = BOS if loss_on_all else IGNORE
            flat_docs[at] = doc
        at += 1
        for i in range(count):
            labelled = loss_on_all or what[i] >= OF_VALUE
            for t in range(start[plan[i]], start[plan[i] + 1]):
                if 0 <= at < size:
                    doc = doc if at % seq_len else 0
                    flat_ids[at] = tokens[t]
                    flat_labels[at] = tokens[t] if labelled else IGNORE
                    flat_docs[at] = doc
                at += 1
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
        count = _plan(seed, split, text, numbers[row], law, plan, what)
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


@njit(cache=True)
def _length(seed, split, text, document, law):
    """How many tokens a document has: what `_plan` plans, and bos."""
    told = _told_length(seed, split, text, document, law) if document < law.people else 0
    return _fixed_length(seed, document, law) + told


@njit(cache=True)
def _fixed_length(seed, document, law):
    """The part of it that is the same in all texts: bos, names, pronouns, values; a question, whole."""
    pieces = law.pieces
    if document >= law.people:
        i, a = (document - law.people) // 6, (document - law.people) % 6
        length = 1 + _width(pieces, ASK + a, 0) + _width(pieces, ASKED + a, 0)
        return length + _name_length(seed, i, law) + _value_length(attributes(seed, i, law.sizes), a, pieces)
    i, values = document, attributes(seed, document, law.sizes)
    length = _name_length(seed, i, law)
    length = 1 + (6 * length if law.fullname else length + 5 * _width(pieces, PRONOUN, i % 2))
    for a in range(6):
        length += _value_length(values, a, pieces)
    return length


@njit(cache=True)
def _told_length(seed, split, text, i, law):
    """The part that differs: the six templates without their values (and what joining with a value changes)."""
    pieces, length = law.pieces, 0
    _, _, templates = _templates(seed, split, text, i, pieces.base)
    for a in range(6):
        length += _width(pieces, BETWEEN + a, templates[a]) + _width(pieces, AFTER + a, templates[a])
    if len(pieces.whole):
        values = attributes(seed, i, law.sizes)
        for a in range(1, 6):
            if whole := _whole(values, a, templates[a], pieces):
                length += pieces.start[whole + 3] - pieces.start[whole] - _value_length(values, a, pieces)
                length -= _width(pieces, BETWEEN + a, templates[a]) + _width(pieces, AFTER + a, templates[a])
    return length


@njit(cache=True)
def _name_length(seed, i, law):
    first, middle, last = name(seed, i, law.sizes)
    return _width(law.pieces, FIRST, first) + _width(law.pieces, MIDDLE, middle) + _width(law.pieces, LAST, last)


@njit(cache=True)
def _value_length(values, a, pieces):
    if a > 0:
        return _width(pieces, VALUE + a, _value(values, a))
    return _width(pieces, MONTH, values[0]) + _width(pieces, DAY, values[1]) + _width(pieces, YEAR, values[2])


@njit(cache=True)
def _width(pieces, kind, i):
    p = pieces.base[kind] + i
    return pieces.start[p + 1] - pieces.start[p]


@njit(cache=True)
def _plan(seed, split, text, document, law, plan, what):
    """Which pieces make up a document, and what each is; returns how many."""
    if document < law.people:
        return _biography(seed, split, text, document, law, plan, what)
    question = document - law.people
    return _question(seed, question // 6, question % 6, law, plan, what)


@njit(cache=True)
def _question(seed, i, a, law, plan, what):
    base = law.pieces.base
    what[:] = TEMPLATE
    plan[0] = base[ASK + a]
    count = _put_name(seed, i, law, plan, 1)
    what[1:count] = FIRST_NAME
    plan[count] = base[ASKED + a]
    value = count + 1
    count = _put_value(attributes(seed, i, law.sizes), a, base, plan, value)
    what[value:count] = OF_VALUE + a
    return count


@njit(cache=True)
def _biography(seed, split, text, i, law, plan, what):
    base = law.pieces.base
    state, gamma, templates = _templates(seed, split, text, i, base)
    order = 0
    if law.permute:
        state, order = below(state, gamma, len(ORDERS))
    values = attributes(seed, i, law.sizes)
    count = 0
    for told in range(6):
        a = ORDERS[order, told]
        subject = count
        if told == 0 or law.fullname:
            count = _put_name(seed, i, law, plan, count)
            what[subject:count] = FIRST_NAME if told == 0 else TEMPLATE
        else:
            plan[count] = base[PRONOUN] + i % 2
            what[count] = FIRST_PRONOUN if told == 1 else TEMPLATE
            count += 1
        whole = _whole(values, a, templates[a], law.pieces)
        plan[count] = whole if whole else base[BETWEEN + a] + templates[a]
        what[count] = TEMPLATE
        start = count + 1
        if whole:
            plan[start] = whole + 1
            count = start + 1
        else:
            count = _put_value(values, a, base, plan, start)
        what[start:count] = OF_VALUE + a
        plan[count] = whole + 2 if whole else base[AFTER + a] + templates[a]
        what[count] = TEMPLATE
        count += 1
    return count


@njit(cache=True)
def _templates(seed, split, text, i, base):
    """(state, gamma, the six templates) of a text: each uniform, from a stream that the order is drawn from, too."""
    state, gamma = stream(seed, split, i, text)
    state, t0, t1 = two_below(state, gamma, base[BETWEEN + 1] - base[BETWEEN], base[BETWEEN + 2] - base[BETWEEN + 1])
    state, t2, t3 = two_below(state, gamma, base[BETWEEN + 3] - base[BETWEEN + 2], base[BETWEEN + 4] - base[BETWEEN + 3])
    state, t4, t5 = two_below(state, gamma, base[BETWEEN + 5] - base[BETWEEN + 4], base[BETWEEN + 6] - base[BETWEEN + 5])
    return state, gamma, (t0, t1, t2, t3, t4, t5)


@njit(cache=True)
def _whole(values, a, template, pieces):
    """The first of the three pieces that stand for this sentence where its value is joined with it, else 0."""
    if a == 0 or len(pieces.whole) == 0:
        return np.int64(0)
    return np.int64(pieces.whole[pieces.base[BETWEEN + a] - pieces.base[BETWEEN] + template, _value(values, a)])


@njit(cache=True)
def _put_name(seed, i, law, plan, count):
    first, middle, last = name(seed, i, law.sizes)
    plan[count] = law.pieces.base[FIRST] + first
    plan[count + 1] = law.pieces.base[MIDDLE] + middle
    plan[count + 2] = law.pieces.base[LAST] + last
    return count + 3


@njit(cache=True)
def _put_value(values, a, base, plan, count):
    if a > 0:
        plan[count] = base[VALUE + a] + _value(values, a)
        return count + 1
    plan[count] = base[MONTH] + values[0]
    plan[count + 1] = base[DAY] + values[1]
    plan[count + 2] = base[YEAR] + values[2]
    return count + 3


@njit(cache=True)
def _value(values, a):
    """The index of the value of attribute a > 0; company and company city have the same one."""
    return values[min(a, 4) + 2]
