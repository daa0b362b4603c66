"""What an evaluation counts: right answers by slice, and questions in which the model's logits are not finite."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from canonlm.tasks import Task
from canonlm.tasks.base import Query, Sample, Slice, Verdict
from canonlm.tasks.tally import Tally

MAX_QUESTION = 64
"""Tokens of a question that are kept, the last ones."""


@dataclass(frozen=True)
class Answer:
    """One graded answer in the words of the task. `question`: what stands before it in the sample, at most
    `MAX_QUESTION` tokens. `finite`: whether the logits were finite at every token that was said."""

    slice: Slice
    question: str
    answer: str
    said: str
    correct: bool
    finite: bool


Keep = Callable[[Answer], object]


class Answers:
    """Counts answers. `keep`, where it is given, is told each by itself."""

    def __init__(self, task: Task, keep: Keep | None = None) -> None:
        self._task, self._keep, self._tally = task, keep, Tally(task.slices())
        self._asked = self._not_finite = 0

    def add(self, sample: Sample, query: Query, said: Iterable[int], verdict: Verdict, finite: bool) -> None:
        self._tally.add(verdict)
        self._asked += 1
        self._not_finite += not finite
        if self._keep is not None:
            self._keep(self._in_words(sample, query, [int(token) for token in said], verdict, finite))

    def result(self) -> dict[str, Any]:
        """`{"slices": [{"slice", "correct", "total"}, …]}`, and `"not_finite": {"questions", "asked"}` where the logits
        were not finite in some of the questions."""
        bad = {"not_finite": {"questions": self._not_finite, "asked": self._asked}} if self._not_finite else {}
        return {"slices": self._tally.rows(), **bad}

    def _in_words(self, sample: Sample, query: Query, said: Sequence[int], verdict: Verdict, finite: bool) -> Answer:
        text, tokens = self._task.vocab.text, sample.tokens
        begin = max(0, query.asked)
        cut = max(begin, query.start - MAX_QUESTION)
        return Answer(
            dict(verdict.slice),
            ("… " if cut > begin else "") + text(tokens[cut : query.start].tolist()),
            text(tokens[query.start : query.stop].tolist()),
            text(said),
            bool(verdict.correct),
            finite,
        )
