"""Capo's sentences: for every attribute at least 45 ways to say it, and a question that asks for it.

A template starts with {subject} and has one {value}: "{subject} was born on {value}." The subject is a full name, "He"
or "She", and sentences come in any order, so no template says "their", "also" or "there". Before {value} there is a
space, after it a space, comma or period: a tokenizer that splits at blanks and punctuation, as GPT-2's does, cuts
template and value apart.
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
