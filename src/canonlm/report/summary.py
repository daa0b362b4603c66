"""Runs grouped by architecture and learning rate, with intervals over seeds. Pure functions of runs, no files.

The best learning rate of an architecture is the one with the highest final score (`Task.score`: a measure of the
task, or the accuracy averaged over the slices of its primary scale), averaged over seeds, among the rates with the most
runs that have one (so that a rate at which runs crashed does not win by its survivors); of equals the smallest. It is
chosen on the evaluation that is shown, for every architecture alike.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..runs.rows import Count, Evaluation, in_order, is_slice, primary, scale_of
from .groups import Group, grouped
from .intervals import ANY, newcombe_interval, t_interval, wilson_interval
from .runs import Run
from .words import count_of, score_of, span

MIN_RATES = 3
MIN_SEEDS = 3
AT_MOST = "_at_most"  # ends the name of a measure that bounds another


@dataclass(frozen=True)
class Spread:
    """The mean of `values`, one per run (per seed, where seeds were run more than once), with its 95 % interval.

    Of runs that differ it is the t-interval of the mean, for accuracies cut to [0, 1]. One run, or runs that all score
    the same, do not tell how far another seed would be off: an accuracy then has the interval of its answers (Wilson),
    and a measure has none.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def runs(self) -> int:
        return len(self.values)

    @property
    def kind(self) -> str:
        """What the interval is, and of how many runs."""
        if min(self.values) < max(self.values):
            return f"95% t-interval over {self.runs} runs"
        over = "one run" if self.runs == 1 else f"{self.runs} equal runs"
        return f"95% interval of {over}" if self.low < self.high else over

    def small(self, say: Callable[[float], str], runs: int) -> str:
        """The interval as it is printed small, with the number of runs where it is not the `runs` said beside it."""
        interval = span(self.low, self.high, say) if self.low < self.high else "all equal" if self.runs > 1 else ""
        return ", ".join(filter(None, (interval, count_of(self.runs, "run") if self.runs != runs else "")))

    def about(self, say: Callable[[float], str]) -> str:
        """All there is to say of the interval, and how far apart the runs are."""
        interval = f": {span(self.low, self.high, say)}" if self.low < self.high else ""
        least, most = min(self.values), max(self.values)
        return f"{self.kind}{interval}" + (f"; single runs: {span(least, most, say)}" if least < most else "")


@dataclass(frozen=True)
class Rate:
    """One architecture at one learning rate. `runs` are the finished ones; the others are counted only.

    `score`: the task's score over those of `runs` that have one.
    """

    arch: str
    lr: float
    runs: tuple[Run, ...] = field(repr=False)
    unfinished: int
    slices: Mapping[str, Spread]
    measures: Mapping[str, Spread]
    score: Spread | None

    @property
    def mean(self) -> float | None:
        return self.score.mean if self.score else None

    def spread(self, key: str) -> Spread | None:
        """Of a slice or a measure."""
        return self.slices.get(key) or self.measures.get(key)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted(run.seed for run in self.runs))

    def values(self, key: str) -> list[float]:
        """What the seeds scored on a slice or a measure, in their order."""
        found = _values(self.runs, key)
        return [found[seed] for seed in sorted(found)]

    def questions(self, key: str) -> int:
        """How many answers a run gave on a slice, at least."""
        return min(_final(run).slices[key].total for run in self.runs if key in _final(run).slices)

    @property
    def repeats(self) -> int:
        """Seeds among the finished runs."""
        return len(set(self.seeds))

    @property
    def finished_of(self) -> str:
        """`3`, or `2 of 3` where a run has not finished."""
        return f"{len(self.runs)} of {len(self.runs) + self.unfinished}" if self.unfinished else str(len(self.runs))


@dataclass(frozen=True)
class Architecture:
    """What was run of one group (`canonlm.report.groups`) on one task. `best` is None while nothing finished.

    `arch`, `family`, `matched`: of the group. `score`: the measure that the runs of this task are compared by, "" for
    accuracy. `tokens_per_s` is the median over all finished runs.
    """

    arch: str
    family: str
    task: str
    score: str
    rates: tuple[Rate, ...]
    best: Rate | None
    parameters: int | None
    tokens_per_s: float | None
    matched: str = ""


@dataclass(frozen=True)
class Difference:
    """Accuracy (or measure) of `arch` minus that of `reference`, each at its best rate, on the seeds that both have.

    `key`: the slice, or the name of the measure. `values`: the differences seed by seed, whose mean has the 95 %
    t-interval `low` to `high`, for accuracies cut to [−1, 1]. Equal ones have none; of accuracies there is then that of
    all answers (Newcombe). One pair has none. `means`: of `arch` and of `reference` on these seeds.
    """

    arch: str
    reference: str
    key: str
    mean: float
    low: float
    high: float
    values: tuple[float, ...]
    means: tuple[float, float]

    @property
    def pairs(self) -> int:
        return len(self.values)


def wilson(count: Count) -> tuple[float, float]:
    """The 95 % interval of an accuracy by its answers."""
    return wilson_interval(count.accuracy, count.total)


def spread(counts: Sequence[Count]) -> Spread:
    """Of accuracies, one per run."""
    return spread_of([count.accuracy for count in counts], True, sum(count.total for count in counts))


def spread_of(values: Sequence[float], share: bool = False, answers: int = 0) -> Spread:
    """Of any numbers, one per run. `share`: of accuracies; `answers`: how many are behind all of them."""
    mean = statistics.mean(values)
    low, high = mean, mean
    if min(values) < max(values):
        low, high = t_interval(values, (0.0, 1.0) if share else ANY)
    elif answers:
        low, high = wilson_interval(mean, answers)
    return Spread(mean, low, high, tuple(values))


def by_seed(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """One number per seed, from (seed, value) of runs: repeats of a seed are no repeats of the experiment."""
    found: dict[int, list[float]] = {}
    for seed, value in values:
        found.setdefault(seed, []).append(value)
    return {seed: statistics.mean(repeats) for seed, repeats in found.items()}


def summarise(runs: Iterable[Run]) -> list[Architecture]:
    """One entry per task and group, in the order in which the runs name architectures, the smaller size first."""
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run.task_label, []).append(run)
    return [_architecture(one, _score(members)) for members in tasks.values() for one in grouped(members)]


def slices_of(architectures: Iterable[Architecture]) -> list[str]:
    """Every slice that some best rate was asked about, scale by scale, easy ones first."""
    return in_order(key for a in architectures if a.best for key in a.best.slices)


def scales_of(architectures: Iterable[Architecture]) -> list[list[str]]:
    """The same, a list per scale; the primary scale is the first."""
    keys = slices_of(architectures)
    return [[key for key in keys if scale_of(key) == scale] for scale in dict.fromkeys(map(scale_of, keys))]


def measures_of(architectures: Iterable[Architecture]) -> list[str]:
    """Every measure that some best rate has, in the order of the rows; what only bounds another is none."""
    found = dict.fromkeys(name for a in architectures if a.best for name in a.best.measures)
    return [name for name in found if not name.endswith(AT_MOST)]


def columns_of(architectures: Sequence[Architecture]) -> list[str]:
    """What a table of results shows: the score where it is a measure, the slices of the primary scale, then the other
    measures."""
    measures = measures_of(architectures)
    scores = [name for name in measures if any(name == a.score for a in architectures)]
    return [*scores, *primary(slices_of(architectures)), *(name for name in measures if name not in scores)]


def at_most(run: Run, name: str) -> float | None:
    """What the measure `name` of this run could reach; None where it has no such bound.

    The bound on bits per person bounds bits per parameter too: of two measures of the same bits, each is the same share
    of what it can be. A model that has stored nothing yet does not tell it; a later evaluation does.
    """
    for row in reversed(run.evals):
        bound, value = row.measures.get(name + AT_MOST), row.measures.get(name)
        if bound is not None:
            return bound
        other, most = row.measures.get("bits_per_person"), row.measures.get("bits_per_person" + AT_MOST)
        if name == "bits_per_parameter" and value and other and most:
            return value * most / other
    return None


def counterpart(reference: Sequence[Architecture], other: Architecture) -> Architecture:
    """Of one family at several sizes, the one nearest in size to `other`."""
    if other.parameters is None:
        return reference[0]
    size = math.log(other.parameters)
    return min(reference, key=lambda a: abs(math.log(a.parameters) - size) if a.parameters else math.inf)


def differences(reference: Architecture, other: Architecture) -> list[Difference]:
    """Per slice and measure, paired by seed; empty where the two best rates share no seed."""
    if reference.best is None or other.best is None:
        return []
    keys = [*slices_of([reference, other]), *measures_of([reference, other])]
    found = [_difference(key, reference.best, other.best) for key in keys]
    return [difference for difference in found if difference]


def adjusted(architectures: Iterable[Architecture]) -> str:
    """One sentence on what was adjusted to make the numbers of parameters equal; "" where nothing was."""
    parts = [f"{a.arch} {a.matched}" for a in architectures if a.matched]
    return f"Adjusted to match parameters: {'; '.join(parts)}." if parts else ""


def fairness(architectures: Sequence[Architecture]) -> list[str]:
    """What a careful reader would hold against the comparison; empty when nothing."""
    notes = []
    tried = {a.arch: {rate.lr for rate in a.rates if rate.runs} for a in architectures}
    if len({frozenset(rates) for rates in tried.values()}) > 1:
        parts = [f"{arch} {', '.join(f'{lr:g}' for lr in sorted(rates)) or 'none'}" for arch, rates in tried.items()]
        notes.append(f"The architectures did not finish the same learning rates: {'; '.join(parts)}.")
    elif any(len(rates) < MIN_RATES for rates in tried.values()):
        notes.append(f"Fewer than {MIN_RATES} learning rates were tried: one architecture may suit them by luck.")
    bests = [a.best for a in architectures if a.best]
    if len({best.seeds for best in bests}) > 1:
        parts = [f"{best.arch} {', '.join(map(str, best.seeds))}" for best in bests]
        notes.append(f"The best rates do not have the same seeds: {'; '.join(parts)}.")
    elif any(best.repeats < MIN_SEEDS for best in bests):
        notes.append(f"Fewer than {MIN_SEEDS} seeds: the spread between repeats is not well known.")
    for best in bests:
        rates = tried[best.arch]
        if len(rates) > 1 and best.lr in (min(rates), max(rates)):
            side = "larger" if best.lr == max(rates) else "smaller"
            notes.append(f"The best rate of {best.arch}, {best.lr:g}, is at the edge of those tried; "
                         f"a {side} one might do better.")  # fmt: skip
    for a in architectures:
        twice = sorted({(r.lr, s) for r in a.rates for s in r.seeds if r.seeds.count(s) > 1})
        notes += [
            f"{a.arch}, learning rate {lr:g}, seed {seed} was run more than once: the mean of these counts as one run."
            for lr, seed in twice
        ]
    return notes


def _final(run: Run) -> Evaluation:
    assert run.result is not None
    return run.result.final


def _values(runs: Sequence[Run], key: str) -> dict[int, float]:
    """What each seed scored at last on the slice or measure `key`; "" is the mean accuracy."""
    finals = [(run.seed, _final(run)) for run in runs]
    found = [(seed, final.value(key) if key else final.accuracy) for seed, final in finals]
    return by_seed((seed, value) for seed, value in found if value is not None)


def _answers(runs: Sequence[Run], key: str, seeds: Iterable[int]) -> int:
    """How many answers are behind the accuracies of these seeds on a slice, each seed counted once."""
    asked = {run.seed: _final(run).slices[key].total for run in runs if key in _final(run).slices}
    return sum(asked[seed] for seed in seeds)


def _spread(runs: Sequence[Run], key: str) -> Spread | None:
    values = _values(runs, key)
    if not values:
        return None
    answers = _answers(runs, key, values) if is_slice(key) else 0
    return spread_of([*values.values()], not key or is_slice(key), answers)


def _difference(key: str, reference: Rate, other: Rate) -> Difference | None:
    ours, theirs = _values(other.runs, key), _values(reference.runs, key)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    # Shares differ by steps far larger than the 1e-12 below which equal differences are made equal.
    gaps = [round(ours[seed] - theirs[seed], 12) if is_slice(key) else ours[seed] - theirs[seed] for seed in seeds]
    mean = statistics.mean(gaps)
    low, high = mean, mean
    means = (statistics.mean(ours[seed] for seed in seeds), statistics.mean(theirs[seed] for seed in seeds))
    if min(gaps) < max(gaps):
        low, high = t_interval(gaps, (-1.0, 1.0) if is_slice(key) else ANY)
    elif len(gaps) > 1 and is_slice(key):
        asked = [_answers(rate.runs, key, seeds) for rate in (other, reference)]
        low, high = newcombe_interval(means[0], asked[0], means[1], asked[1])
    return Difference(other.arch, reference.arch, key, mean, low, high, tuple(gaps), means)


def _score(runs: Sequence[Run]) -> str:
    """The measure that is the score of the runs' task, where any finished run has it; else "": accuracy."""
    measure = score_of(runs[0].task).measure
    return measure if any(measure in _final(run).measures for run in runs if run.finished) else ""


def _architecture(group: Group[Run], score: str) -> Architecture:
    name, runs = group.name, group.runs
    rates = tuple(_rate(name, [run for run in runs if run.lr == lr], score) for lr in sorted({run.lr for run in runs}))
    finished = [rate for rate in rates if rate.runs]
    best = max(finished, key=lambda rate: (rate.score.runs, rate.score.mean) if rate.score else (0, 0.0), default=None)
    results = [run.result for run in runs if run.result is not None]
    sizes = {result.num_parameters for result in results}
    speeds = [result.tokens_per_s for result in results if result.tokens_per_s is not None]
    return Architecture(
        arch=name, family=group.family, task=runs[0].task, score=score, rates=rates, best=best,
        parameters=sizes.pop() if len(sizes) == 1 else None,
        tokens_per_s=statistics.median(speeds) if speeds else None, matched=group.matched,
    )  # fmt: skip


def _rate(name: str, runs: Sequence[Run], score: str) -> Rate:
    finished = tuple(run for run in runs if run.result is not None)
    finals = [_final(run) for run in finished]
    slices = in_order(key for final in finals for key in final.slices)
    measures = dict.fromkeys(measure for final in finals for measure in final.measures)
    return Rate(
        arch=name, lr=runs[0].lr, runs=finished, unfinished=len(runs) - len(finished),
        slices={key: found for key in slices if (found := _spread(finished, key))},
        measures={measure: found for measure in measures if (found := _spread(finished, measure))},
        score=_spread(finished, score),
    )  # fmt: skip
