"""The vocabulary of the report: slices, measures and numbers as texts.

A task describes its own slices and measures (`canonlm.tasks.describe`). The descriptions of a task from outside are in
the run folder (`canonlm.runs.task_info`): a report never runs a user's file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from canonlm.runs.rows import Evaluation, is_slice, of_set, one_line, primary, scale_of
from canonlm.runs.seed_statistics import Spread
from canonlm.runs.task_info import TaskInfo

if TYPE_CHECKING:
    from canonlm.tasks import Scale

MAX_SHOWN = 500
"""Max letters of a setting."""
MAX_SLICES = 4  # that fit a line


def number(value: float) -> str:
    """Three digits, more than repeats agree on: `1.92`, `0.00314`, `12,300`."""
    text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return text.replace("-", "−")


def percent(share: float) -> str:
    """One decimal, and never a rounded 0% or 100%: they stand for exactly none and exactly all."""
    text = f"{100 * share:.1f}%"
    if text == "100.0%":
        return "100%" if share == 1 else ">99.9%"
    if text == "0.0%":
        return "0%" if share == 0 else "<0.1%"
    return text


def span(low: float, high: float, say: Callable[[float], str] = percent) -> str:
    """`91.2–95.0%`, `−0.3 to 1.9`, `97.9% to >99.9%`, or just the number where both ends read the same."""
    ends = say(low), say(high)
    if ends[0] == ends[1]:
        return ends[0]
    signs = any(end.startswith(("−", "<", ">")) for end in ends)
    return " to ".join(ends) if signs else f"{ends[0].removesuffix('%')}–{ends[1]}"


def small_of(spread: Spread, say: Callable[[float], str], runs: int) -> str:
    """The interval as small print, with the number of runs if it differs from `runs`, which stands beside it."""
    if spread.low < spread.high:
        interval = span(spread.low, spread.high, say)
    elif spread.runs > 1:
        interval = "all equal" if min(spread.values) == max(spread.values) else ", ".join(map(say, spread.values))
    else:
        interval = ""
    return ", ".join(filter(None, (interval, count_of(spread.runs, "run") if spread.runs != runs else "")))


def hint_of(spread: Spread, say: Callable[[float], str]) -> str:
    """The interval in full, and the range of the runs."""
    interval = f": {span(spread.low, spread.high, say)}" if spread.low < spread.high else ""
    low, high = min(spread.values), max(spread.values)
    return f"{spread.kind}{interval}" + (f"; single runs: {span(low, high, say)}" if low < high else "")


def points(difference: float) -> str:
    """A difference of two percentages, in points: `+12.5`."""
    text = f"{100 * difference:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def signed(difference: float) -> str:
    """A difference of two measures: `+0.31`."""
    return number(difference) if difference <= 0 else f"+{number(difference)}"


@dataclass(frozen=True)
class Quantity:
    """One column: an accuracy on a slice or a measure. `say` writes a value, `gap` the difference of two."""

    label: str
    say: Callable[[float], str] = number
    gap: Callable[[float], str] = signed
    about: str = ""
    log: bool = False  # drawn on a logarithmic axis


def quantity(task: TaskInfo, key: str) -> Quantity:
    """How to write and draw the slice or the measure `key` ("": the mean accuracy). A key that no task describes is its
    own label."""
    if key == "":
        return Quantity("mean accuracy", percent, points)
    if is_slice(key):
        return Quantity(slice_label(task, key), percent, points)
    measure = task.words.measures.get(key)
    return Quantity(measure.label, about=measure.about, log=measure.log) if measure else Quantity(key.replace("_", " "))


def score_label(task: TaskInfo, key: str) -> str:
    """The name of the score: `mean accuracy`, `bits per parameter`, `accuracy (from the start)`."""
    label = quantity(task, key).label
    return f"accuracy ({label})" if is_slice(key) else label


def slice_label(task: TaskInfo, key: str) -> str:
    """`k=1` of depo → `1 hop`; if the task does not describe it, `k = 1`."""
    scale = task.words.scales.get(scale_of(key))
    if scale and "=" in key and "," not in key:
        return scale.label(key.partition("=")[2])
    if key == "all":
        return "other questions" if task.sliced else "all questions"
    return key.replace("=", " = ")


def scale_words(task: TaskInfo, key: str) -> "Scale":
    """The scale that the slice `key` is on."""
    from canonlm.tasks import Scale

    name = scale_of(key)
    return task.words.scales.get(name) or Scale(name, lambda value: f"{name} = {value}")


def count_of(number: int, singular: str) -> str:
    return f"{number:,} {singular if number == 1 else singular + 's'}"


def counts_of(numbers: Sequence[tuple[str, int]], singular: str) -> str:
    """`3 runs each`; `llama 3 runs and llama+canon 2 runs`. numbers: of each name."""
    if len({number for _, number in numbers}) == 1:
        return f"{count_of(numbers[0][1], singular)} each"
    return listed([f"{name} {count_of(number, singular)}" for name, number in numbers])


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def shown(value: Any) -> str:
    """A setting as a person would write it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return one_line(", ".join(map(shown, value)), MAX_SHOWN) or "none"
    return one_line(str(value), MAX_SHOWN) or "none"


def in_words(task: TaskInfo, row: Evaluation | None) -> str:
    """`1 hop 0.93  2 hops 0.41`: the slices of the primary scale (their mean if there are more than four) and the first
    measure; for text `loss hops 2.210`."""
    if row is None:
        return ""
    if not row.slices:
        values = {name: row.measures.get(of_set("loss", name)) for name in row.sets}
        losses = [f"{name} {value:.3f}" for name, value in values.items() if value is not None]
        return "loss " + ", ".join(losses[:MAX_SLICES]) if losses else ""
    keys = primary(row.slices)
    parts = [f"{slice_label(task, key)} {row.slices[key].accuracy:.2f}" for key in keys]
    if len(keys) > MAX_SLICES:
        parts = [f"mean accuracy {row.accuracy:.2f}"]
    parts += [f"{quantity(task, key).label} {number(value)}" for key, value in row.measures.items()][:1]
    return "  ".join(parts)
