"""Capo's stream: pass after pass over all documents, each pass in an order of its own, cut into windows.

In every pass each document (a biography or, if training has questions, a question with its answer) occurs exactly once,
at the place that a keyed permutation gives it. The documents of a pass follow one another without a gap, so a window
boundary may cut one in two. The last window of a pass is padded with bos, label -100 and a doc id of its own.

To find the first document of a window, a pass has a table with the start of every EVERY-th document. It is made from
lengths alone, when the pass is first needed.

The other tasks are packed differently (`tasks.packing`): a window has instances of its own, and the end of the last one
is lost. In Capo every token of a pass occurs exactly once.
"""

import threading
from collections.abc import Callable

import numpy as np

from canonlm.core.numba_cache import njit
from canonlm.tasks.capo.documents import (
    LONGEST_PLAN,
    OF_VALUE,
    TEMPLATE,
    TextSettings,
    fixed_length,
    length_of,
    pieces_of,
    template_length,
)
from canonlm.tasks.capo.people import name_index
from canonlm.tasks.capo.tokens import BOS
from canonlm.tasks.packing import IGNORE, Windows
from canonlm.tasks.random import stream

EVERY = 128  # documents between two entries of a pass's table: 63 kB per million documents
TABLES = 4  # max number of cached tables; sampler threads read at most two passes at a time
ORDER = 200  # added to the split in the key, so that orders share no stream with texts


class Passes:
    """The windows of `passes` passes, each cut out of the tokens of one pass."""

    passes: int

    def fill(self, seed: int, split: int, start: int, loss_on_all: bool, out: Windows) -> None:
        """Write windows start, start + 1, … to the rows of `out`; windows after the end are padding."""
        count, seq_len = out.input_ids.shape
        e, begin, row = 0, 0, 0  # pass e begins with window `begin`
        while row < count and e < self.passes:
            end = begin + self.windows_of(seed, split, e, seq_len)
            if start + row < end:
                rows = slice(row, min(count, end - start))
                skipped = (start + row - begin) * seq_len  # tokens of the pass
                self.fill_rows(seed, split, e, skipped, loss_on_all, *(x[rows] for x in out))
                row = rows.stop
            e, begin = e + 1, end
        out.input_ids[row:], out.labels[row:], out.doc_ids[row:] = BOS, IGNORE, 0

    def windows_of(self, seed: int, split: int, e: int, seq_len: int) -> int:
        """The number of windows of pass e."""
        raise NotImplementedError

    def fill_rows(self, seed: int, split: int, e: int, skipped: int, loss_on_all: bool, *rows: np.ndarray) -> None:
        """Write the tokens of pass e after the first `skipped` to rows of ids, labels and documents."""
        raise NotImplementedError


class Stream(Passes):
    """`text_number(split, e)` is the text number of all documents in pass e."""

    def __init__(self, settings: TextSettings, passes: int, text_number: Callable[[int, int], int]) -> None:
        self.settings, self.passes, self.text_number = settings, passes, text_number
        self._fixed: dict[int, int] = {}  # by seed
        self._templates: dict[tuple[int, int, int], int] = {}  # by seed, split and text number
        self._tables: dict[tuple[int, int, int], np.ndarray] = {}

    def windows_of(self, seed: int, split: int, e: int, seq_len: int) -> int:
        return -(-self._total(seed, split, self.text_number(split, e)) // seq_len)

    def fill_rows(self, seed: int, split: int, e: int, skipped: int, loss_on_all: bool, *rows: np.ndarray) -> None:
        table = self._table(seed, split, e)
        entry = int(np.searchsorted(table, skipped, "right")) - 1
        at = int(table[entry]) - skipped, entry * EVERY
        _fill(seed, split, e, self.text_number(split, e), self.settings, *at, loss_on_all, *rows)

    def documents(self, seed: int, split: int, text: int, numbers: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        """(ids int32, roles int8, lengths int64) of these documents, [count, width]; padded with bos and -1."""
        ids, roles = np.full((len(numbers), width), BOS, np.int32), np.full((len(numbers), width), -1, np.int8)
        return ids, roles, _documents(seed, split, text, self.settings, numbers, ids, roles)

    def _total(self, seed: int, split: int, text: int) -> int:
        """The number of tokens in a pass; it does not depend on the order of the documents."""
        with _TABLES_LOCK:
            if seed not in self._fixed:
                self._fixed[seed] = _total_fixed(seed, self.settings)
            if (key := (seed, split, text)) not in self._templates:
                self._templates[key] = _total_templates(seed, split, text, self.settings)
            return self._fixed[seed] + self._templates[key]

    def _table(self, seed: int, split: int, e: int) -> np.ndarray:
        """int64 [ceil(documents / EVERY)]: the number of tokens before document 0, EVERY, 2 EVERY, … of the pass."""
        key = seed, split, e
        with _TABLES_LOCK:
            if (table := self._tables.get(key)) is None:
                table = np.empty(-(-self.settings.documents // EVERY), np.int64)
                _fill_table(seed, split, e, self.text_number(split, e), self.settings, table)
                while len(self._tables) >= TABLES:
                    del self._tables[next(iter(self._tables))]
                self._tables[key] = table
        return table


_TABLES_LOCK = threading.Lock()  # shared by all streams, because a stream must be picklable and a lock is not


@njit(cache=True, nogil=True)
def _total_fixed(seed, settings):
    total = 0
    for document in range(settings.documents):
        total += fixed_length(seed, document, settings)
    return total


@njit(cache=True, nogil=True)
def _total_templates(seed, split, text, settings):
    total = 0
    for i in range(settings.people):
        total += template_length(seed, split, text, i, settings)
    return total


@njit(cache=True, nogil=True)
def _fill_table(seed, split, e, text, settings, table):
    order, at = _order(seed, split, e), 0
    for place in range(settings.documents):
        if place % EVERY == 0:
            table[place // EVERY] = at
        at += length_of(seed, split, text, _document_at(order, place, settings), settings)


@njit(cache=True, nogil=True)
def _fill(seed, split, e, text, settings, at, place, loss_on_all, ids, labels, docs):
    """Fill rows of one pass; the document at `place` begins at token `at` <= 0 of the first row."""
    plan, roles = np.empty(LONGEST_PLAN, np.int64), np.empty(LONGEST_PLAN, np.int8)
    order, tokens, start = _order(seed, split, e), settings.pieces.tokens, settings.pieces.start
    size, seq_len, doc = ids.size, ids.shape[1], -1
    flat_ids, flat_labels, flat_docs = ids.reshape(-1), labels.reshape(-1), docs.reshape(-1)
    while at < 0:
        length = length_of(seed, split, text, _document_at(order, place, settings), settings)
        if at + length > 0:
            break
        at += length
        place += 1
    column = at % seq_len
    while at < size and place < settings.documents:
        count = pieces_of(seed, split, text, _document_at(order, place, settings), settings, plan, roles)
        place += 1
        column, doc = (0, 0) if column == seq_len else (column, doc + 1)
        if at >= 0:
            flat_ids[at] = BOS
            flat_labels[at] = BOS if loss_on_all else IGNORE
            flat_docs[at] = doc
        at += 1
        column += 1
        for i in range(count):
            labelled = loss_on_all or roles[i] >= OF_VALUE
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
def _documents(seed, split, text, settings, numbers, ids, all_roles):
    plan, roles = np.empty(LONGEST_PLAN, np.int64), np.empty(LONGEST_PLAN, np.int8)
    lengths = np.empty(len(numbers), np.int64)
    tokens, start = settings.pieces.tokens, settings.pieces.start
    for row in range(len(numbers)):
        count = pieces_of(seed, split, text, numbers[row], settings, plan, roles)
        ids[row, 0] = BOS
        all_roles[row, 0] = TEMPLATE
        at = 1
        for i in range(count):
            for t in range(start[plan[i]], start[plan[i] + 1]):
                ids[row, at] = tokens[t]
                all_roles[row, at] = roles[i]
                at += 1
        lengths[row] = at
    return lengths


@njit(cache=True, nogil=True)
def order_of(seed, split, e, documents):
    """The documents of a pass in its order."""
    order, out = _order(seed, split, e), np.empty(documents, np.int64)
    for place in range(documents):
        out[place] = name_index(order, place, (documents, 1, 1, 1, 1, 1, 1))
    return out


@njit(cache=True)
def _order(seed, split, e):
    """The key of a pass's order."""
    key, _ = stream(seed, ORDER + split, e, 0)
    return np.int64(key >> np.uint64(1))


@njit(cache=True)
def _document_at(order, place, settings):
    """The document at a place of the pass, in O(1), by the keyed permutation that also gives names."""
    return name_index(order, place, (settings.documents, 1, 1, 1, 1, 1, 1))
