"""A biography (bioS) as text: the definition that Capo's tokens are compared with."""

from canonlm.tasks.capo.pools import ATTRIBUTES
from canonlm.tasks.capo.templates import TEMPLATES


def biography(who, templates, order=range(6), *, fullname=False):
    """templates[a]: the number of the template of ATTRIBUTES[a]. order: the order of the attributes."""
    text = ""
    for a in order:
        subject, value = who.name if fullname or not text else who.pronoun, who.values[ATTRIBUTES[a]]
        text += f" {TEMPLATES[ATTRIBUTES[a]][templates[a]].format(subject=subject, value=value)}"
    return text
