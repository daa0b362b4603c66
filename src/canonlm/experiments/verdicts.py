"""Verdicts on the paper's claims: supported, contradicted, undecided or untested, with intervals.

A claim is a set of comparisons, its parts. A comparison uses seeds as observations (`canonlm.runs.seed_statistics`). A
difference that is significantly smaller than the one that matters contradicts it. `combined` gives the claim's verdict.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from canonlm.experiments.grid import Outcomes, Point, at_edge, points_of, reported, tuned, tuning_runs
from canonlm.experiments.outcomes import LARGER_IS_BETTER, accuracy, diverged, step_at
from canonlm.experiments.schema import At, Claim, Experiment, Pair
from canonlm.runs.load import Run
from canonlm.runs.rows import primary
from canonlm.runs.seed_statistics import Comparison, compare, spread_over_seeds

State = Literal["supported", "supported in part", "contradicted", "undecided", "untested"]

POINTS, STEPS = "points", "% of the training"
UNITS = {
    "bits_per_parameter": "bits per parameter",
    "loss": "nats per token",
    "loss_beyond": "nats per token beyond the trained length",
}
"""Units of measures; the unit of any other measure is its name."""


@dataclass(frozen=True)
class Compared:
    """The comparison of one pair. `result`: arm minus against, in shares of one (or of the training's steps) or in
    units of the measure; None without any run. rates: the learning rates of each. at_edge: the arms whose rate is the
    smallest or largest that was tried. unit: for display; a number in it is `factor` times that of `result`."""

    pair: Pair
    state: State
    result: Comparison | None
    rates: tuple[float | None, ...]
    at_edge: tuple[str, ...]
    unit: str = "points"

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
    for state in ("untested", "supported", "contradicted"):
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
    """The verdict with this number of fresh seeds of each arm."""
    at = claim.at[scale]  # type: ignore[index]
    measure = None if claim.steps_to else claim.measure or experiment.settings[at.setting].measure
    tested = {arm: _tested(experiment, at, arm, measure, outcomes, seeds) for arm in claim.arms}
    level = experiment.settings[at.setting].looks.get(seeds, 0.05)
    compared = tuple(_compared(experiment, claim, at, pair, tested, level) for pair in claim.pairs)
    states = {each.state for each in compared}
    state, is_open = combined(states), "undecided" in states and states <= {"undecided", "supported"}
    names = dict.fromkeys(name for arm in tested.values() for name in arm.runs)
    used = min(len(arm.seeds) for arm in tested.values())
    note, finished = claim.note, sum(name in outcomes for name in names)
    if without := sorted({name for arm in tested.values() for name in arm.diverged}):
        state, is_open = "undecided", True  # the remaining seeds are a selection
        which = f"{len(without)} runs diverged (no finite {measure} at the end), such as {without[0]}"
        note = "; ".join(filter(None, [note, which]))
    return Verdict(
        number, experiment.name, scale, state, is_open, compared, used, claim.paper, note, tuple(names), finished
    )


def shares_right(
    experiment: Experiment, verdict: Verdict, arm: str, slices: list[str], outcomes: Outcomes
) -> tuple[list[float], int]:
    """The accuracy of an arm on slices, for each seed behind a verdict (the best of its sizes counts), and the number
    of questions."""
    at = experiment.claims[verdict.claim].at[verdict.scale]  # type: ignore[index]
    seeds = _tested(experiment, at, arm, None, outcomes, verdict.seeds).seeds
    shares = [max(accuracy(each.final, slices) for each in seed) for seed in seeds]
    return shares, min(each.final.answers(key).total for seed in seeds for each in seed for key in slices)


class _Arm(NamedTuple):
    """An arm of a claim. rates: one for each size. runs: names of all, including tuning runs. seeds: for each seed that
    is done and has not diverged, its outcomes, one for each size. diverged: names of diverged fresh runs, or of tuning
    runs if no rate is left."""

    rates: tuple[float | None, ...]
    at_edge: bool
    runs: tuple[str, ...]
    seeds: tuple[tuple[Run, ...], ...]
    diverged: tuple[str, ...]


def _tested(experiment: Experiment, at: At, arm: str, measure: str | None, outcomes: Outcomes, seeds: int) -> _Arm:
    points = points_of(experiment, at, arm)
    rates = tuple(tuned(experiment, point, outcomes) for point in points)
    edge = any(at_edge(experiment, point, rate, outcomes) for point, rate in zip(points, rates, strict=True))
    fresh = [reported(experiment, point, outcomes, seeds) for point in points]
    runs = [run.name for point in points for run in tuning_runs(experiment, point, outcomes)]
    fresh_names = [run.name for of_size in fresh for run in of_size]
    judged = runs if None in rates and all(name in outcomes for name in runs) else fresh_names
    without = tuple(name for name in judged if (outcome := outcomes.get(name)) and diverged(outcome, measure))
    done = [
        [outcome for run in of_seed if (outcome := outcomes.get(run.name)) and not diverged(outcome, measure)]
        for of_seed in zip(*fresh, strict=False)
    ]
    return _Arm(
        rates,
        edge,
        (*runs, *fresh_names),
        tuple(tuple(each) for each in done if len(each) == len(points)),
        without,
    )


def _compared(
    experiment: Experiment, claim: Claim, at: At, pair: Pair, tested: Mapping[str, _Arm], level: float
) -> Compared:
    setting = experiment.settings[at.setting]
    arms = [tested[arm] for arm in pair.arms]
    rates = tuple(rate for arm in arms for rate in arm.rates)
    edges = tuple(name for name in pair.arms if tested[name].at_edge)
    measure = claim.measure or setting.measure
    unit = STEPS if claim.steps_to else UNITS.get(measure, measure) if measure else POINTS
    unit = f"% of the {unit}" if claim.relative else unit
    sides = [arm.seeds for arm in arms]
    if not all(sides):
        return Compared(pair, "untested", None, rates, edges, unit)
    slices = at.slices or claim.slices or setting.slices
    questions: int | None = None
    two_state = False
    if claim.steps_to is not None:
        share = claim.steps_to
        values = [{"steps": [min(step_at(each, slices, share) for each in seed) for seed in side]} for side in sides]
    elif measure is not None:
        best = max if measure in LARGER_IS_BETTER else min
        values = [{measure: [best(each.final.measures[measure] for each in seed) for seed in side]} for side in sides]
    else:
        slices = slices or primary(sides[0][0][0].final.slices)
        bests = [[max(seed, key=lambda each: accuracy(each.final, slices)) for seed in side] for side in sides]
        values = [{key: [each.final.answers(key).accuracy for each in side] for key in slices} for side in bests]
        questions = min(each.final.answers(key).total for side in bests for each in side for key in slices)
        two_state = setting.two_state
    if claim.relative:
        reference = float(np.mean([*values[-1].values()])) or 1.0
        values = [{key: [value / reference for value in row] for key, row in side.items()} for side in values]
        questions = None
    if pair.against is None:
        result = spread_over_seeds([*np.mean([*values[0].values()], axis=0)])
    else:
        result = compare(values[0], values[1], questions, pairs=len(claim.pairs), two_state=two_state, level=level)
    return Compared(pair, _state(pair, result), result, rates, edges, unit)


def _state(pair: Pair, result: Comparison) -> State:
    """The state of a comparison; `undecided` with too few seeds, or if the runs allow either."""
    if result.state == "undecided":
        return "undecided"
    if pair.against is None:
        large, small = result.low >= pair.smallest, result.high < pair.smallest
        as_expected, opposite = (large, small) if pair.expect == "higher" else (small, large)
        return "supported" if as_expected else "contradicted" if opposite else "undecided"
    differs = result.state in ("higher", "lower")
    if pair.expect == "not lower":
        if result.low >= -pair.smallest:
            return "supported"
        return "contradicted" if differs and result.gap <= -pair.smallest else "undecided"
    if pair.expect == "alike":
        if max(-result.low, result.high) <= pair.smallest:
            return "supported"
        return "contradicted" if differs and abs(result.gap) >= pair.smallest else "undecided"
    gain, largest_gain = (result.gap, result.high) if pair.expect == "higher" else (-result.gap, -result.low)
    if differs and gain >= pair.smallest:
        return "supported"
    return "contradicted" if (differs and gain < 0) or largest_gain < pair.smallest else "undecided"
