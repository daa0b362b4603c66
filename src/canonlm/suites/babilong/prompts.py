"""Prompts: an instruction, solved examples, the text in tags, the question.

The stories have other people, places and things than the examples, so these are never a right answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canonlm.core.safe_yaml import read_yaml

PROMPTS: dict[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))[0]


def prompt(task: str, sentences: Sequence[str], question: str) -> str:
    """The prompt; it ends with "Answer:", without a blank."""
    examples = [
        f"{_text_and_question(text, example_question)} {answer}"
        for text, example_question, answer in PROMPTS[task]["examples"]
    ]
    return "\n\n".join([PROMPTS[task]["instruction"], *examples, _text_and_question(" ".join(sentences), question)])


def question_of(prompt: str) -> str:
    """The question at the end of a prompt."""
    return prompt.rpartition("\nQuestion: ")[2].removesuffix("\nAnswer:")


def _text_and_question(text: str, question: str) -> str:
    return f"<context>\n{text}\n</context>\nQuestion: {question}\nAnswer:"
