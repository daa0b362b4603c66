"""Verdicts on the paper's claims: supported, contradicted, undecided or untested, with intervals.

A claim is a set of comparisons, its parts. A comparison uses seeds as observations (`canonlm.runs.seed_statistics`).
Its safe interval decides: all of it is as expected, or none of it, or a part. `combined` gives the claim's verdict.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from canonlm.experiments.grid import Outcomes, Point, at_edge, points_of, rates_of, reported, tuned, tuning_runs
from canonlm.experiments.outcomes import LARGER_IS_BETTER, accuracy, diverged, evaluated_every, first_step
from canonlm.experiments.schema import At, Claim, Experiment, Pair, Setting
from canonlm.runs.load import Run
from canonlm.runs.rows import primary
from canonlm.runs.seed_statistics import MIN_SEEDS, Comparison, Interval, compare, compare_ratios, permutation_p
from canonlm.runs.speed import equal_speed_p, speed_factor

State = Literal["supported", "supported in part", "contradicted", "undecided", "untested"]

POINTS, FASTER = "points", "times as fast"
UNITS = {
    "bits_per_parameter": "bits per parameter",
    "loss": "nats per token",
    "loss_beyond": "nats per token beyond the trained length",
    "kl": "nats of divergence",
}
"""Units of measures; the unit of any other measure is its name."""


@dataclass(frozen=True)
class Compared:
    """The comparison of one pair. `result`: arm minus against, in shares of one or in units of the measure, or
    how many times faster; None without any run. rates: the learning rates of each. at_edge: the arms whose rate is the
    smallest or largest that was tried. unit: for display; a number in it is `factor` times that of `result`. p: of an
    exact permutation test of equal distributions; not corrected for the number of comparisons."""

    pair: Pair
    state: State
    result: Comparison | None
    rates: tuple[float | None, ...]
    at_edge: tuple[str, ...]
    unit: str = "points"
    p: float = 1.0

    @property
    def factor(self) -> float:
        return 100.0 if self.unit == POINTS or self.unit.startswith("%") else 1.0


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim at a scale. is_open: more seeds may decide it, so the next look is due. runs: names of all
    its runs, finished or not; done: the number of finished."""

    claim: str
    experiment: str
    scale: str
    state: State
    is_open: bool
    compared: tuple[Compared, ...]
    seeds: int
    paper: str
    note: str
    runs: tuple[str, ...]
    done: int


def combined(parts: Collection[State]) -> State:
    """The verdict on a claim from those on its parts: the same if all are the same, and else `supported in part` if
    one is supported, or `contradicted` if one is contradicted. While a part is untested, so is the claim."""
    for state in ("untested", "supported in part", "supported", "contradicted"):
        if state in parts:
            return "supported in part" if state == "supported" and set(parts) != {state} else state
    return "undecided"


def judge(experiment: Experiment, scale: str, outcomes: Outcomes) -> list[Verdict]:
    """A verdict for every claim of the experiment that this scale tests."""
    return [
        _judged(experiment, scale, number, claim, outcomes)
        for number, claim in experiment.claims.items()
        if scale in claim.at
    ]


def undecided_at(experiment: Experiment, scale: str, seeds: int, outcomes: Outcomes) -> set[Point]:
    """The points of claims that are undecided with this many fresh seeds, all of which are done."""
    undecided: set[Point] = set()
    for number, claim in experiment.claims.items():
        if scale in claim.at:
            verdict = _at_look(experiment, scale, number, claim, outcomes, seeds)
            if verdict.is_open and verdict.seeds >= seeds:
                at = claim.at[scale]
                undecided |= {point for arm in claim.arms for point in points_of(experiment, at, arm)}
    return undecided


def _judged(experiment: Experiment, scale: str, number: str, claim: Claim, outcomes: Outcomes) -> Verdict:
    """The verdict at the first registered look that decides, or else at the last one with finished runs."""
    looks = sorted(experiment.settings[claim.at[scale].setting].looks) or [0]  # type: ignore[index]
    verdict = _at_look(experiment, scale, number, claim, outcomes, looks[0])
    for seeds in looks[1:]:
        later = _at_look(experiment, scale, number, claim, outcomes, seeds)
        if not verdict.is_open or later.seeds < seeds:
            break
        verdict = later
    return verdict


def _at_look(experiment: Experiment, scale: str, number: str, claim: Claim, outcomes: Outcomes, seeds: int) -> Verdict:
    """The verdict with this number of fresh seeds of each arm; undecided while there are fewer."""
    at = claim.at[scale]  # type: ignore[index]
    measure = None if claim.steps_to else claim.measure or experiment.settings[at.setting].measure
    tested = {arm: _tested(experiment, at, arm, measure, outcomes, seeds) for arm in claim.arms}
    level = experiment.settings[at.setting].looks.get(seeds, 0.05)
    compared = tuple(_compared(experiment, claim, at, pair, tested, level, seeds) for pair in claim.pairs)
    states = {each.state for each in compared}
    is_open = "undecided" in states and states <= {"undecided", "supported"}
    state = combined(states | {"undecided"} if claim.part else states)
    names = dict.fromkeys(name for arm in tested.values() for name in arm.runs)
    used = min(len(arm.seeds) for arm in tested.values())
    note, finished = claim.note, sum(name in outcomes for name in names)
    if without := sorted({name for arm in tested.values() for name in arm.lost}):
        state, is_open = "undecided", True  # the remaining seeds are a selection
        which = f"{len(without)} of its runs failed or diverged, such as {without[0]}"
        note = "; ".join(filter(None, [note, which]))
    return Verdict(
        number, experiment.name, scale, state, is_open, compared, used, claim.paper, note, tuple(names), finished
    )


def is_complete(experiment: Experiment, verdict: Verdict) -> bool:
    """Whether a verdict has all seeds of a registered look, and as many as verdicts need."""
    setting = experiment.settings[experiment.claims[verdict.claim].at[verdict.scale].setting]  # type: ignore[index]
    return verdict.seeds >= _needed(setting, min(setting.looks, default=0))


def _needed(setting: Setting, look: int) -> float:
    """The number of seeds that a verdict needs at a look. Seeds that chose one of several rates never decide."""
    if setting.choose_on == "test":
        kinds = (*setting.kinds,) or (None,)
        if setting.widen or any(len(rates_of(setting, kind)) > 1 for kind in kinds):
            return math.inf
    return max(look, MIN_SEEDS)


def shares_right(
    experiment: Experiment, verdict: Verdict, arm: str, slices: list[str], outcomes: Outcomes
) -> list[float]:
    """The accuracy of an arm on slices, for each seed behind a verdict (the best of its sizes counts)."""
    at = experiment.claims[verdict.claim].at[verdict.scale]  # type: ignore[index]
    seeds = _tested(experiment, at, arm, None, outcomes, verdict.seeds).seeds
    return [max(accuracy(each.final, slices) for each in seed) for seed in seeds]


Seeds = tuple[tuple[Run, ...], ...]
"""For each seed, its runs, one for each size."""


class _Arm(NamedTuple):
    """An arm of a claim. rates: one for each size. runs: names of all, including tuning runs. seeds: for each seed that
    is done, its outcomes, one for each size. lost: names of fresh runs that failed or diverged, or of tuning runs if no
    rate is left."""

    rates: tuple[float | None, ...]
    at_edge: bool
    runs: tuple[str, ...]
    seeds: Seeds
    lost: tuple[str, ...]


def _tested(experiment: Experiment, at: At, arm: str, measure: str | None, outcomes: Outcomes, seeds: int) -> _Arm:
    points = points_of(experiment, at, arm)
    rates = tuple(tuned(experiment, point, outcomes) for point in points)
    edge = any(at_edge(experiment, point, rate, outcomes) for point, rate in zip(points, rates, strict=True))
    fresh = [reported(experiment, point, outcomes, seeds) for point in points]
    runs = [run.name for point in points for run in tuning_runs(experiment, point, outcomes)]
    fresh_names = [run.name for of_size in fresh for run in of_size]
    judged = runs if None in rates and all(name in outcomes for name in runs) else fresh_names
    lost = tuple(
        name for name in judged if name in outcomes and ((run := outcomes[name]) is None or diverged(run, measure))
    )
    done = [
        [outcome for run in of_seed if (outcome := outcomes.get(run.name)) and not diverged(outcome, measure)]
        for of_seed in zip(*fresh, strict=False)
    ]
    return _Arm(
        rates,
        edge,
        (*runs, *fresh_names),
        tuple(tuple(each) for each in done if len(each) == len(points)),
        lost,
    )


def _compared(
    experiment: Experiment, claim: Claim, at: At, pair: Pair, tested: Mapping[str, _Arm], level: float, seeds: int
) -> Compared:
    setting = experiment.settings[at.setting]
    arms, needed = [tested[arm] for arm in pair.arms], _needed(setting, seeds)
    rates = tuple(rate for arm in arms for rate in arm.rates)
    edges = tuple(name for name in pair.arms if tested[name].at_edge)
    measure = claim.measure or setting.measure
    unit = FASTER if claim.steps_to else UNITS.get(measure, measure) if measure else POINTS
    unit = f"% of the {unit}" if claim.relative else unit
    count = min(len(arm.seeds) for arm in arms)
    sides = [arm.seeds[:count] for arm in arms]  # before a look is complete, one arm may be ahead
    if not count:
        return Compared(pair, "untested", None, rates, edges, unit)
    slices = at.slices or claim.slices or setting.slices
    questions: int | None = None
    if claim.steps_to is not None:
        result, p = _faster(sides, slices, claim.steps_to, level / len(claim.pairs))
        return Compared(pair, _state(pair, result, needed, ratios=True), result, rates, edges, unit, p)
    if measure is not None:
        best = max if measure in LARGER_IS_BETTER else min
        values = [{measure: [best(each.final.measures[measure] for each in seed) for seed in side]} for side in sides]
    else:
        slices = slices or primary(sides[0][0][0].final.slices)
        bests = [[max(seed, key=lambda each: accuracy(each.final, slices)) for seed in side] for side in sides]
        values = [{key: [each.final.answers(key).accuracy for each in side] for key in slices} for side in bests]
        questions = min(each.final.answers(key).total for side in bests for each in side for key in slices)
    compared = compare_ratios if claim.relative else compare
    result = compared(values[0], values[1], questions, pairs=len(claim.pairs), level=level)
    means = (np.mean([*side.values()], axis=0).tolist() for side in values)
    return Compared(pair, _state(pair, result, needed), result, rates, edges, unit, permutation_p(*means))


def _state(pair: Pair, result: Comparison | None, needed: float, *, ratios: bool = False) -> State:
    """The state of a comparison; `undecided` with fewer seeds than needed. ratios: 2 is then as far from no difference
    as 1/2."""
    if result is None or result.seeds < needed:
        return "undecided"
    smallest, interval = pair.smallest, result.safe
    if ratios:
        smallest = math.log(smallest)
        interval = Interval(*(math.log(end) if end else -math.inf for end in interval))
    return state_of(pair.expect, smallest, interval)


def _faster(
    sides: Sequence[Seeds], slices: Sequence[str], share: float, level: float
) -> tuple[Comparison | None, float]:
    """How many times faster the first side gets that share right (None if too few runs do), and the p-value. The best
    of its sizes counts for each seed."""
    ours, theirs = (
        [min(filter(None, (first_step(run, slices, share) for run in seed)), default=None) for seed in side]
        for side in sides
    )
    runs = [run for side in sides for seed in side for run in seed]
    end, every = max(run.final.step for run in runs), max(map(evaluated_every, runs))
    speed, p = speed_factor(ours, theirs, end, level, every=every), equal_speed_p(ours, theirs, end)
    if speed is None:
        return None, p
    interval = Interval(speed.low, speed.high)
    return Comparison("open", len(ours), speed.factor, interval, interval, {}), p


def state_of(expect: str, smallest: float, interval: Interval) -> State:
    """Whether an interval of arm minus against lies where the expectation says, or nowhere there, or in part."""
    low, high = interval
    first, last = {
        "higher": (smallest, math.inf),
        "lower": (-math.inf, -smallest),
        "not lower": (-smallest, math.inf),
        "alike": (-smallest, smallest),
    }[expect]
    if first <= low and high <= last:
        return "supported"
    return "contradicted" if high < first or low > last else "undecided"
