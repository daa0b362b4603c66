"""Would the paper's own numbers pass a claim's test? A test that they fail is not a test of the claim.

The registered comparison (arms, expectation, smallest difference) is applied to every cell that the paper prints for
both arms on the claim's task: all sizes and difficulties, on the claim's slices where the paper has them. The paper has
one number for each, so there are no intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean

import polars as pl

from canonlm.core.errors import InvalidSetting
from canonlm.experiments import published
from canonlm.experiments.schema import Claim, Experiment, Pair, Scale, load, names, places, setting, setting_names
from canonlm.experiments.verdicts import state_of
from canonlm.runs.seed_statistics import Interval

Cell = tuple[str, str]  # difficulty, as `canonlm.tasks` names it, and size


@dataclass(frozen=True)
class Check:
    """One pair of a claim, as it is registered at a scale, on the paper's cells of the same task. passed, cells: how
    many of them come out as registered."""

    claim: str
    scale: str
    pair: Pair
    task: str
    passed: int
    cells: int

    @property
    def fails(self) -> bool:
        return self.cells > 0 and 2 * self.passed <= self.cells

    def __str__(self) -> str:
        test = f"{self.pair} {self.pair.expect} by {self.pair.smallest:g}"
        what = f"{self.claim} at {self.scale} scale, {test} on {self.task}"
        return f"{what}: {self.passed} of the paper's {self.cells} cells" if self.cells else f"{what}: no cells"


def checks(experiment: Experiment) -> list[Check]:
    """All registered pairs of architectures, without those of which the paper prints nothing: the steps to a score, and
    arms at a size or with a training of ours."""
    return [
        _checked(experiment, number, claim, scale, pair)
        for number, claim in experiment.claims.items()
        for scale in claim.at
        for pair in claim.pairs
        if claim.steps_to is None and "@" not in "".join(pair.arms)
    ]


def all_checks() -> list[Check]:
    """Those of the experiments in the package."""
    return [check for name in names() for check in checks(load(name))]


def refuse(experiment: Experiment, scale: str) -> None:
    """ValueError: a registration that at most half of the paper's cells pass."""
    for each in checks(experiment):
        if each.scale == scale and each.fails:
            key = f"claims.{each.claim}.pairs"
            raise InvalidSetting(key, f"{key}: expected a test that the paper's own numbers pass, got {each}")


def _checked(experiment: Experiment, number: str, claim: Claim, scale: Scale, pair: Pair) -> Check:
    at = claim.at[scale]
    task = experiment.settings[at.setting]
    slices = at.slices or claim.slices or task.slices
    known = task.difficulties if scale == "paper" else _difficulties(task.task)
    metric = "kl" if (claim.measure or task.measure) == "kl" else "accuracy"
    first, other = (
        {
            cell: _mean(of_slices, slices)
            for cell, of_slices in paper_cells(metric).get(places(experiment, at, arm)[0][0], {}).items()
            if cell[0] in known
        }
        for arm in pair.arms
    )
    gaps = [(first[cell] - other[cell]) / (other[cell] if claim.relative else 1) for cell in first if cell in other]
    passed = sum(state_of(pair.expect, pair.smallest, Interval(gap, gap)) == "supported" for gap in gaps)
    return Check(number, scale, pair, task.paper or task.task, passed, len(gaps))


@cache
def _difficulties(task: str) -> frozenset[str]:
    """All of a task that the paper has numbers for."""
    settings = map(setting, setting_names())
    return frozenset(key for each in settings if each.paper and each.task == task for key in each.difficulties)


def _mean(of_slices: Mapping[str, float], slices: Sequence[str]) -> float:
    """The mean over the slices of these that the paper prints, or else over all."""
    return mean([of_slices[key] for key in slices if key in of_slices] or of_slices.values())


@cache
def paper_cells(metric: str) -> Mapping[str, dict[Cell, dict[str, float]]]:
    """Shares right (or KL divergences) by our name of the architecture, cell and slice."""
    cells: dict[str, dict[Cell, dict[str, float]]] = {}
    for row in published.grids().filter(pl.col("metric") == metric).iter_rows(named=True):
        of_arch = cells.setdefault(published.counterpart(row).arch, {})
        share = row["value"] / 100 if row["unit"] else row["value"]
        of_arch.setdefault((row["setting"], row["size"]), {})[row["slice"]] = share
    return cells
