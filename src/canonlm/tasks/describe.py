"""How reports describe a task: its scales of difficulty, its measures, its score."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scale:
    """One way of slicing the answers. `by` completes "accuracy by …", `label` names a slice, `about` explains it.

    trained: for a scale of sizes, the setting with the largest size of training; reports draw the score against the
    size, and mark it. Of several settings with spaces between, it is the first that is set.
    """

    by: str
    label: Callable[[str], str]
    about: str = ""
    trained: str = ""

    def largest(self, settings: Mapping[str, Any]) -> Any:
        """The largest size of training with these settings; None if it is not known."""
        values = (settings.get(name) for name in self.trained.split())
        return next((value for value in values if value is not None), None)


@dataclass(frozen=True)
class Measure:
    """A result of an evaluation other than an accuracy. `about` explains it; `log` draws it on a logarithmic axis."""

    label: str
    about: str = ""
    log: bool = False


@dataclass(frozen=True)
class Score:
    """The one number that sums up a task: a measure (higher is better), the accuracy on one slice (such as
    `from=start`), or, where both are "", the accuracy averaged over the slices of the primary scale.

    share: what reports call an accuracy of this task.
    """

    measure: str = ""
    share: str = "fraction of correct answers"
    slice: str = ""


def counted(singular: str, plural: str = "") -> Callable[[str], str]:
    """A label such as `1 hop`, `8 hops`."""
    return lambda value: f"{value} {singular if value == '1' else plural or singular + 's'}"
