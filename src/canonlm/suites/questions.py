"""Questions in words with one right answer each, as in retrieval suites, and their scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

Tokens = Callable[[str], int]
"""The number of tokens in a text, without special tokens."""


@dataclass(frozen=True)
class Question:
    """One prompt and its answer. `slice` is its place in the tables, such as `{"position": 2}`."""

    prompt: str
    answer: str
    slice: Mapping[str, Any] = field(default_factory=dict)


class Questions(Protocol):
    """A set of questions, each a pure function of (settings, seed, index)."""

    name: str  # in tables: "1hop-2k", "babilong-qa1-0k"
    measures: ClassVar[tuple[str, ...]]  # the keys of `grade`; the first one is the score
    max_new_tokens: int  # max tokens of an answer
    stop: Sequence[str]  # strings that end an answer

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Question: ...

    def grade(self, question: Question, answer: str) -> dict[str, bool]:
        """Whether a model's answer is right, by every measure."""
        ...


@dataclass(frozen=True)
class Score:
    """One number of an evaluation: a share of right answers, or (share=False) a loss, a perplexity, …

    `stderr` is that of a mean of `n` independent answers, None for other numbers.
    """

    measure: str
    value: float
    stderr: float | None
    n: int | None
    slice: Mapping[str, Any] = field(default_factory=dict)
    higher_is_better: bool = True
    share: bool = True


NOT_FINITE = "not_finite"
"""A measure that an entry has only if it is not 0: questions in which the model's logits were not finite (NaN)."""


def not_finite(questions: int, total: int) -> list[Score]:
    """The score for `questions` of `total` questions without finite logits; empty if all logits were finite."""
    if not questions:
        return []
    return [Score(NOT_FINITE, questions, None, total, higher_is_better=False, share=False)]


def not_finite_of(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """(questions in which the logits were not finite, all questions) of an entry of results.json; None: all finite."""
    for score in entry["scores"]:
        if score["measure"] == NOT_FINITE and not score["slice"]:
            return int(score["value"]), int(score["n"] or 0)
    return None


def share_right(measure: str, right: int, n: int, slice: Mapping[str, Any] | None = None) -> Score:
    """The share of right answers."""
    value = right / n
    return Score(measure, value, math.sqrt(value * (1 - value) / max(1, n - 1)), n, slice or {})


def scores(rows: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> list[Score]:
    """The scores of rows `{"slice": {…}, "right": {measure: bool}}`: for each measure, first over all rows, then for
    each value of each key of their slices."""
    results = []
    for measure in measures:
        results.append(_share(measure, rows, {}))
        for scale in dict.fromkeys(scale for row in rows for scale in row["slice"]):
            for value in sorted({row["slice"][scale] for row in rows if scale in row["slice"]}):
                results.append(
                    _share(measure, [row for row in rows if row["slice"].get(scale) == value], {scale: value})
                )
    return results


def _share(measure: str, rows: Sequence[Mapping[str, Any]], slice: Mapping[str, Any]) -> Score:
    return share_right(measure, sum(row["right"][measure] for row in rows), len(rows), slice)
