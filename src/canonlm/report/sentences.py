"""The sentences that the report computes from the runs."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from ..runs.rows import is_slice, primary
from .summary import Architecture, Difference, Rate, Spread, columns_of, differences
from .words import count_of, listed, percent, quantity, score_of, sentence, slice_label

FEW = 3  # architectures that can be compared in sentences; for more, the tables say it better


def results_sentences(architectures: Sequence[Architecture], chance: Mapping[str, float], most: int = 4) -> list[str]:
    """`After 600 training steps, share answered correctly (guessing scores 12.5%), 3 runs each, 95% intervals in
    brackets:`, then one sentence per slice:
    `1 hop: llama 15.2% (12.9–17.5%) and llama+canon 93.4% (88.4–98.4%).` Measures have a sentence each, too."""
    bests = [a.best for a in architectures if a.best]
    if not bests:
        return ["No run has finished yet."]
    if len(bests) > FEW:
        return []
    task = architectures[0].task
    columns = columns_of(architectures)
    keys = [key for key in columns if is_slice(key)]
    told = keys if len(keys) <= most else [*keys[: most - 1], keys[-1]]
    steps = {run.result.steps for best in bests for run in best.runs if run.result}
    when = f"After {count_of(steps.pop(), 'training step')}" if len(steps) == 1 else "At the end of training"
    guesses = {percent(chance[key]) for key in keys if key in chance}
    common = len(guesses) == 1 and all(key in chance for key in keys)
    share = score_of(task).share + (f" (guessing scores {guesses.pop()})" if common else "")
    measured = len(keys) < len(columns)  # then not everything below is a share, and each sentence says what it is
    runs = _repeated([(best.arch, best.repeats) for best in bests])
    sentences = [f"{when}, {runs}, 95% intervals in brackets:" if measured else
                 f"{when}, {share}, {runs}, 95% intervals in brackets:"]  # fmt: skip
    for key in columns:
        if is_slice(key) and key not in told:
            continue
        found = [(best, best.spread(key)) for best in bests]
        said = [f"{best.arch} {_said(spread, task, key, best.repeats)}" for best, spread in found if spread]
        guess = f" Guessing scores {percent(chance[key])}." if key in chance and not common else ""
        label = quantity(task, key).label
        label = f"{share}, {label}" if measured and is_slice(key) else label
        sentences.append(f"{sentence(label)}: {listed(said)}.{guess}")
    return sentences


def verdict(architectures: Sequence[Architecture]) -> str:
    """Which architecture learned what, said only as far as runs bear it out: by `Difference.sure`.

    By the slices of the primary scale, or by the measure that is the task's score.
    """
    found = [a for a in architectures if a.best]
    score = architectures[0].score if architectures else ""
    if len(found) < 2:
        return ""
    if len(found) > FEW:
        return f"At the best learning rates, {_ranked([a.best for a in found if a.best], found[0].task, score)}."
    said = [_compared(score, a, b) for a, b in itertools.combinations(found, 2)]
    later = [sentence(text) if text.startswith(("in one pair ", "neither ")) else text for text in said[1:]]
    return f"At the best learning rates, {'. '.join([said[0], *later])}."


def _ranked(bests: Sequence[Rate], task: str, score: str) -> str:
    """Means alone, with no claim that their order is more than luck."""
    what = quantity(task, score).label if score else "averaged over question types"
    ordered = sorted(bests, key=lambda best: -best.mean if best.mean is not None else 0.0)
    told = [f"{best.arch} {'–' if best.mean is None else quantity(task, score).say(best.mean)}" for best in ordered]
    runs = _repeated([(best.arch, best.score.runs) for best in ordered if best.score])
    return f"{what}, {runs}: {listed(told)}; how sure these are, the tables say"


def _compared(score: str, a: Architecture, b: Architecture) -> str:
    assert a.best is not None
    assert b.best is not None
    task = a.task
    asked = [key for key in _judged(a.best, score) if key in _judged(b.best, score)]
    gaps = [gap for gap in differences(a, b) if gap.key in asked]  # what b has more than a
    if not asked:
        return f"{a.arch} and {b.arch} were not asked the same questions"
    if not gaps:
        return f"{a.arch} and {b.arch} have no seed in common, by which they could be compared"
    if all(gap.means == (0, 0) for gap in gaps):
        return f"neither {a.arch} nor {b.arch} got anything right yet"
    pairs = _pairs(gaps)
    if all(value == 0 for gap in gaps for value in gap.values):
        return f"{a.arch} and {b.arch} score exactly the same in {pairs}"
    unit = f" {quantity(task, score).label}" if score else ""
    if max(gap.pairs for gap in gaps) == 1:
        ours, theirs = _means(gaps, task)
        over = " averaged over question types" if len(gaps) > 1 else ""
        return (f"in one pair of runs {a.arch} reaches {theirs} and {b.arch} {ours}{unit}{over}, "
                "which does not say how much of that is luck")  # fmt: skip
    parts = []
    for winner, loser, sign in ((b, a, 1), (a, b, -1)):
        where = [gap for gap in gaps if gap.sure and sign * gap.mean > 0]
        if where:
            better, worse = _means(where, task)[::sign]
            average = "on average " if len(where) > 1 else ""
            parts.append(f"{winner.arch} beats {loser.arch}{_on(where, gaps, task)}: "
                         f"{average}{better} against {worse}{unit}")  # fmt: skip
    rest = [slice_label(task, gap.key) for gap in gaps if not gap.sure]
    if not parts:
        return f"{a.arch} and {b.arch} cannot be told apart by {pairs}"
    return "; ".join(parts) + (f"; on {listed(rest)} they cannot be told apart" if rest else "") + f" ({pairs})"


def _judged(rate: Rate, score: str) -> list[str]:
    return [key for key in ([score] if score else primary(rate.slices)) if rate.spread(key)]


def _means(gaps: Sequence[Difference], task: str) -> tuple[str, str]:
    """What the two architectures scored on these questions, averaged."""
    say = quantity(task, gaps[0].key).say
    ours, theirs = (statistics.mean(gap.means[side] for gap in gaps) for side in (0, 1))
    return say(ours), say(theirs)


def _on(where: Sequence[Difference], gaps: Sequence[Difference], task: str) -> str:
    if len(gaps) == 1:
        return ""
    every = len(where) == len(gaps)
    return " on every question type" if every else f" on {listed([slice_label(task, gap.key) for gap in where])}"


def _pairs(gaps: Sequence[Difference]) -> str:
    """`3 pairs of runs`; `1 to 3 pairs of runs`"""
    least, most = min(gap.pairs for gap in gaps), max(gap.pairs for gap in gaps)
    return f"{f'{least} to ' if least < most else ''}{count_of(most, 'pair')} of runs"


def _repeated(runs: Sequence[tuple[str, int]]) -> str:
    """`3 runs each`; `llama 3 runs and llama+canon 2 runs`"""
    if len({count for _, count in runs}) == 1:
        return f"{count_of(runs[0][1], 'run')} each"
    return listed([f"{arch} {count_of(count, 'run')}" for arch, count in runs])


def _said(spread: Spread, task: str, key: str, runs: int) -> str:
    say = quantity(task, key).say
    small = spread.small(say, runs)
    return f"{say(spread.mean)} ({small})" if small else say(spread.mean)
