"""A reader of biographies (bioS) who knows the templates and the person, but not which templates were used."""

import re

from canonlm.tasks.capo.pools import ATTRIBUTES
from canonlm.tasks.capo.templates import TEMPLATES

# Every template with a slot for any value, as a reader who does not know the person would match it.
READERS = [
    (a, t, re.compile(re.escape(template).replace(r"\{subject\}", "(.+?)").replace(r"\{value\}", "(.+)")))
    for a, attribute in enumerate(ATTRIBUTES)
    for t, template in enumerate(TEMPLATES[attribute])
]


def order_and_templates(text, who, fullname):
    """The order of the attributes, and the template of each; no sentence can be read in two ways."""
    assert text[0] == " "
    assert "  " not in text
    sentences = re.split(r"(?<=\.) ", text[1:])
    templates = {}
    for sentence in sentences:
        subject = who.pronoun if templates and not fullname else who.name
        ((a, t),) = [(a, t) for a, t, reader in READERS if (m := reader.fullmatch(sentence)) and m[1] == subject
                     and m[2] == who.values[ATTRIBUTES[a]]]  # fmt: skip
        templates[a] = t
    assert len(templates) == len(sentences) == 6
    return [*templates], [templates[a] for a in range(6)]
