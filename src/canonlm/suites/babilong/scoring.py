"""Grades free-form answers by the rule of the public Babilong scores (github.com/booydar/babilong)."""

import re
from collections.abc import Iterable

TAGS = ("<context>", "<example>")
"""Tags with which models begin another question of their own; `.` and these end an answer."""


def right(answer_text: str, answer: str, question: str, labels: Iterable[str]) -> bool:
    """Whether the answer names the right label, and no other label that is not in the question.

    Only the text before the first full stop and before a new tag is read; case does not matter. A label must be a whole
    word.
    """
    read = answer_text.lower()
    for end in (".", *TAGS):
        read = read.partition(end)[0]
    labels = {label.lower() for label in labels}
    return _named(read, labels) - _named(question.lower(), labels) == {answer.lower()}


def _named(text: str, labels: Iterable[str]) -> set[str]:
    return {label for label in labels if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text)}
