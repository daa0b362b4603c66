"""Runs grouped by architecture and learning rate, with the spread over seeds. Pure functions of runs, no files.

The best learning rate of an architecture is the one with the highest final accuracy, averaged over slices and then over
seeds, among the rates with the most finished runs (so that a rate at which runs crashed does not win by its survivors);
of equals the smallest. It is chosen on the evaluation that is shown, for every architecture alike.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .runs import Count, Run, slice_order

MIN_RATES = 3
MIN_SEEDS = 3


@dataclass(frozen=True)
class Spread:
    """A mean with its range: over `runs` runs the smallest and largest, for a single run a 95 % binomial interval."""

    mean: float
    low: float
    high: float
    runs: int

    @property
    def kind(self) -> str:
        return "range over runs" if self.runs > 1 else "95% interval of one run"


@dataclass(frozen=True)
class Rate:
    """One architecture at one learning rate. `runs` are the finished ones; the others are counted only."""

    arch: str
    lr: float
    runs: tuple[Run, ...] = field(repr=False)
    unfinished: int
    slices: Mapping[str, Spread]
    mean: float | None

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted(run.seed for run in self.runs))

    @property
    def finished_of(self) -> str:
        """`3`, or `2 of 3` where a run has not finished."""
        return f"{len(self.runs)} of {len(self.runs) + self.unfinished}" if self.unfinished else str(len(self.runs))


@dataclass(frozen=True)
class Architecture:
    """Everything that was run with one architecture on one task. `best` is None while nothing has finished.

    `parameters` is None where runs differ; `tokens_per_s` is the median over all finished runs.
    """

    arch: str
    task: str
    rates: tuple[Rate, ...]
    best: Rate | None
    parameters: int | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class Difference:
    """Accuracy of `arch` minus that of `reference`, each at its best rate, on the `pairs` seeds both were run with."""

    arch: str
    reference: str
    slice: str
    mean: float
    low: float
    high: float
    pairs: int


def wilson(count: Count, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % Wilson interval of a proportion (Wilson, 1927): sensible also at 0 and at 1."""
    n, p = count.total, count.accuracy
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # at 0 and 1 the bound is exactly p; rounding must not push it past
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))


def spread(counts: Sequence[Count]) -> Spread:
    accuracies = [count.accuracy for count in counts]
    low, high = (min(accuracies), max(accuracies)) if len(counts) > 1 else wilson(counts[0])
    return Spread(statistics.fmean(accuracies), low, high, len(counts))


def summarise(runs: Iterable[Run]) -> list[Architecture]:
    """One entry per (task, architecture), in the order in which the runs name them."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task_label, run.arch), []).append(run)
    return [_architecture(members) for members in groups.values()]


def slices_of(architectures: Iterable[Architecture]) -> list[str]:
    """Every slice that some best rate was asked about, easy ones first."""
    return sorted({key for a in architectures if a.best for key in a.best.slices}, key=slice_order)


def differences(reference: Architecture, other: Architecture) -> list[Difference]:
    """Per slice, paired by seed; empty where the two best rates share no seed."""
    if reference.best is None or other.best is None:
        return []
    theirs = {run.seed: run for run in reference.best.runs}
    ours = {run.seed: run for run in other.best.runs}
    found = []
    for key in slices_of([reference, other]):
        gaps = []
        for seed in sorted(theirs.keys() & ours.keys()):
            a, b = _final(ours[seed]).get(key), _final(theirs[seed]).get(key)
            if a is not None and b is not None:
                gaps.append(a.accuracy - b.accuracy)
        if gaps:
            mean = statistics.fmean(gaps)
            found.append(Difference(other.arch, reference.arch, key, mean, min(gaps), max(gaps), len(gaps)))
    return found


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
    elif any(len(set(best.seeds)) < MIN_SEEDS for best in bests):
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
            f"{a.arch}, learning rate {lr:g}, seed {seed} was run more than once; all count." for lr, seed in twice
        ]
    return notes


def _final(run: Run) -> Mapping[str, Count]:
    assert run.result is not None
    return run.result.final.slices


def _architecture(runs: list[Run]) -> Architecture:
    rates = tuple(_rate([run for run in runs if run.lr == lr]) for lr in sorted({run.lr for run in runs}))
    most = max(len(rate.runs) for rate in rates)
    best = max((rate for rate in rates if len(rate.runs) == most), key=lambda rate: rate.mean or 0.0) if most else None
    results = [run.result for run in runs if run.result is not None]
    sizes = {result.num_parameters for result in results}
    speeds = [result.tokens_per_s for result in results if result.tokens_per_s is not None]
    return Architecture(
        arch=runs[0].arch,
        task=runs[0].task,
        rates=rates,
        best=best,
        parameters=sizes.pop() if len(sizes) == 1 else None,
        tokens_per_s=statistics.median(speeds) if speeds else None,
    )


def _rate(runs: list[Run]) -> Rate:
    finished = tuple(run for run in runs if run.result is not None)
    keys = sorted({key for run in finished for key in _final(run)}, key=slice_order)
    slices = {key: spread([_final(run)[key] for run in finished if key in _final(run)]) for key in keys}
    means = [run.result.final.accuracy for run in finished if run.result is not None]
    return Rate(
        arch=runs[0].arch,
        lr=runs[0].lr,
        runs=finished,
        unfinished=len(runs) - len(finished),
        slices=slices,
        mean=statistics.fmean(means) if means else None,
    )
