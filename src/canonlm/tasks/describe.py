"""The words in which a report speaks of a task: its scales of difficulty, its measures, its score."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """One way of slicing the answers. `by` ends "accuracy by …", `label` names one slice, `about` explains."""

    by: str
    label: Callable[[str], str]
    about: str = ""


@dataclass(frozen=True)
class Measure:
    """A number that an evaluation finds beside the accuracies. `about` explains, `log`: drawn on a logarithmic axis."""

    label: str
    about: str = ""
    log: bool = False


@dataclass(frozen=True)
class Score:
    """What one number stands for a task: a measure (higher is better), or else the mean accuracy (`measure` is "").

    `share`: what the accuracies of the task are shares of.
    """

    measure: str = ""
    share: str = "share answered correctly"


def counted(singular: str, plural: str = "") -> Callable[[str], str]:
    """A label such as `1 hop`, `8 hops`."""
    return lambda value: f"{value} {singular if value == '1' else plural or singular + 's'}"
