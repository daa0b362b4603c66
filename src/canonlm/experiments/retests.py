"""The paper's claims about the 64 published models, tested again on its own tables; `claims.yaml` says which models and
scores a claim compares.

Each setting was trained once. Runs that differ only in the learning rate are near repeats, so their gains are averaged:
one size and length of training is one observation. There are three or four, and a t-interval over them is wide.

The two models of a Llama pair also differ in their rotary positions. The 64 models cannot tell these apart from Canon
layers; the paper's models of 1.3B parameters can a little, since one of them was trained with eight seeds.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from canonlm.experiments.published import differing, published, seed_scores, slimpajama
from canonlm.experiments.published.benchmarks import BENCHMARKS, LOWER_IS_BETTER
from canonlm.runs.seed_statistics import t_factor, t_interval
from canonlm.runs.table import QUESTION, paired
from canonlm.train.config import Settings

if TYPE_CHECKING:
    from canonlm.experiments.verdicts import State

RIGHT = "% right"
FLAT = 1.0
"""Points: a gain within this of zero counts as none."""

NORM = "zeyuan_layernorm"


class TableTest(Settings):
    """Comparisons of published models, for each of `scores`: `pairs`, `seeds`, `spread`, `best` or `families`."""

    pairs: str = ""  # an architecture: its models with Canon layers against those without, at equal rates
    than: str = ""  # with `pairs`: another architecture, whose gains at equal sizes are subtracted
    seeds: str = ""  # an architecture: its variants with Canon layers at 1.3B against eight seeds of it without
    spread: str = ""  # an architecture: how far its eight seeds at 1.3B are apart, without an interval
    best: str = ""  # a name for all models of 1.3B: the highest score of any of them
    within: list[float] = []  # with `spread` and `best`: the numbers that the claim means
    families: str = ""  # what `ours` and the best of `theirs` are: (architecture, Canon layers), at equal sizes
    ours: list[str] = []
    theirs: list[list[str]] = []
    scores: dict[str, str]  # columns of the tables, and what the paper says
    confounder: str = ""  # what else might make the difference
    no_gain: bool = False  # the claim is that there is none
    margin: float = 0.0  # points by which the first may be lower, as the claim is that it is as good or better
    note: str = ""  # what else to know


@dataclass(frozen=True)
class Retest:
    """One comparison of a test.

    gains: one for each observation, in points (of a perplexity: as it is), positive in the direction of the claim.
    low, high: the 95 % interval of their mean. better: of `pairs` pairs of models. paper: what the paper says.
    """

    test: TableTest
    comparison: str
    gains: tuple[float, ...]
    low: float
    high: float
    better: int
    pairs: int
    paper: str

    @property
    def estimate(self) -> float:
        return statistics.mean(self.gains)

    @property
    def unit(self) -> str:
        return RIGHT if self.test.best else "less perplexity" if self.comparison.endswith("ppl") else "points"

    @property
    def note(self) -> str:
        if self.test.within:
            return f"the claim means {self.test.within[0]:g} to {self.test.within[1]:g}; one number, no interval"
        return f"{self.better} of {self.pairs} pairs"

    @property
    def verdict(self) -> "State":
        """supported, contradicted or undecided. A confounder leaves every difference undecided."""
        if self.test.confounder:
            return "undecided"
        if self.test.within:
            least, most = self.test.within
            return "supported" if least <= self.estimate <= most else "contradicted"
        if self.test.no_gain:
            outside = self.low > FLAT or self.high < -FLAT
            return "supported" if self.low > -FLAT and self.high < FLAT else "contradicted" if outside else "undecided"
        border = -self.test.margin
        return "supported" if self.low > border else "contradicted" if self.high < border else "undecided"


def retests(test: TableTest) -> Iterator[Retest]:
    """All comparisons of a test."""
    for column, paper in test.scores.items():
        if test.pairs:
            yield _pairs(test, column, paper)
        elif test.seeds:
            yield from _against_seeds(test, column)
        elif test.spread:
            seeds = seed_scores(column)
            what = f"the highest of {len(seeds)} seeds of {test.spread} - the lowest, {column}"
            yield _counted(test, what, max(seeds) - min(seeds), paper)
        elif test.best:
            scores = slimpajama().filter(*_is_of(column))["value"].to_list()
            yield _counted(test, f"the best of {len(scores)} {test.best}, {column}", max(scores), paper)
        else:
            yield _between(test, column, paper)


def _pairs(test: TableTest, column: str, paper: str) -> Retest:
    """With Canon layers minus without, at equal rates."""
    gains = _gains(test.pairs, column)
    keys, comparison = ["size", "tokens"], f"{test.pairs} with Canon layers - without"
    if test.than:
        gains = gains.join(_gains(test.than, column), on=[*keys, "lr"], suffix="_other")
        gains = gains.with_columns(gain=pl.col("gain") - pl.col("gain_other"))
        comparison += f", minus the same of {test.than}"
    means = gains.group_by(keys).agg(pl.col("gain").mean()).sort(keys)["gain"].to_list()
    better = int((gains["gain"] > 0).sum())
    return Retest(test, f"{comparison}, {column}", tuple(means), *t_interval(means), better, len(gains), paper)


def _gains(arch: str, column: str) -> pl.DataFrame:
    """The gain of every pair, in a column `gain`. A pair that differs in its norm, too, is left out."""
    other_norms = differing().filter(setting=NORM)["canon_model"].to_list()
    scores = published().filter(~pl.col("model").is_in(other_norms))
    rows = paired(scores.filter(pl.col("arch") == arch, *_is_of(column)))
    sign = -1 if BENCHMARKS[column].metric in LOWER_IS_BETTER else 1
    return rows.with_columns(gain=sign * pl.col("delta"))


def _against_seeds(test: TableTest, column: str) -> Iterator[Retest]:
    """The paper's models of 1.3B with variants of the architecture and Canon layers, each against eight seeds without:
    the interval of one new run minus the mean of the seeds."""
    rows, seeds = slimpajama().filter(*_is_of(column)), seed_scores(column)
    spread = t_factor(len(seeds)) * statistics.stdev(seeds) * math.sqrt(1 + 1 / len(seeds))
    variants = pl.col("model").str.starts_with(f"{test.seeds.removesuffix(')')} variant")
    for row in rows.filter(variants).iter_rows(named=True):
        gain = row["value"] - statistics.mean(seeds)
        comparison = f"{row['model']} - {len(seeds)} seeds of {test.seeds}, 1.3B, {column}"
        yield Retest(test, comparison, (gain,), gain - spread, gain + spread, int(gain > 0), 1, "")


def _counted(test: TableTest, comparison: str, value: float, paper: str) -> Retest:
    return Retest(test, comparison, (value,), value, value, 1, 1, paper)


def _between(test: TableTest, column: str, paper: str) -> Retest:
    ours, *others = (_by_size(family, column) for family in (test.ours, *test.theirs))
    theirs = {size: max((each[size] for each in others), key=statistics.mean) for size in ours}
    gaps = {size: [a - b for a, b in zip(ours[size], theirs[size], strict=True)] for size in ours}
    means = [statistics.mean(values) for values in gaps.values()]
    single = [gap for values in gaps.values() for gap in values]
    better = sum(gap > 0 for gap in single)
    comparison = f"{test.families}, {column}"
    return Retest(test, comparison, tuple(means), *t_interval(means), better, len(single), paper)


def _by_size(family: list[str], column: str) -> dict[str, list[float]]:
    """Scores of the models with 1T tokens at the rates 0.002 and 0.003, which every family was trained at."""
    arch, canon = family
    conditions = (pl.col("arch") == arch, pl.col("canon") == canon, pl.col("lr").is_in([0.002, 0.003]))
    rows = published().filter(*conditions, *_is_of(column), pl.col("tokens") < 1.5e12).sort("size", "lr")
    return {size: rows.filter(size=size)["value"].to_list() for size in rows["size"].unique(maintain_order=True)}


def _is_of(column: str) -> Sequence[pl.Expr]:
    benchmark = BENCHMARKS[column]
    return [pl.col(key) == getattr(benchmark, key) for key in QUESTION if key in ("task", "slice", "metric")]
