"""The data types of tasks: vocabulary, instances with their questions, samples, verdicts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from canonlm.core.errors import expected

Slice = dict[str, int | str]
LONGEST_SHOWN = 60  # characters of a setting in a task's repr: a setting can be a whole grammar


@dataclass(frozen=True)
class Query:
    """One graded answer, tokens[start:stop], without its marker. Its question is tokens[question_start:start] (-1: no
    question).

    slice: the slice that the answer counts for. Its first key is the task's primary scale of difficulty. An answer with
    several keys ({"n": 70, "depth": 2}) counts once for each.
    """

    start: int
    stop: int
    slice: Slice
    question_start: int = -1


def plain_slice(where: Mapping[str, Any]) -> Slice:
    """The slice with Python's own values: 3 and `np.int64(3)` are one, and only the first can be written as JSON."""
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in where.items()}


@dataclass(frozen=True)
class Instance:
    """A result of `Task.draw`: tokens (names or ids), the answers among them, and facts for people."""

    tokens: Sequence[str | int] | np.ndarray
    queries: Sequence[Query]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Answer:
    """A graded answer among the tokens that `Task.draw` returns, and its slice: `Answer("odd", bits=8)`."""

    def __init__(self, *tokens: str | int, **slice: int | str) -> None:
        self.tokens, self.slice = tokens, slice


Drawn = Instance | Sequence[str | int | Answer]
"""The possible results of `Task.draw`."""


def as_instance(drawn: Drawn) -> Instance:
    """An `Instance`: answers among the tokens become queries."""
    if isinstance(drawn, Instance):
        return drawn
    tokens: list[str | int] = []
    queries = []
    for part in drawn:
        if isinstance(part, Answer):
            queries.append(Query(len(tokens), len(tokens) + len(part.tokens), part.slice))
            tokens += part.tokens
        else:
            tokens.append(part)
    return Instance(tokens, queries)


@dataclass(frozen=True, eq=False)
class Sample:
    """One instance, int32 arrays: labels[i] is the target for tokens[i], or -100 (the model shifts)."""

    tokens: np.ndarray
    labels: np.ndarray
    meta: dict[str, Any]  # facts for people (n, words, …) and `queries`

    @property
    def queries(self) -> tuple[Query, ...]:
        return self.meta["queries"]


@dataclass(frozen=True)
class Verdict:
    """The grade of one query; `why` is "" when correct, otherwise the model's answer and the right one."""

    correct: bool
    slice: Slice
    why: str


class Placed(NamedTuple):
    """A complete instance in a window, at row[start:stop]."""

    start: int
    stop: int
    sample: Sample


class Malformed(ValueError):
    """A token sequence that is not a sample of the task."""

    def __init__(self, position: int, what: str) -> None:
        super().__init__(f"position {position}: {what}")


def token_id(token: object) -> int:
    """The token as an int; -1 if it is not an integer, or a bool."""
    return int(token) if isinstance(token, int | np.integer) and not isinstance(token, bool) else -1


class Vocab:
    """The tokens in order: names for people, ids for models. `markers` structure a sample, the others carry content."""

    def __init__(self, names: Iterable[str], markers: Iterable[str] = ()) -> None:
        self.names = tuple(names)
        self.ids = {name: i for i, name in enumerate(self.names)}
        if len(self.ids) < len(self.names) or not all(isinstance(name, str) for name in self.names):
            wrong = [name for i, name in enumerate(self.names) if self.ids[name] != i or not isinstance(name, str)]
            raise expected("vocab", "different texts, the names of the tokens", wrong[0])
        for name in (markers := tuple(markers)):
            if name not in self.ids:
                raise expected("markers", "names of the vocabulary", name)
        self.markers = frozenset(self.ids[name] for name in markers)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, token: object) -> str:
        """The token's name; for anything else a name such as <99999>, <-1>, <None>."""
        if 0 <= (number := token_id(token)) < len(self.names):
            return self.names[number]
        try:
            shown = repr(token)[1:-1] if isinstance(token, str) else str(token)  # escapes line breaks
        except Exception:  # an integer too long to print, lists nested too deeply, an object with a broken __str__
            shown = type(token).__name__
        return f"<{shown if len(shown) <= LONGEST_SHOWN else f'{shown[:LONGEST_SHOWN]}…'}>"

    def text(self, tokens: Iterable[object]) -> str:
        return " ".join(map(self.name, tokens))

    def show(self, sample: Sample) -> str:
        """The sample as one readable line."""
        return self.text(sample.tokens.tolist())

    def after(self, tokens: Sequence[int], at: int, marker: int) -> int:
        """The position after the marker at position `at`. Malformed if there is another token."""
        if at >= len(tokens) or tokens[at] != marker:
            raise self.unlike(tokens, at, self.names[marker])
        return at + 1

    def unlike(self, tokens: Sequence[int], at: int, what: str) -> Malformed:
        """The error for tokens that do not have `what` at position `at`."""
        return Malformed(at, f"expected {what}, got {self.name(tokens[at]) if at < len(tokens) else 'the end'}")
