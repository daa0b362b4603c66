"""The vocabulary of the report: how tasks, slices, measures, scores and numbers are said to people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .runs import is_slice, scale_of

TASKS = {
    "copying": "The model reads a list of random items and must repeat it, in order and without a mistake.",
    "depo": (
        "The model reads the arrows of a ring in shuffled order, then is asked: starting here, where are you after k "
        "steps along the ring? One hop can be looked up; every further hop has to be worked out without writing down "
        "the steps in between."
    ),
    "brevo": (
        "The model reads what depends directly on what, and must list everything that one item depends on, in a valid "
        "order."
    ),
    "mano": (
        "The model reads a nested formula over small numbers and must give its value at once, without writing down "
        "intermediate results."
    ),
    "lano": "The model must write sentences that follow a grammar of nested rules, which it only knows from examples.",
    "capo": "The model reads short biographies in training and must later recall facts about those people.",
    "mqar": (
        "The model reads pairs of a key and a value, then sees the keys again and must give the value that "
        "came with each."
    ),
}


@dataclass(frozen=True)
class Scale:
    """One way of slicing the answers. `by` ends "accuracy by …", `label` names one slice, `about` explains."""

    by: str
    label: Callable[[str], str]
    about: str = ""


def _many(singular: str, plural: str = "") -> Callable[[str], str]:
    return lambda value: f"{value} {singular if value == '1' else plural or singular + 's'}"


SLICES = {
    ("copying", "first"): Scale(
        "length of the start", lambda v: {"all": "whole list", "1": "first item"}.get(v, f"first {v} items")
    ),
    ("depo", "k"): Scale("number of hops", _many("hop")),
    ("mano", "l"): Scale("length of the formula", _many("operation")),
    ("mqar", "pairs"): Scale("number of pairs", _many("pair")),
    ("brevo", "n"): Scale("number of items", _many("item")),
    ("brevo", "depth"): Scale(
        "depth of the question",
        lambda v: f"depth {v}",
        "Depth: how many steps it takes, at the least, from the item asked about to one that depends on nothing.",
    ),
    ("brevo", "nodes"): Scale(
        "length of the answer",
        lambda v: f"{v.replace('-', '–')} to list",
        "How many items the right answer lists: the broader the question, the longer its answer.",
    ),
    ("lano", "from"): Scale(
        "how the sentence starts",
        lambda v: {"start": "from the start", "cut": "after 50 given tokens"}.get(v, v),
        "The model writes a whole sentence by itself, or goes on after the beginning of a true one.",
    ),
    ("capo", "attribute"): Scale(
        "fact",
        lambda v: v,
        "A fact is known when the model, reading a newly worded biography up to it, would go on with exactly that.",
    ),
    ("capo", "question"): Scale(
        "fact asked for",
        lambda v: f"{v}, asked",
        "The same facts as answers to questions, about people whom no question in training was about.",
    ),
}


def number(value: float) -> str:
    """Three digits, which is more than repeats agree on: `1.92`, `0.00314`, `12,300`."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text.replace("-", "−")


def percent(share: float) -> str:
    """One decimal, and never a rounded 0% or 100%: those are said of exactly none and exactly all."""
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


MEASURES = {
    "kl": Quantity(
        "divergence (KL)",
        about=(
            "how far the model's guess of the next token is from what the grammar says, averaged over positions "
            "(Kullback–Leibler divergence, nats per token). Zero is perfect; lower is better."
        ),
        log=True,
    ),
    "bits_per_parameter": Quantity(
        "bits per parameter",
        about="how much the model has stored about the people, in bits, for each of its parameters: higher is better.",
    ),
    "bits_per_person": Quantity("bits per person", about="bits stored, for each person."),
}


@dataclass(frozen=True)
class Score:
    """What one number stands for a task: a measure (higher is better), or else the mean accuracy (`measure` is "").

    `share`: what the accuracies of the task are shares of.
    """

    measure: str = ""
    share: str = "share answered correctly"


SCORES = {
    "capo": Score("bits_per_parameter", "share of people whose fact is known"),
    "lano": Score(share="share of valid sentences"),
}


def score_of(task: str) -> Score:
    return SCORES.get(task, Score())


def quantity(task: str, key: str) -> Quantity:
    """How to say and draw the slice or the measure `key` ("": the mean accuracy); what no dictionary has stays
    readable."""
    if key == "":
        return Quantity("mean accuracy", percent, points)
    if is_slice(key):
        return Quantity(slice_label(task, key), percent, points)
    return MEASURES.get(key) or Quantity(key.replace("_", " "))


def slice_label(task: str, key: str) -> str:
    """`k=1` of depo → `1 hop`; what is not in the dictionary stays readable: `k = 1`."""
    scale = SLICES.get((task, scale_of(key)))
    if scale and "=" in key and "," not in key:
        return scale.label(key.partition("=")[2])
    return "all questions" if key == "all" else key.replace("=", " = ")


def scale_words(task: str, key: str) -> Scale:
    """The scale that the slice `key` is on."""
    name = scale_of(key)
    return SLICES.get((task, name)) or Scale(name, lambda value: f"{name} = {value}")


def count_of(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def sentence(text: str) -> str:
    """With a capital first letter, and the others as they are."""
    return text[:1].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def short(number: float | None) -> str:
    """`1,234,567` → `1.23 M`; missing → `–`."""
    if number is None:
        return "–"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def shown(value: Any) -> str:
    """A setting as a person would write it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "none"
    return str(value) or "none"
