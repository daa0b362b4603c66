"""How numbers and slices are said, and the sentences that the report computes from the runs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .summary import Architecture, Rate, Spread, slices_of

SLICES: dict[tuple[str, str], Callable[[str], str]] = {
    ("depo", "k"): lambda v: f"{v} hop" if v == "1" else f"{v} hops",
    ("mano", "l"): lambda v: f"{v} operation" if v == "1" else f"{v} operations",
    ("copying", "first"): lambda v: {"all": "whole list", "1": "first item"}.get(v, f"first {v} items"),
}

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
}

FEW = 3  # architectures that can be compared in sentences; for more, the tables say it better


def slice_label(task: str, key: str) -> str:
    """`k=1` of depo → `1 hop`; what is not in the dictionary stays readable: `k = 1`."""
    name, _, value = key.partition("=")
    if (task, name) in SLICES and "," not in key:
        return SLICES[task, name](value)
    return "all questions" if key == "all" else key.replace("=", " = ")


def percent(share: float) -> str:
    """One decimal, and never a rounded 0% or 100%: those are said of exactly none and exactly all."""
    text = f"{100 * share:.1f}%"
    if text == "100.0%":
        return "100%" if share == 1 else ">99.9%"
    if text == "0.0%":
        return "0%" if share == 0 else "<0.1%"
    return text


def span(spread: Spread) -> str:
    """`91.2–95.0%`, or just the number where all runs agree."""
    low, high = percent(spread.low), percent(spread.high)
    return low if low == high else f"{low.removesuffix('%')}–{high}"


def points(difference: float) -> str:
    """A difference of two percentages, in points: `+12.5`."""
    text = f"{100 * difference:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def count_of(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


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


def results_sentences(architectures: Sequence[Architecture], chance: Mapping[str, float], most: int = 4) -> list[str]:
    """`After 600 training steps, share answered correctly (guessing scores 12.5%):`, then one sentence per slice:
    `1 hop: llama 15.2% (14.1–16.0%) and llama+canon 93.4% (91.0–95.1%).`"""
    bests = [a.best for a in architectures if a.best]
    if not bests:
        return ["No run has finished yet."]
    if len(bests) > FEW:
        return []
    task = architectures[0].task
    keys = slices_of(architectures)
    steps = {run.result.steps for best in bests for run in best.runs if run.result}
    when = f"After {count_of(steps.pop(), 'training step')}" if len(steps) == 1 else "At the end of training"
    guesses = {percent(chance[key]) for key in keys if key in chance}
    common = len(guesses) == 1 and all(key in chance for key in keys)
    sentences = []
    for key in keys if len(keys) <= most else [*keys[: most - 1], keys[-1]]:
        said = [f"{best.arch} {_said(best.slices[key])}" for best in bests if key in best.slices]
        guess = f" Guessing scores {percent(chance[key])}." if key in chance and not common else ""
        sentences.append(f"{slice_label(task, key).capitalize()}: {listed(said)}.{guess}")
    return [f"{when}, share answered correctly{f' (guessing scores {guesses.pop()})' if common else ''}:", *sentences]


def verdict(architectures: Sequence[Architecture]) -> str:
    """Which architecture learned what, said only as far as runs bear it out: ranges that overlap separate nothing."""
    bests = [a.best for a in architectures if a.best]
    if len(bests) < 2:
        return ""
    if len(bests) > FEW:
        ranked = sorted(bests, key=lambda best: -(best.mean or 0.0))
        scores = listed([f"{best.arch} {percent(best.mean or 0.0)}" for best in ranked])
        return f"At the best learning rates, averaged over question types: {scores}."
    said = [_compared(architectures[0].task, a, b) for a, b in itertools.combinations(bests, 2)]
    later = [text[0].upper() + text[1:] if text.startswith("every ") else text for text in said[1:]]
    return f"At the best learning rates, {'. '.join([said[0], *later])}."


def _compared(task: str, a: Rate, b: Rate) -> str:
    keys = [key for key in a.slices if key in b.slices]
    above = [key for key in keys if b.slices[key].low > a.slices[key].high]
    below = [key for key in keys if b.slices[key].high < a.slices[key].low]
    if not keys:
        return f"{a.arch} and {b.arch} were not asked the same questions"
    if not above and not below:
        equal = all(a.slices[key].mean == b.slices[key].mean for key in keys)
        seen = "score exactly the same" if equal else "cannot be told apart, their ranges overlap everywhere"
        return f"{a.arch} and {b.arch} {seen}"
    repeated = all(spread.runs > 1 for rate in (a, b) for spread in rate.slices.values())
    parts = []
    for winner, loser, where in ((b, a, above), (a, b, below)):
        if where:
            beats = (
                f"every {winner.arch} run beats every {loser.arch} run"
                if repeated
                else f"{winner.arch} beats {loser.arch}"
            )
            labels = [slice_label(task, key) for key in where]
            on = (
                ""
                if len(keys) == 1
                else " on every question type"
                if len(where) == len(keys)
                else f" on {listed(labels)}"
            )
            scores = [sum(rate.slices[key].mean for key in where) / len(where) for rate in (winner, loser)]
            average = "on average " if len(where) > 1 else ""
            parts.append(f"{beats}{on}: {average}{percent(scores[0])} against {percent(scores[1])}")
    rest = [slice_label(task, key) for key in keys if key not in above and key not in below]
    return "; ".join(parts) + (f"; on {listed(rest)} their ranges overlap" if rest else "")


def _said(spread: Spread) -> str:
    return percent(spread.mean) if spread.low == spread.high else f"{percent(spread.mean)} ({span(spread)})"


def shown(value: Any) -> str:
    """A setting as a person would write it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "none"
    return str(value) or "none"
