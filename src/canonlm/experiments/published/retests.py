"""The paper's claims about the 64 published models (C46 to C50), tested again on its own tables.

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

from canonlm.experiments.published import differing, published, slimpajama
from canonlm.experiments.published.benchmarks import BENCHMARKS, LOWER_IS_BETTER
from canonlm.experiments.tidy import QUESTION, paired
from canonlm.runs.intervals import t_factor, t_interval

if TYPE_CHECKING:
    import polars as pl

FLAT = 1.0
"""Points: a gain within this of zero counts as none."""

NORM = "zeyuan_layernorm"
ROTARY = "the models with Canon layers also turn only a quarter of each head by rotary positions"


@dataclass(frozen=True)
class Retest:
    """One comparison of a claim.

    gains: one for each observation, in points (of a perplexity: as it is), positive in the direction of the claim.
    low, high: the 95 % interval of their mean. better: of `pairs` pairs of models. paper: what the paper says.
    confounder: what else might make the difference, or "". flat: whether the claim is that there is no gain. note: what
    else to know.
    """

    claim: str
    comparison: str
    gains: tuple[float, ...]
    low: float
    high: float
    better: int
    pairs: int
    paper: str
    confounder: str = ""
    flat: bool = False
    note: str = ""

    @property
    def estimate(self) -> float:
        return statistics.mean(self.gains)

    @property
    def verdict(self) -> str:
        """supported, contradicted or undecided. A confounder leaves every difference undecided."""
        if self.confounder:
            return "undecided"
        if self.flat:
            outside = self.low > FLAT or self.high < -FLAT
            return "supported" if self.low > -FLAT and self.high < FLAT else "contradicted" if outside else "undecided"
        return "supported" if self.low > 0 else "contradicted" if self.high < 0 else "undecided"


def retests() -> list[Retest]:
    """All comparisons, in the order of the claims."""
    return [*_canon_in_llama(), *_canon_in_linear(), *_gla_against_others(), *_retrieval()]


def _canon_in_llama() -> Iterator[Retest]:
    scores, small = published(), slimpajama()
    for column, paper in (("lm_eval_avg13", "+1.11"), ("MMLU", "+2.20"), ("Wiki_ppl", "-0.33 to -0.51")):
        yield _pairs("C46", "Llama", column, scores, paper, confounder=ROTARY)
    yield _pairs("C47", "Llama", "1hop-5k", scores, "+32.8", confounder=ROTARY)
    for claim, column in (("C46", "LMB"), ("C47", "1hop-5k")):
        yield from _against_seeds(claim, column, small)


def _canon_in_linear() -> Iterator[Retest]:
    other_norms = differing().filter(setting=NORM)["canon_model"].to_list()
    import polars as pl

    scores = published().filter(~pl.col("model").is_in(other_norms))
    paper = {"GLA5": ("+1.55", "+3.15"), "GDN2": ("+0.86", "+2.58"), "Mamba2": ("+0.35", "-0.09")}
    for arch, numbers in paper.items():
        for column, number in zip(("lm_eval_avg13", "MMLU"), numbers, strict=True):
            yield _pairs("C48", arch, column, scores, number, flat=arch == "Mamba2")


def _gla_against_others() -> Iterator[Retest]:
    gla = _by_size("GLA5", "AbCD", "lm_eval_avg13")
    for other, paper in (("GDN2", "up or equal"), ("Mamba2", "up")):
        scores = _by_size(other, "b", "lm_eval_avg13")
        comparison = f"GLA5 with Canon layers - {other} with its short convolution, lm_eval_avg13"
        yield _between("C49", comparison, gla, scores, paper)


def _retrieval() -> Iterator[Retest]:
    llama = _by_size("Llama", "ABCD", "JRT_avg12")
    linear = [_by_size(arch, "AbCD", "JRT_avg12") for arch in ("GLA5", "GDN2", "Mamba2")]
    best = {size: max((each[size] for each in linear), key=statistics.mean) for size in llama}
    comparison = "Llama with Canon layers - the best linear model with Canon layers, JRT_avg12"
    note = (
        "the families were not trained alike: batches, steps and, below 8B, contexts differ (longer for linear models)"
    )
    yield _between("C50", comparison, llama, best, "+3.3, +3.1, +2.7", note)


def _pairs(
    claim: str, arch: str, column: str, scores: "pl.DataFrame", paper: str, *, confounder: str = "", flat: bool = False
) -> Retest:
    """With Canon layers minus without, at equal rates."""
    import polars as pl

    rows = paired(scores.filter(pl.col("arch") == arch, *_is_of(column)))
    sign = -1 if BENCHMARKS[column].metric in LOWER_IS_BETTER else 1
    gains = rows.with_columns(gain=sign * pl.col("delta"))
    means = gains.group_by("size", "tokens").agg(pl.col("gain").mean()).sort("size", "tokens")["gain"].to_list()
    better = int((gains["gain"] > 0).sum())
    comparison = f"{arch} with Canon layers - without, {column}"
    low, high = t_interval(means)
    return Retest(claim, comparison, tuple(means), low, high, better, len(rows), paper, confounder, flat)


def _against_seeds(claim: str, column: str, small: "pl.DataFrame") -> Iterator[Retest]:
    """The paper's three models of 1.3B with rotary positions and Canon layers, each against eight seeds without: the
    interval of one new run minus the mean of the seeds."""
    import polars as pl

    rows = small.filter(*_is_of(column))
    seeds = rows.filter(pl.col("seed").is_not_null())["value"].to_list()
    spread = t_factor(len(seeds)) * statistics.stdev(seeds) * math.sqrt(1 + 1 / len(seeds))
    for row in rows.filter(pl.col("model").str.starts_with("Llama(RoPE variant")).iter_rows(named=True):
        gain = row["value"] - statistics.mean(seeds)
        comparison = f"{row['model']} - 8 seeds of Llama(RoPE), 1.3B, {column}"
        confounder = "how much rotary embedding each of these three has cannot be read in the figure"
        better = int(gain > 0)
        yield Retest(claim, comparison, (gain,), gain - spread, gain + spread, better, 1, "", confounder)


def _by_size(arch: str, canon: str, column: str) -> dict[str, list[float]]:
    """Scores of the models with 1T tokens at the rates 0.002 and 0.003, which every family was trained at."""
    import polars as pl

    conditions = (pl.col("arch") == arch, pl.col("canon") == canon, pl.col("lr").is_in([0.002, 0.003]))
    rows = published().filter(*conditions, *_is_of(column), pl.col("tokens") < 1.5e12).sort("size", "lr")
    return {size: rows.filter(size=size)["value"].to_list() for size in rows["size"].unique(maintain_order=True)}


def _between(
    claim: str,
    comparison: str,
    ours: dict[str, list[float]],
    theirs: dict[str, list[float]],
    paper: str,
    note: str = "",
) -> Retest:
    gaps = {size: [a - b for a, b in zip(ours[size], theirs[size], strict=True)] for size in ours}
    means = [statistics.mean(values) for values in gaps.values()]
    single = [gap for values in gaps.values() for gap in values]
    low, high = t_interval(means)
    better = sum(gap > 0 for gap in single)
    return Retest(claim, comparison, tuple(means), low, high, better, len(single), paper, note=note)


def _is_of(column: str) -> "Sequence[pl.Expr]":
    import polars as pl

    benchmark = BENCHMARKS[column]
    return [pl.col(key) == getattr(benchmark, key) for key in QUESTION if key in ("task", "slice", "metric")]
