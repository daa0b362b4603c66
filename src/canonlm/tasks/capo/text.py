"""A biography (bioS) as text: six sentences, one per attribute, from explicit choices.

The first sentence names the person, the others say "He" or "She" (variant fullname: all of them name the person). Every
sentence, including the first, has one space before it. Templates and order are arguments.
"""

from collections.abc import Sequence

from canonlm.tasks.capo.people import Person
from canonlm.tasks.capo.pools import ATTRIBUTES
from canonlm.tasks.capo.templates import TEMPLATES

Piece = tuple[str, str]  # (text, role); the role is "name", "pronoun", "template", or the attribute whose value it is


def biography(
    person: Person, templates: Sequence[int], order: Sequence[int] = range(6), *, fullname: bool = False
) -> str:
    """The text. templates[a]: the number of the template of ATTRIBUTES[a]. order: the order of the attributes."""
    return "".join(text for text, _ in pieces(person, templates, order, fullname=fullname))


def pieces(
    person: Person, templates: Sequence[int], order: Sequence[int] = range(6), *, fullname: bool = False
) -> list[Piece]:
    """The pieces that join to the biography. A space belongs to the text after it: " March 3, 1955"."""
    values = person.values
    sentences: list[Piece] = []
    for a in order:
        attribute = ATTRIBUTES[a]
        between, after = split(TEMPLATES[attribute][templates[a]])
        named = fullname or not sentences
        sentences += [
            (f" {person.name}", "name") if named else (f" {person.pronoun}", "pronoun"),
            (between, "template"),
            (f" {values[attribute]}", attribute),
            (after, "template"),
        ]
    return sentences


def split(template: str) -> tuple[str, str]:
    """(the words between subject and value, without the space before the value; the words after the value)."""
    between, after = template.removeprefix("{subject}").split(" {value}")
    return between, after
