"""Reads Capo's documents back from their tokens: the person, the values and their positions."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from canonlm.tasks.base import Malformed, Query
from canonlm.tasks.capo.people import PRONOUNS
from canonlm.tasks.capo.pools import ATTRIBUTES, DAYS, MONTHS, YEARS
from canonlm.tasks.capo.tokens import (
    AFTER,
    ASK,
    ASKED,
    BETWEEN,
    BOS,
    DAY,
    FIRST,
    KINDS,
    LAST,
    MIDDLE,
    MONTH,
    PRONOUN,
    VALUE,
    YEAR,
    Text,
)

Match = tuple[str, int]  # the text, and where it ends
Statement = tuple[str, str, int, int]  # attribute, value, and start and stop of the value


class Reader:
    """Reads biographies and questions. Pieces may be parts of each other, so every possible reading is tried."""

    def __init__(self, text: Text) -> None:
        pieces, pools = text.pieces, text.pools
        words: dict[int, Any] = {FIRST: pools.first, MIDDLE: pools.middle, LAST: pools.last, PRONOUN: PRONOUNS}
        words |= {MONTH: MONTHS, DAY: DAYS, YEAR: YEARS}
        words |= {VALUE + a: pools.values[ATTRIBUTES[a]] for a in range(1, 6)}
        self._words = words
        base = pieces.base.tolist()
        self._pieces: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(KINDS)]
        for kind, entries in enumerate(self._pieces):
            for i in range(base[kind + 1] - base[kind]):
                entries.setdefault(pieces.piece(base[kind] + i), []).append(i)
        self._lengths = [sorted({len(piece) for piece in entries}) for entries in self._pieces]
        self._joined = [
            (int(row) + base[BETWEEN], int(v), *(pieces.piece(pieces.joined[row, v] + k) for k in range(3)))
            for row, v in zip(*pieces.joined.nonzero(), strict=True)
        ]
        self._base, self._city_of = base, dict(zip(pools.company, pools.company_city, strict=True))

    def read(self, tokens: list[int]) -> tuple[dict[str, Any], tuple[Query, ...]]:
        """(facts, queries). Raises Malformed for anything but a document of this task."""
        if not tokens or tokens[0] != BOS:
            raise Malformed(0, "expected <bos>")
        for question_start, name, value in self._questions(tokens):
            attribute, answer, start, stop = value
            facts = {"name": name, "question": attribute, "answer": answer}
            return facts, (Query(start, stop, {"question": attribute}, question_start),)
        furthest = [1]
        for name, statements in self._biographies(tokens, 1, "", "", [], furthest):
            values = {attribute: value for _, (attribute, value, _, _) in statements}
            if values["company city"] != self._city_of[values["company"]]:
                continue
            queries = (
                Query(start, stop, {"attribute": attribute}, question_start)
                for question_start, (attribute, _, start, stop) in statements
            )
            return {"name": name, **values}, tuple(queries)
        raise Malformed(furthest[0], "expected a biography of six sentences, or a question with its answer")

    def _questions(self, tokens: list[int]) -> Iterator[tuple[int, str, Statement]]:
        for a in range(6):
            for _, at in self._find(ASK + a, tokens, 1):
                for name, at_tail in self._name(tokens, at):
                    for _, start in self._find(ASKED + a, tokens, at_tail):
                        for value, stop in self._value(a, tokens, start):
                            if stop == len(tokens):
                                yield 1, name, (ATTRIBUTES[a], value, start, stop)

    def _biographies(
        self,
        tokens: list[int],
        at: int,
        name: str,
        pronoun: str,
        statements: list[tuple[int, Statement]],
        furthest: list[int],
    ) -> Iterator[tuple[str, list[tuple[int, Statement]]]]:
        """Every way to read the rest of a biography as sentences on attributes missing from `statements`."""
        furthest[0] = max(furthest[0], at)
        if len(statements) == 6:
            if at == len(tokens):
                yield name, statements
            return
        subjects = [(True, *match) for match in self._name(tokens, at)]
        subjects += [(False, *match) for match in self._words_at(PRONOUN, tokens, at) if name]
        for is_name, subject, middle in subjects:
            if (name if is_name else pronoun) not in ("", subject):
                continue
            people = (subject, pronoun) if is_name else (name, subject)
            for a, attribute in enumerate(ATTRIBUTES):
                if attribute in {done for _, (done, *_) in statements}:
                    continue
                for value, end in self._sentence(a, tokens, middle):
                    yield from self._biographies(tokens, end, *people, [*statements, (at, value)], furthest)

    def _sentence(self, a: int, tokens: list[int], at: int) -> Iterator[tuple[Statement, int]]:
        """Every way to read what follows a subject as a sentence on attribute a, and where it ends."""
        for between, start in self._find(BETWEEN + a, tokens, at):
            for value, stop in self._value(a, tokens, start):
                for after, end in self._find(AFTER + a, tokens, stop):
                    if after == between:
                        yield (ATTRIBUTES[a], value, start, stop), end
        for template, v, between_piece, value_piece, after_piece in self._joined:
            if self._base[BETWEEN + a] <= template < self._base[BETWEEN + a + 1]:
                joined = [*between_piece, *value_piece, *after_piece]
                if tokens[at : at + len(joined)] == joined:
                    start = at + len(between_piece)
                    statement = ATTRIBUTES[a], self._words[VALUE + a][v], start, start + len(value_piece)
                    yield statement, at + len(joined)

    def _name(self, tokens: list[int], at: int) -> Iterator[Match]:
        return self._row((FIRST, MIDDLE, LAST), "{} {} {}", tokens, at)

    def _value(self, a: int, tokens: list[int], at: int) -> Iterator[Match]:
        return self._words_at(VALUE + a, tokens, at) if a else self._row((MONTH, DAY, YEAR), "{} {}, {}", tokens, at)

    def _row(self, kinds: tuple[int, int, int], text: str, tokens: list[int], at: int) -> Iterator[Match]:
        for one, second in self._words_at(kinds[0], tokens, at):
            for two, third in self._words_at(kinds[1], tokens, second):
                for three, stop in self._words_at(kinds[2], tokens, third):
                    yield text.format(one, two, three), stop

    def _words_at(self, kind: int, tokens: list[int], at: int) -> Iterator[Match]:
        return ((str(self._words[kind][i]), stop) for i, stop in self._find(kind, tokens, at))

    def _find(self, kind: int, tokens: list[int], at: int) -> Iterator[tuple[int, int]]:
        """Every piece of this kind that starts at `at`: its index, and where it ends."""
        for length in self._lengths[kind]:
            if at + length <= len(tokens):
                for i in self._pieces[kind].get(tuple(tokens[at : at + length]), ()):
                    yield i, at + length


@cache
def reader_of(text: Text) -> Reader:
    """The reader of a text, cached because it takes longer to make than the rest of the task."""
    return Reader(text)
