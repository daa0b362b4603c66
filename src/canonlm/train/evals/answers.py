"""Counts of an evaluation: right answers by slice, and questions in which the model's logits are not finite."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from canonlm.tasks import Task
from canonlm.tasks.base import Query, Sample, Slice, Verdict
from canonlm.tasks.tally import Tally

MAX_QUESTION = 64
"""A question keeps its last MAX_QUESTION tokens."""


@dataclass(frozen=True)
class Answer:
    """One graded answer in the words of the task. `question`: the sample before the answer, at most `MAX_QUESTION`
    tokens. `finite`: whether the logits were finite at every token of the model's answer."""

    slice: Slice
    question: str
    answer: str
    model_answer: str
    correct: bool
    finite: bool


Keep = Callable[[Answer], object]


class Answers:
    """Counts answers. `keep` is called with each of them."""

    def __init__(self, task: Task, keep: Keep | None = None) -> None:
        self._task, self._keep, self._tally = task, keep, Tally(task.slices())
        self._questions = self._not_finite = 0

    def add(self, sample: Sample, query: Query, model_answer: Iterable[int], verdict: Verdict, finite: bool) -> None:
        self._tally.add(verdict)
        self._questions += 1
        self._not_finite += not finite
        if self._keep is not None:
            self._keep(self._in_words(sample, query, [int(token) for token in model_answer], verdict, finite))

    def grade(self, sample: Sample, model_answers: Sequence[Iterable[int]], finite: Sequence[bool]) -> None:
        """Grade one answer to each query, and count it."""
        verdicts = self._task.grade(sample, list(model_answers))
        for each in zip(sample.queries, model_answers, verdicts, finite, strict=True):
            self.add(sample, *each)

    def result(self) -> dict[str, Any]:
        """`{"slices": [{"slice", "correct", "total"}, …]}`, and `"not_finite": {"questions", "asked"}` where the logits
        were not finite in some of the questions."""
        bad = {"not_finite": {"questions": self._not_finite, "asked": self._questions}} if self._not_finite else {}
        return {"slices": self._tally.rows(), **bad}

    def _in_words(
        self, sample: Sample, query: Query, model_answer: Sequence[int], verdict: Verdict, finite: bool
    ) -> Answer:
        text, tokens = self._task.vocab.text, sample.tokens
        begin = max(0, query.question_start)
        cut = max(begin, query.start - MAX_QUESTION)
        return Answer(
            dict(verdict.slice),
            ("… " if cut > begin else "") + text(tokens[cut : query.start].tolist()),
            text(sample.labels[query.start : query.stop].tolist()),
            text(model_answer),
            bool(verdict.correct),
            finite,
        )
