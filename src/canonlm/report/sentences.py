"""The sentences that the report computes from the runs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import mean

from canonlm.report.format import count_of, counts_of, listed, quantity, sentence, slice_label
from canonlm.runs import seed_statistics
from canonlm.runs.rows import is_slice, primary
from canonlm.runs.summary import Architecture, Rate, compared
from canonlm.runs.task_info import TaskInfo

FEW = 3  # architectures that can be compared in sentences; for more, tables are clearer
MAX_NAMED = 6  # architectures with their means in a sentence


def verdict(architectures: Sequence[Architecture]) -> str:
    """Which architecture's runs score higher, as far as their seeds say (`canonlm.runs.seed_statistics`): by the slices
    of the primary scale, or by the one slice or measure that is the task's score. Undecided where a run at a best rate
    has no score: the runs that failed may be the worst."""
    finished = [a for a in architectures if a.best]
    score = architectures[0].score if architectures else ""
    if len(finished) < 2:
        return ""
    bests = [a.best for a in finished if a.best]
    pairs = list(itertools.combinations(finished, 2))
    seeds = [best.repeats for best in bests]
    ranked, missing = _ranked(bests, finished[0].task, score), selection(bests)
    if len(finished) > FEW:
        note = f" {missing}." if missing else ""
        return f"At the best learning rates, {ranked}; the tables show how sure these are.{note}"
    if len(finished) > 2 and min(seeds) < seed_statistics.MIN_SEEDS:
        return f"At the best learning rates, {ranked}. Undecided: {missing or _needed(seeds)}."
    planned = math.comb(len(architectures), 2)  # also with those of which no run has finished
    first, *more = [_compared(score, a, b, planned) for a, b in pairs]
    more = [sentence(text) if text.startswith(("no ", "neither ")) else text for text in more]
    return f"At the best learning rates, {'. '.join([first, *more])}."


def _ranked(bests: Sequence[Rate], task: TaskInfo, score: str) -> str:
    """Means alone, with no claim that their order is more than luck."""
    what = quantity(task, score).label if score else "averaged over question types"
    ordered = sorted(bests, key=lambda best: -best.mean if best.mean is not None else 0.0)
    shown = ordered[: MAX_NAMED if len(ordered) > MAX_NAMED + 1 else None]
    means = [f"{best.arch} {'–' if best.mean is None else quantity(task, score).say(best.mean)}" for best in shown]
    others = len(ordered) - len(shown)
    means += [f"{others} others below"] if others else []
    runs = counts_of([(best.arch, best.score.runs) for best in shown if best.score], "run")
    return f"{what}, {runs}: {listed(means)}"


def _compared(score: str, a: Architecture, b: Architecture, pairs: int) -> str:
    assert a.best is not None
    assert b.best is not None
    task, keys = a.task, [key for key in _judged(a.best, score) if key in _judged(b.best, score)]
    missing = selection([a.best, b.best])
    if not keys and missing:
        return f"{a.arch} against {b.arch} is undecided, as {missing}"
    if not keys:
        return f"{a.arch} and {b.arch} were not asked the same questions"
    ours, theirs = ({key: best.values(key) for key in keys} for best in (b.best, a.best))
    if not missing and not any(value for each in (ours, theirs) for values in each.values() for value in values):
        return f"neither {a.arch} nor {b.arch} got anything right yet"
    result = compared(b.best, a.best, keys, pairs=pairs)
    unit = f" {quantity(task, score).label}" if score else " averaged over question types" if len(keys) > 1 else ""
    mine, other = (quantity(task, score).say(mean(map(mean, each.values()))) for each in (ours, theirs))
    seeds = [min(map(len, each.values())) for each in (theirs, ours)]
    undecided = missing or result.state == "undecided"
    runs = counts_of([(a.arch, seeds[0]), (b.arch, seeds[1])], "run" if undecided else "seed")
    if undecided:
        why = f"as {missing}" if missing else _needed(seeds)
        return f"{a.arch} reaches {other} and {b.arch} {mine}{unit} ({runs}): undecided, {why}"
    if result.state == "open":
        return f"no difference is shown between {a.arch} and {b.arch}: {other} and {mine}{unit} ({runs})"
    higher, lower = (b, a) if result.state == "higher" else (a, b)
    better, worse = (mine, other) if result.state == "higher" else (other, mine)
    text = f"{higher.arch} scores higher than {lower.arch}: {better} against {worse}{unit} ({runs})"
    if not all(map(is_slice, keys)):  # a measure has no bounds, so no interval is safe
        text += ", if further runs differ as these do"
    return text + _on(result.slices, keys, 1 if higher is b else -1, task)


def _on(slices: Mapping[str, int], keys: Sequence[str], sign: int, task: TaskInfo) -> str:
    """The question types on which they differ, and those with the opposite sign. sign: of the verdict."""
    if len(keys) == 1:
        return ""
    same, against = ([key for key in keys if slices.get(key) == each * sign] for each in (1, -1))
    if len(same) == len(keys):
        return "; so on every question type"
    text = f"; so on {listed([slice_label(task, key) for key in same])}" if same else "; on no single question type"
    return text + (f", and the other way round on {listed([slice_label(task, k) for k in against])}" if against else "")


def _judged(rate: Rate, score: str) -> list[str]:
    return [key for key in ([score] if score else primary(rate.slices)) if rate.spread(key)]


def selection(rates: Sequence[Rate]) -> str:
    """Runs without a final score: `8 of 16 runs of a have no final score, and the rest is a selection`. "" if all have
    one. The files do not say which runs have failed, and which are waiting or going on."""
    lacking = [rate for rate in rates if rate.without_score]
    if not lacking:
        return ""
    parts = [f"{rate.without_score} of {count_of(rate.planned, 'run')} of {rate.arch}" for rate in lacking]
    have = "has" if [rate.without_score for rate in lacking] == [1] else "have"
    rest = ", and the rest is a selection" if any(rate.score for rate in lacking) else ""
    return f"{listed(parts)} {have} no final score{rest}"


def unfinished(architectures: Sequence[Architecture]) -> str:
    """A sentence on the architectures of which no run has finished; nothing if there are none."""
    names = [a.arch for a in architectures if not a.best]
    return f" {listed(names)} {'has' if len(names) == 1 else 'have'} no finished run." if names else ""


def _needed(seeds: Sequence[int]) -> str:
    """The seeds that a verdict still needs, from the numbers that there are."""
    needed = seed_statistics.MIN_SEEDS
    more = count_of(needed - seeds[0], "more seed") if len(set(seeds)) == 1 else count_of(needed, "seed")
    return f"a verdict needs {more} of each"


def choice(architectures: Sequence[Architecture]) -> str:
    """On which numbers the learning rates were chosen."""
    own = max((sum(bool(rate.runs) for rate in a.rates) for a in architectures if not a.validated), default=0)
    text = " It is chosen on the evaluation shown here, for all alike." + of_choosing(own) if own > 1 else ""
    if any(a.validated for a in architectures):
        text += " Where there are runs on validation samples, these choose it."
    return text


def of_choosing(rates: int) -> str:
    """The bias of a learning rate that was chosen on the numbers shown; nothing if there was no choice."""
    if rates < 2:
        return ""
    bias = seed_statistics.winners_bias(rates)
    return (
        f" The best of {rates} equally good rates looks better than it is, by {bias:.1f} standard errors of its mean."
    )
