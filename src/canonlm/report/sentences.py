"""The sentences that the report computes from the runs."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import mean

from ..runs.rows import is_slice, primary
from . import statistics
from .summary import Architecture, Rate, Spread, columns_of
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
    """Which architecture's runs score higher, as far as their seeds say (`canonlm.report.statistics`).

    By the slices of the primary scale, or by the measure that is the task's score.
    """
    finished = [a for a in architectures if a.best]
    score = architectures[0].score if architectures else ""
    if len(finished) < 2:
        return ""
    if len(finished) > FEW:
        return f"At the best learning rates, {_ranked([a.best for a in finished if a.best], finished[0].task, score)}."
    pairs = list(itertools.combinations(finished, 2))
    first, *more = [_compared(score, a, b, len(pairs)) for a, b in pairs]
    more = [sentence(text) if text.startswith(("no ", "neither ")) else text for text in more]
    return f"At the best learning rates, {'. '.join([first, *more])}."


def _ranked(bests: Sequence[Rate], task: str, score: str) -> str:
    """Means alone, with no claim that their order is more than luck."""
    what = quantity(task, score).label if score else "averaged over question types"
    ordered = sorted(bests, key=lambda best: -best.mean if best.mean is not None else 0.0)
    told = [f"{best.arch} {'–' if best.mean is None else quantity(task, score).say(best.mean)}" for best in ordered]
    runs = _repeated([(best.arch, best.score.runs) for best in ordered if best.score])
    return f"{what}, {runs}: {listed(told)}; how sure these are, the tables say"


def _compared(score: str, a: Architecture, b: Architecture, pairs: int) -> str:
    assert a.best is not None
    assert b.best is not None
    task, keys = a.task, [key for key in _judged(a.best, score) if key in _judged(b.best, score)]
    if not keys:
        return f"{a.arch} and {b.arch} were not asked the same questions"
    ours, theirs = ({key: arch.best.values(key) for key in keys} for arch in (b, a) if arch.best)
    if not any(value for each in (ours, theirs) for values in each.values() for value in values):
        return f"neither {a.arch} nor {b.arch} got anything right yet"
    questions = None if score else min(arch.best.questions(key) for arch in (a, b) for key in keys if arch.best)
    result = statistics.compare(ours, theirs, questions, pairs=pairs)
    unit = f" {quantity(task, score).label}" if score else " averaged over question types" if len(keys) > 1 else ""
    mine, other = (_mean(each, result.seeds, task, score) for each in (ours, theirs))
    if result.state == "undecided":
        runs = f"{count_of(result.seeds, 'run')} each"
        return (
            f"{a.arch} reaches {other} and {b.arch} {mine}{unit} ({runs}): undecided, a verdict needs "
            f"{count_of(result.more_seeds, 'more seed')} of each"
        )
    runs = f"{result.seeds} seeds each"
    if result.state == "alike":
        return f"no difference is seen between {a.arch} and {b.arch}: {other} and {mine}{unit} ({runs})"
    higher, lower = (b, a) if result.state == "higher" else (a, b)
    better, worse = (mine, other) if result.state == "higher" else (other, mine)
    text = f"the runs of {higher.arch} score higher than those of {lower.arch}: {better} against {worse}{unit} ({runs})"
    if result.on_average:
        text += f"; {higher.arch} scores higher on average, too"
    return text + _on(result.slices, keys, (b, a), higher, task)


def _on(slices: Mapping[str, int], keys: Sequence[str], ours_theirs: Sequence[Architecture], higher: Architecture,
        task: str) -> str:  # fmt: skip
    """On which question types the runs differ, and where the other way round."""
    if len(keys) == 1:
        return ""
    ours, _ = ours_theirs
    sign = 1 if higher is ours else -1
    same, against = ([key for key in keys if slices.get(key) == each * sign] for each in (1, -1))
    if len(same) == len(keys):
        return "; so on every question type"
    text = f"; so on {listed([slice_label(task, key) for key in same])}" if same else "; on no single question type"
    return text + (f", and the other way round on {listed([slice_label(task, k) for k in against])}" if against else "")


def _judged(rate: Rate, score: str) -> list[str]:
    return [key for key in ([score] if score else primary(rate.slices)) if rate.spread(key)]


def _mean(values: Mapping[str, Sequence[float]], seeds: int, task: str, score: str) -> str:
    """Of the first seeds, averaged over slices."""
    return quantity(task, score).say(mean(mean(each[:seeds]) for each in values.values()))


def _repeated(runs: Sequence[tuple[str, int]]) -> str:
    """`3 runs each`; `llama 3 runs and llama+canon 2 runs`"""
    if len({count for _, count in runs}) == 1:
        return f"{count_of(runs[0][1], 'run')} each"
    return listed([f"{arch} {count_of(count, 'run')}" for arch, count in runs])


def _said(spread: Spread, task: str, key: str, runs: int) -> str:
    say = quantity(task, key).say
    small = spread.small(say, runs)
    return f"{say(spread.mean)} ({small})" if small else say(spread.mean)
