"""Capo's stream over texts that a chat model has written (bioR), in the place of texts from templates.

A person's last text in the file is that of the test, the one before it that of the validation splits, and the earlier
ones are those of training: pass e has text e modulo their number. Passes, their order and windows are as in
`canonlm.tasks.capo.stream`.
"""

import logging
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from canonlm.core.errors import InvalidSetting, expected, panics_raised
from canonlm.tasks.base import Malformed, Query
from canonlm.tasks.capo import bior
from canonlm.tasks.capo.documents import FIRST_NAME, OF_VALUE, TEMPLATE
from canonlm.tasks.capo.people import person
from canonlm.tasks.capo.pools import ATTRIBUTES, load
from canonlm.tasks.capo.stream import Passes, order_of
from canonlm.tasks.capo.tokens import BOS, TextVocab, open_tokenizer
from canonlm.tasks.packing import IGNORE
from canonlm.tasks.random import TEST, TRAIN

HELD_OUT = 2
"""Texts of a person that are not trained on: one of the validation splits, one of the test."""


@lru_cache(maxsize=4)
def rewritten(
    path: str, people_seed: int, people: int, passes: int, pools: str | None, tokenizer: str | None
) -> "RewrittenStream":
    """The stream of a file of texts about the people (people_seed, 0) … (people_seed, people - 1). Texts without all
    facts word for word are left out, with a warning. InvalidSetting for a file that cannot be read or in which somebody
    has too few texts."""
    try:
        read = bior.read(Path(path), people_seed, load(None if pools is None else Path(pools)))
    except ValueError as error:
        raise InvalidSetting("capo.rewrites", f"capo.rewrites: {error}") from None
    if read.missing:
        first, *others = read.missing
        more = f", and {len(others)} more facts" if others else ""
        logging.getLogger(__name__).warning("capo: texts that lack a fact are left out: %s%s", first, more)
    different = {(text.person, text.text): text for text in read.texts if len(text.spans) == 1 + len(ATTRIBUTES)}
    complete = [text for text in different.values() if text.person < people]
    complete.sort(key=lambda text: text.person)  # stable: a person's texts keep their order
    counts = np.bincount([text.person for text in complete], minlength=people)
    if (few := np.flatnonzero(counts <= HELD_OUT)).size:
        what = f"{HELD_OUT + 1} or more different texts with all facts about each of N = {people:,} people"
        raise expected("capo.rewrites", what, f"{counts[few[0]]} about person {few[0]}")
    return RewrittenStream(complete, counts, people_seed, passes, pools, tokenizer)


class RewrittenStream(Passes):
    """Texts as tokens, with the interface of `canonlm.tasks.capo.stream.Stream`, and their reader."""

    def __init__(
        self, texts: list[bior.Rewritten], counts: np.ndarray, people_seed: int, passes: int, pools: str | None,
        tokenizer: str | None,
    ) -> None:  # fmt: skip
        """texts: complete, in the order of people; counts: of texts of each person."""
        self.pools, self.passes, self.seed = load(None if pools is None else Path(pools)), passes, people_seed
        self._first, self._counts, self._person = np.cumsum(counts) - counts, counts, [each.person for each in texts]
        library = open_tokenizer(tokenizer)
        with panics_raised("capo.tokenizer"):  # a space, as before every name in running text
            encoded = library.encode_batch([f" {each.text}" for each in texts], add_special_tokens=False)
        self._lengths = np.array([1 + len(each.ids) for each in encoded])
        self._start = np.concatenate([[0], np.cumsum(self._lengths)])
        ids = np.concatenate([[-1, *each.ids] for each in encoded])
        ids_of = np.unique(ids)  # -1, for <bos>, is the first
        self._tokens = np.searchsorted(ids_of, ids).astype(np.int32)
        self.vocab, self.longest = TextVocab(library, ids_of), int(self._lengths.max())
        self._roles = np.full(len(ids), TEMPLATE, np.int8)
        self._queries: list[tuple[Query, ...]] = []
        for start, each, encoding in zip(self._start[:-1].tolist(), texts, encoded, strict=True):
            places = {key: _tokens_of(span, encoding.offsets) for key, span in each.spans.items()}
            roles = self._roles[start : start + 1 + len(encoding.ids)]
            roles[slice(*places["name"])] = FIRST_NAME
            for a, attribute in enumerate(ATTRIBUTES):
                roles[slice(*places[attribute])] = OF_VALUE + a
            self._queries.append(tuple(Query(*places[key], {"attribute": key}, 1) for key in ATTRIBUTES))
        self._numbers = {self._tokens[a:b].tobytes(): n for n, (a, b) in enumerate(pairwise(self._start.tolist()))}
        self._totals: dict[tuple[int, int], int] = {}  # tokens of a pass, by split and pass
        self._last: tuple[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] | None = None

    def fill_rows(self, seed: int, split: int, e: int, skipped: int, loss_on_all: bool, *rows: np.ndarray) -> None:
        for place, row in enumerate(zip(*rows, strict=True)):
            self._fill(*self._pass(seed, split, e), skipped + place * len(row[0]), loss_on_all, *row)

    def documents(self, seed: int, split: int, e: int, people: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        ids, roles = np.full((len(people), width), BOS, np.int32), np.full((len(people), width), -1, np.int8)
        numbers = self._texts_of(split, e, people)
        for row, number in enumerate(numbers):
            place, length = slice(self._start[number], self._start[number + 1]), self._lengths[number]
            ids[row, :length], roles[row, :length] = self._tokens[place], self._roles[place]
        return ids, roles, self._lengths[numbers]

    def read(self, tokens: list[int]) -> tuple[dict[str, Any], tuple[Query, ...]]:
        """(facts, queries). Raises Malformed for anything but a text of the file."""
        number = self._numbers.get(np.array(tokens, np.int32).tobytes())
        if number is None:
            raise Malformed(0, "expected <bos> and one of the texts")
        about = person(self.seed, self._person[number], self.pools)
        return {"name": about.name, **about.values}, self._queries[number]

    def windows_of(self, seed: int, split: int, e: int, seq_len: int) -> int:
        if (total := self._totals.get((split, e))) is None:
            numbers = self._texts_of(split, e, np.arange(len(self._counts)))
            total = self._totals[split, e] = int(self._lengths[numbers].sum())
        return -(-total // seq_len)

    def _texts_of(self, split: int, e: int, people: np.ndarray) -> np.ndarray:
        counts = self._counts[people]
        if split == TRAIN:
            return self._first[people] + e % (counts - HELD_OUT)
        return self._first[people] + counts - (1 if split == TEST else HELD_OUT)

    def _pass(self, seed: int, split: int, e: int) -> tuple[np.ndarray, np.ndarray]:
        """(the numbers of a pass's texts in order, the tokens of the pass up to the end of each)."""
        key, last = (seed, split, e), self._last
        if last is None or last[0] != key:
            numbers = self._texts_of(split, e, order_of(seed, split, e, len(self._counts)))
            last = self._last = key, (numbers, np.cumsum(self._lengths[numbers]))
        return last[1]

    def _fill(
        self, numbers: np.ndarray, ends: np.ndarray, skipped: int, loss_on_all: bool, ids: np.ndarray,
        labels: np.ndarray, docs: np.ndarray,
    ) -> None:  # fmt: skip
        """Write the tokens of a pass after the first `skipped` to a row."""
        place, at, doc = int(np.searchsorted(ends, skipped, "right")), 0, 0
        while at < len(ids) and place < len(numbers):
            number = numbers[place]
            begin = self._start[number + 1] - (ends[place] - skipped - at)  # the first one may have begun earlier
            taken = slice(begin, min(self._start[number + 1], begin + len(ids) - at))
            columns = slice(at, at + taken.stop - taken.start)
            ids[columns], docs[columns] = self._tokens[taken], doc
            labelled = loss_on_all | (self._roles[taken] >= OF_VALUE)
            labels[columns] = np.where(labelled, self._tokens[taken], IGNORE)
            at, place, doc = columns.stop, place + 1, doc + 1
        ids[at:], labels[at:], docs[at:] = BOS, IGNORE, doc


def _tokens_of(span: tuple[int, int], offsets: list[tuple[int, int]]) -> tuple[int, int]:
    """The tokens, after <bos>, that have a part of the text's span; offsets: of " " + text."""
    inside = [i for i, (a, b) in enumerate(offsets, 1) if a <= span[1] and b > span[0] + 1]
    return inside[0], inside[-1] + 1
