"""Runs grouped by architecture and learning rate, with intervals over seeds. Pure functions of runs, no files.

The best learning rate of an architecture is the one with the highest final score (`Task.score`: a measure of the
task, the accuracy on one slice, or that averaged over the slices of its primary scale), averaged over seeds. Only the
rates with the most runs that have a score count, so that a rate at which runs crashed does not win by its survivors.
Of equal rates, the one with the lowest loss is the best, then the smallest. The rate is chosen on the evaluation that
is shown, for every architecture alike; if there are runs on validation samples, these choose it instead.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from canonlm.runs import seed_statistics
from canonlm.runs.groups import Group, grouped
from canonlm.runs.identity import flat
from canonlm.runs.identity import group as group_of
from canonlm.runs.load import Run
from canonlm.runs.rows import Count, in_order, is_slice, primary, scale_of
from canonlm.runs.seed_statistics import (
    SEEDS_OF_INTERVAL,
    Comparison,
    Spread,
    best_rate,
    by_seed,
    compare,
    safe_difference,
    spread_of,
    wilson_interval,
)
from canonlm.runs.task_info import TaskInfo

MIN_RATES = 3
AT_MOST = "_at_most"  # suffix of a measure that bounds another


@dataclass(frozen=True)
class Rate:
    """One architecture at one learning rate. `runs` have finished; the others are counted only. `score`: the task's
    score over those of `runs` that have one."""

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
        """The spread of a slice or a measure; "": of the score."""
        return (self.slices.get(key) or self.measures.get(key)) if key else self.score

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted(run.seed for run in self.runs))

    def values(self, key: str) -> list[float]:
        """The scores on a slice or a measure, in the order of the seeds."""
        return [value for _, value in sorted(_values(self.runs, key).items())]

    def questions(self, key: str) -> int:
        """The min number of answers of a run on a slice."""
        return min(run.final.slices[key].total for run in self.runs if key in run.final.slices)

    def is_below(self, key: str, guess: float | None) -> bool:
        """Whether the accuracy on a slice, or the mean accuracy (""), is significantly below that of guessing: by
        chance alone, half of all guessers are below it. False if `guess` is None."""
        spread = self.spread(key)
        if guess is None or spread is None:
            return False
        answers = self.repeats * sum(map(self.questions, [key] if key else primary(self.slices)))
        return wilson_interval(spread.mean, answers)[1] < guess

    @property
    def repeats(self) -> int:
        """The number of seeds among the finished runs: a seed that was trained twice counts as one run."""
        return len(set(self.seeds))

    @property
    def without_score(self) -> int:
        """The number of runs without a final score: unfinished ones, failed ones, and seeds whose score is NaN."""
        return self.unfinished + self.repeats - (self.score.runs if self.score else 0)

    @property
    def finished_of(self) -> str:
        """`3`, or `2 of 3` where a run has not finished."""
        return f"{self.repeats} of {self.planned}" if self.unfinished else str(self.repeats)

    @property
    def planned(self) -> int:
        """The number of runs, finished or not."""
        return self.repeats + self.unfinished


@dataclass(frozen=True)
class Architecture:
    """The runs of one group (`canonlm.runs.groups`) on one task. `best` is None while no run has finished. `score`: the
    measure or the slice that the runs of this task are compared by, "" for the mean accuracy. `tokens_per_s`: the
    median over all finished runs. `tuning`: the rates of runs on validation samples, if these have chosen the rate.
    `tunes`: these are such runs, which are not compared with others."""

    group: Group = field(repr=False)
    score: str
    rates: tuple[Rate, ...]
    best: Rate | None
    parameters: int | None
    tokens_per_s: float | None
    tuning: tuple[Rate, ...] = ()
    tunes: bool = False

    @property
    def validated(self) -> bool:
        return bool(self.tuning)

    @property
    def arch(self) -> str:
        return self.group.name

    @property
    def family(self) -> str:
        return self.group.family

    @property
    def task(self) -> TaskInfo:
        return self.group.runs[0].task

    @property
    def state_bytes(self) -> int | None:
        return self.group.state_bytes


@dataclass(frozen=True)
class Difference:
    """A score minus that of another architecture, each at its best rate, on the seeds that both have.

    values: the differences seed by seed. low, high: the 95 % interval of the difference of means
    (`canonlm.runs.seed_statistics.safe_difference`), which does not pair seeds; of one or two seeds, the mean.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def pairs(self) -> int:
        return len(self.values)


def wilson(count: Count) -> tuple[float, float]:
    """The 95 % interval of a run's own accuracy. Questions share examples, so their effective number is smaller."""
    return wilson_interval(count.accuracy, count.total / seed_statistics.DESIGN)


def summarise(runs: Iterable[Run]) -> list[Architecture]:
    """One entry per task and group: architectures in order of appearance, the smaller size first."""
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run.task_label, []).append(run)
    architectures = []
    for members in tasks.values():
        groups, score = grouped(members), _score(members)
        tuning = {_apart_from_split(one): one for one in groups if _split(one) == "validation"}
        of_task = [
            _architecture(one, score, tuning.get(_apart_from_split(one)) if _split(one) == "test" else None)
            for one in groups
        ]
        tuned = {_apart_from_split(a.group) for a in of_task if a.validated}
        architectures += [
            replace(a, tunes=_split(a.group) == "validation" and _apart_from_split(a.group) in tuned) for a in of_task
        ]
    return architectures


def compared_of(architectures: Iterable[Architecture]) -> list[Architecture]:
    """Those that are compared: without runs that only choose the rate of others."""
    return [a for a in architectures if not a.tunes]


def median_speed(runs: Iterable[Run]) -> float | None:
    """The median speed of the finished runs, in tokens per second."""
    speeds = [run.result.tokens_per_s for run in runs if run.result and run.result.tokens_per_s is not None]
    return statistics.median(speeds) if speeds else None


def slices_of(architectures: Iterable[Architecture]) -> list[str]:
    """Every slice of any best rate, scale by scale, easy ones first."""
    return in_order(key for a in architectures if a.best for key in a.best.slices)


def scales_of(architectures: Iterable[Architecture]) -> list[list[str]]:
    """The same, a list per scale; the primary scale is the first."""
    keys = slices_of(architectures)
    return [[key for key in keys if scale_of(key) == scale] for scale in dict.fromkeys(map(scale_of, keys))]


def measures_of(architectures: Iterable[Architecture]) -> list[str]:
    """Every measure of any best rate, in the order of the rows, without those that only bound another."""
    names = dict.fromkeys(name for a in architectures if a.best for name in a.best.measures)
    return [name for name in names if not name.endswith(AT_MOST)]


def columns_of(architectures: Sequence[Architecture]) -> list[str]:
    """The columns of a table of results: the score if it is a measure, the slices of the primary scale, then the other
    measures."""
    measures = measures_of(architectures)
    scores = [name for name in measures if any(name == a.score for a in architectures)]
    return [*scores, *primary(slices_of(architectures)), *(name for name in measures if name not in scores)]


def guesses_of(
    architectures: Iterable[Architecture], keys: Iterable[str], chance: Mapping[str, float]
) -> dict[str, float]:
    """The scores of guessing in the columns of a table; of the mean accuracy ("") if they are known for all slices."""
    guesses = {key: chance[key] for key in keys if key in chance}
    headline = primary(slices_of(architectures))
    if "" in keys and headline and all(key in chance for key in headline):
        guesses[""] = statistics.mean(chance[key] for key in headline)
    return guesses


def at_most(run: Run, name: str) -> float | None:
    """The bound of the measure `name` for this run; None if it has none.

    The bound on bits per person bounds bits per parameter too: of two measures of the same bits, each reaches the
    same share of its bound. A model that has stored nothing yet does not show the bound; a later evaluation does.
    """
    for row in reversed(run.evals):
        bound, value = row.measures.get(name + AT_MOST), row.measures.get(name)
        if bound is not None:
            return bound
        other, bound_of_bits = row.measures.get("bits_per_person"), row.measures.get("bits_per_person" + AT_MOST)
        if name == "bits_per_parameter" and value and other and bound_of_bits:
            return value * bound_of_bits / other
    return None


def counterpart(reference: Sequence[Architecture], other: Architecture) -> Architecture:
    """The member of a family at several sizes that is nearest in size to `other`."""
    if not other.parameters:
        return reference[0]
    size = math.log(other.parameters)
    return min(reference, key=lambda a: abs(math.log(a.parameters) - size) if a.parameters else math.inf)


def differences(reference: Architecture, other: Architecture) -> dict[str, Difference]:
    """By slice and measure, paired by seed; empty where the two best rates share no seed."""
    if reference.best is None or other.best is None:
        return {}
    keys = [*slices_of([reference, other]), *measures_of([reference, other])]
    results = {key: _difference(key, reference.best, other.best) for key in keys}
    return {key: difference for key, difference in results.items() if difference}


def adjusted(architectures: Iterable[Architecture]) -> str:
    """One sentence on what `--match` adjusted; "" where nothing was."""
    parts = [f"{a.arch} {a.group.matched}" for a in architectures if a.group.matched]
    return f"Adjusted by --match: {'; '.join(parts)}." if parts else ""


def fairness(architectures: Sequence[Architecture]) -> list[str]:
    """The limits of the comparison, a sentence each."""
    notes = []
    if any(flat(a.group.runs[0].config).get("train.until") is not None for a in architectures):
        notes.append("Runs ended once enough was right (train.until), so neither final scores nor the rates with the "
                     "highest ones tell which is better: compare the steps.")  # fmt: skip
    notes += [note for a in architectures for note in _passed_over(a)]
    tried = {a.arch: {rate.lr for rate in a.tuning or a.rates if rate.runs} for a in architectures}
    if len({frozenset(rates) for rates in tried.values()}) > 1:
        parts = [f"{arch} {', '.join(f'{lr:g}' for lr in sorted(rates)) or 'none'}" for arch, rates in tried.items()]
        notes.append(f"The architectures did not finish the same learning rates: {'; '.join(parts)}.")
    elif any(len(rates) < MIN_RATES for rates in tried.values()):
        why = "they may suit one architecture by luck" if len(architectures) > 1 else "another one may do better"
        notes.append(f"Fewer than {MIN_RATES} learning rates were tried: {why}.")
    bests = [a.best for a in architectures if a.best]
    if len({best.seeds for best in bests}) > 1:
        parts = [f"{best.arch} {', '.join(map(str, best.seeds))}" for best in bests]
        notes.append(f"The best rates do not have the same seeds: {'; '.join(parts)}.")
    elif any((best.score.runs if best.score else best.repeats) < SEEDS_OF_INTERVAL for best in bests):
        notes.append(f"Fewer than {SEEDS_OF_INTERVAL} seeds: the spread between repeats is not well known.")
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


def _values(runs: Sequence[Run], key: str) -> dict[int, float]:
    """The final score of each seed on the slice or measure `key`; "" is the mean accuracy."""
    finals = [(run.seed, run.final) for run in runs]
    scores = [(seed, final.value(key) if key else final.accuracy) for seed, final in finals]
    return by_seed((seed, value) for seed, value in scores if value is not None)


def _spread(runs: Sequence[Run], key: str) -> Spread | None:
    values = _values(runs, key)
    if not values:
        return None
    slices = [run.final.slices for run in runs if not key or key in run.final.slices]  # none has a measure
    counts = [sum(each[k].total for k in ([key] if key else primary(each))) for each in slices]
    return spread_of([*values.values()], min(counts, default=None))


def _difference(key: str, reference: Rate, other: Rate) -> Difference | None:
    ours, theirs = _values(other.runs, key), _values(reference.runs, key)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    # Differences below 1e-12 come from rounding: shares differ by far larger steps.
    gaps = [round(ours[seed] - theirs[seed], 12) if is_slice(key) else ours[seed] - theirs[seed] for seed in seeds]
    mean = statistics.mean(gaps)
    low, high = mean, mean
    if len(seeds) >= SEEDS_OF_INTERVAL:
        mine, others = ([values[seed] for seed in seeds] for values in (ours, theirs))
        questions = min(rate.questions(key) for rate in (other, reference)) if is_slice(key) else None
        low, high = safe_difference(mine, others, questions)
    return Difference(mean, low, high, tuple(gaps))


def _score(runs: Sequence[Run]) -> str:
    """The measure or the slice that is the score of the runs' task, where any finished run has it; else "". Of text:
    the loss."""
    if runs[0].sources:
        return "loss"
    score = runs[0].task.score
    key = score.measure or score.slice
    return key if any(run.final.value(key) is not None for run in runs if run.finished) else ""


def _split(group: Group) -> str:
    return "test" if group.runs[0].sources else str(flat(group.runs[0].config).get("train.eval_split", "test"))


def _apart_from_split(group: Group) -> str:
    config = group.runs[0].config
    train = config.get("train")
    return group_of({**config, "train": {**train, "eval_split": "test"}} if isinstance(train, Mapping) else config)


def _best(rates: Iterable[Rate]) -> Rate | None:
    finished = {rate.lr: rate for rate in rates if rate.runs}
    losses = {lr: -statistics.fmean(run.final_loss for run in rate.runs) for lr, rate in finished.items()}
    scores = {lr: (*_judged(rate), losses[lr]) for lr, rate in finished.items()}
    return finished[best_rate(scores)] if finished else None


def _judged(rate: Rate) -> tuple[int, float]:
    """How many seeds have a score, and its mean; of text negated, as a lower loss is better."""
    if rate.score is None:
        return 0, 0.0
    return rate.score.runs, -rate.score.mean if rate.runs[0].sources else rate.score.mean


def _passed_over(a: Architecture) -> list[str]:
    """A sentence for each rate with a better score than the best rate, but of fewer seeds."""
    judged = {rate.lr: _judged(rate) for rate in a.tuning or a.rates if rate.score}
    if a.best is None or a.best.lr not in judged:
        return []
    seeds, mean = judged[a.best.lr]
    return [
        f"At learning rate {lr:g}, {a.arch} does better than at {a.best.lr:g}, which is shown, but fewer seeds have a "
        f"score there ({few} against {seeds})."
        for lr, (few, better) in judged.items()
        if better > mean
    ]


def _architecture(group: Group, score: str, tuning: Group | None) -> Architecture:
    """tuning: the same on validation samples, which chooses the rate where it can."""
    rates = _rates(group, score)
    of_tuning = _rates(tuning, score) if tuning else ()
    chosen = _best(of_tuning)
    validated = next((rate for rate in rates if chosen and rate.lr == chosen.lr and rate.runs), None)
    best = validated or _best(rates)
    results = [run.result for run in group.runs if run.result is not None]
    sizes = {result.num_parameters for result in results}
    return Architecture(
        group, score, rates, best, sizes.pop() if len(sizes) == 1 else None,
        median_speed(group.runs), of_tuning if validated else (),
    )  # fmt: skip


def _rates(group: Group, score: str) -> tuple[Rate, ...]:
    by_rate = {lr: [run for run in group.runs if run.lr == lr] for lr in sorted({run.lr for run in group.runs})}
    return tuple(rate_of(group.name, lr, runs, score) for lr, runs in by_rate.items())


def rate_of(arch: str, lr: float, runs: Sequence[Run], score: str) -> Rate:
    """The runs of one architecture at one rate, finished or not. score: as in `Architecture`."""
    finished = tuple(run for run in runs if run.finished)
    slices = in_order(key for run in finished for key in run.final.slices)
    measures = dict.fromkeys(name for run in finished for name in run.final.measures)
    return Rate(
        arch=arch, lr=lr, runs=finished, unfinished=len(runs) - len(finished),
        slices={key: spread for key in slices if (spread := _spread(finished, key))},
        measures={name: spread for name in measures if (spread := _spread(finished, name))},
        score=_spread(finished, score),
    )  # fmt: skip


def compared(ours: Rate, theirs: Rate, keys: Sequence[str], *, pairs: int) -> Comparison:
    """The comparison of two rates on slices, or on one measure. pairs: see `seed_statistics.compare`."""
    mine, others = ({key: rate.values(key) for key in keys} for rate in (ours, theirs))
    questions = None  # of a measure
    if all(map(is_slice, keys)):
        questions = min(rate.questions(key) for rate in (ours, theirs) for key in keys)
    return compare(mine, others, questions, pairs=pairs)
