"""Capo's sentences: for every attribute at least 45 templates and one question.

A template starts with {subject} and has one {value}: "{subject} was born on {value}." The subject is a full name, "He"
or "She", and sentences come in any order, so no template contains "their", "also" or "there". A space precedes {value},
and a space, comma or period follows it, so a tokenizer that splits at spaces and punctuation, like GPT-2's, separates
template and value.
"""

from pathlib import Path

from canonlm.tasks.capo.pools import ATTRIBUTES


def _read(attribute: str) -> tuple[str, ...]:
    path = Path(__file__).parent / "data" / "templates" / f"{attribute.replace(' ', '_')}.txt"
    return tuple(path.read_text(encoding="utf-8").splitlines())


TEMPLATES = {attribute: _read(attribute) for attribute in ATTRIBUTES}

QUESTIONS = {
    "birth date": "What is the birth date of {name}?",
    "birth city": "What is the birth city of {name}?",
    "university": "Which university did {name} attend?",
    "field": "What did {name} major in?",
    "company city": "In which city does {name} work?",
    "company": "Which company does {name} work for?",
}


def split(template: str) -> tuple[str, str]:
    """(the words between subject and value, without the space before the value; the words after the value)."""
    between, after = template.removeprefix("{subject}").split(" {value}")
    return between, after
