"""The sentences that the report computes from the runs."""

import itertools
from collections.abc import Mapping, Sequence

from .runs import is_slice, primary
from .summary import Architecture, Rate, Spread, columns_of
from .words import count_of, listed, percent, quantity, score_of, sentence, slice_label, span

FEW = 3  # architectures that can be compared in sentences; for more, the tables say it better


def results_sentences(architectures: Sequence[Architecture], chance: Mapping[str, float], most: int = 4) -> list[str]:
    """`After 600 training steps, share answered correctly (guessing scores 12.5%):`, then one sentence per slice:
    `1 hop: llama 15.2% (14.1–16.0%) and llama+canon 93.4% (91.0–95.1%).` Measures have a sentence each, too."""
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
    sentences = [f"{when}:" if measured else f"{when}, {share}:"]
    for key in columns:
        if is_slice(key) and key not in told:
            continue
        quantities = [(best.arch, best.spread(key)) for best in bests]
        said = [f"{arch} {_said(spread, task, key)}" for arch, spread in quantities if spread]
        guess = f" Guessing scores {percent(chance[key])}." if key in chance and not common else ""
        label = quantity(task, key).label
        label = f"{share}, {label}" if measured and is_slice(key) else label
        sentences.append(f"{sentence(label)}: {listed(said)}.{guess}")
    return sentences


def verdict(architectures: Sequence[Architecture]) -> str:
    """Which architecture learned what, said only as far as runs bear it out: ranges that overlap separate nothing.

    By the slices of the primary scale, or by the measure that is the task's score.
    """
    found = [(a.best, a.best.score) for a in architectures if a.best]
    score = architectures[0].score if architectures else ""
    if len(found) < 2:
        return ""
    if len(found) > FEW:
        say = quantity(architectures[0].task, score).say
        what = quantity(architectures[0].task, score).label if score else "averaged over question types"
        ranked = sorted(found, key=lambda pair: -(pair[1].mean if pair[1] else 0.0))
        scores = listed([f"{best.arch} {say(spread.mean) if spread else '–'}" for best, spread in ranked])
        return f"At the best learning rates, {what}: {scores}."
    said = [_compared(architectures[0].task, score, a, b) for (a, _), (b, _) in itertools.combinations(found, 2)]
    later = [text[0].upper() + text[1:] if text.startswith("every ") else text for text in said[1:]]
    return f"At the best learning rates, {'. '.join([said[0], *later])}."


def _compared(task: str, score: str, a: Rate, b: Rate) -> str:
    mine, theirs = (_judged(rate, score) for rate in (a, b))
    keys = [key for key in mine if key in theirs]
    above = [key for key in keys if theirs[key].low > mine[key].high]
    below = [key for key in keys if theirs[key].high < mine[key].low]
    if not keys:
        return f"{a.arch} and {b.arch} were not asked the same questions"
    if score and min(mine[score].runs, theirs[score].runs) == 1:  # a measure of one run has no range
        say, unit = quantity(task, score).say, quantity(task, score).label
        reached = f"{a.arch} reaches {say(mine[score].mean)} and {b.arch} {say(theirs[score].mean)} {unit}"
        return f"{reached}; single runs do not say how much of that is luck"
    if not above and not below:
        equal = all(mine[key].mean == theirs[key].mean for key in keys)
        if equal and all(mine[key].mean == 0 for key in keys):
            return f"neither {a.arch} nor {b.arch} got anything right yet"
        seen = "score exactly the same" if equal else "cannot be told apart, their ranges overlap everywhere"
        return f"{a.arch} and {b.arch} {seen}"
    repeated = all(spread.runs > 1 for spreads in (mine, theirs) for spread in spreads.values())
    parts = []
    for winner, loser, better, worse, where in ((b, a, theirs, mine, above), (a, b, mine, theirs, below)):
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
            say = quantity(task, where[0]).say
            unit = f" {quantity(task, score).label}" if score else ""
            means = [say(sum(spreads[key].mean for key in where) / len(where)) for spreads in (better, worse)]
            average = "on average " if len(where) > 1 else ""
            parts.append(f"{beats}{on}: {average}{means[0]} against {means[1]}{unit}")
    rest = [slice_label(task, key) for key in keys if key not in above and key not in below]
    return "; ".join(parts) + (f"; on {listed(rest)} their ranges overlap" if rest else "")


def _judged(rate: Rate, score: str) -> dict[str, Spread]:
    keys = [score] if score else primary(rate.slices)
    return {key: spread for key in keys if (spread := rate.spread(key))}


def _said(spread: Spread, task: str, key: str) -> str:
    say = quantity(task, key).say
    return (
        say(spread.mean) if spread.low == spread.high else f"{say(spread.mean)} ({span(spread.low, spread.high, say)})"
    )
