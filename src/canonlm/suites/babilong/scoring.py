"""Whether an answer in free words is right: the rule of the public Babilong scores (github.com/booydar/babilong)."""

import re
from collections.abc import Iterable

TAGS = ("<context>", "<example>")
"""With which a model begins another question of its own; `.` and these end an answer."""


def right(said: str, answer: str, question: str, labels: Iterable[str]) -> bool:
    """Of the task's labels that are no words of the question, does the answer name the right one and no other?

    What is read is what stands before the first full stop and before a new tag; upper and lower case are the same. A
    label counts where it is a whole word.
    """
    read = said.lower()
    for end in (".", *TAGS):
        read = read.partition(end)[0]
    labels = {label.lower() for label in labels}
    return _named(read, labels) - _named(question.lower(), labels) == {answer.lower()}


def _named(text: str, labels: Iterable[str]) -> set[str]:
    return {label for label in labels if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text)}
