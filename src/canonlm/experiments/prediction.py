"""The predictions of a playground: rankings of architectures in one place against those in another.

Three places: our micro scale (kept runs), the paper's synthetic tasks, and the paper's models of 1.3B parameters,
trained on 100B tokens of text. A prediction is a Spearman correlation over the architectures that two places share,
with an interval (Bonett and Wright, 2000). Members of a family are alike, so architectures are fewer independent
observations than they count; `agreeing` therefore counts pairs within families alone.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, variance

import numpy as np
import polars as pl

from canonlm.experiments import grid, ledger, published, schema
from canonlm.experiments.outcomes import accuracy
from canonlm.experiments.registration import paper_cells
from canonlm.runs.seed_statistics import Interval, Z

TASKS = ("depo", "brevo", "mano", "lano")
MIN_ARCHS, MIN_OF_INTERVAL = 4, 8
"""The min number of architectures for a correlation, and for its interval."""
TEXT: Mapping[str, tuple[str, ...]] = {
    "common sense": ("LMB", "PIQA", "Hella", "Wino", "ARC-e", "ARC-c", "SIQA", "BoolQ"),
    "Wikipedia": ("Wiki_ppl",),
    "retrieval": ("FDA", "FDA2", "SWDE", "SWDE2", "NQ", "NQ2", "Squad", "Squad2", "TriviaQA", "TriviaQA2", "Drop",
                  "Drop2"),
    "one hop": ("1hop-0k", "1hop-1k", "1hop-2k", "1hop-3k", "1hop-4k"),
    "two hops": ("2hop-0k", "2hop-1k", "2hop-2k", "2hop-3k", "2hop-4k"),
}  # fmt: skip
"""Columns of the paper's table of text models, as groups that are averaged; lengths up to the trained one."""

Scores = Mapping[str, float]
"""Larger is better, by architecture."""


@dataclass(frozen=True)
class Prediction:
    """points: (architecture, score there, score here). agreeing, pairs: pairs of one family that come in the same order
    in both, of those that differ in both."""

    predictor: str
    outcome: str
    points: tuple[tuple[str, float, float], ...]
    correlation: float
    interval: Interval
    agreeing: int
    pairs: int


def predictions() -> list[Prediction]:
    """Micro scale against the paper's cells, task by task; then the paper's cells against its models of text."""
    results = []
    outcomes, known = ledger.read(ledger.OWN_RESULTS), _text(next(iter(TEXT)))
    ours = {model: arch for model, arch in _models().items() if model in known}
    for task in TASKS:
        if len(micro := _micro(task, outcomes)) >= MIN_ARCHS:
            results.append(_prediction(f"micro {task}", task, micro, _of_cells(task, micro)))
        cells = _of_cells(task, ours.values())
        of_models = {model: cells[arch] for model, arch in ours.items() if arch in cells}
        for group in TEXT:
            results.append(_prediction(task, group, of_models, _text(group)))
    return results


def reliability(group: str) -> float:
    """The share of the variance between architectures in a group of text benchmarks that is not noise of seeds, which
    the paper's eight seeds of one model show."""
    noise = variance(_seeds(group))
    return max(0.0, 1 - noise / variance(_text(group).values()))


def spearman(x: list[float], y: list[float]) -> tuple[float, Interval]:
    """The correlation of ranks, and its 95 % interval, which holds for MIN_OF_INTERVAL and more; else all is
    possible."""
    first, other = (pl.Series(values).rank("average").to_numpy() for values in (x, y))
    correlation = float(np.corrcoef(first, other)[0, 1])
    if len(x) < MIN_OF_INTERVAL or math.isnan(correlation):
        return correlation, Interval(-1, 1)
    z = math.atanh(max(-0.999, min(0.999, correlation)))
    half = Z * math.sqrt((1 + correlation**2 / 2) / max(1, len(x) - 3))
    return correlation, Interval(math.tanh(z - half), math.tanh(z + half))


def _prediction(predictor: str, outcome: str, there: Scores, here: Scores) -> Prediction:
    points = tuple((arch, there[arch], here[arch]) for arch in there if arch in here)
    agreeing = pairs = 0
    for (first, *a), (second, *b) in combinations(points, 2):
        if _family(first) == _family(second) and a[0] != b[0] and a[1] != b[1]:
            pairs += 1
            agreeing += (a[0] < b[0]) == (a[1] < b[1])
    correlation, interval = spearman([x for _, x, _ in points], [y for *_, y in points])
    return Prediction(predictor, outcome, points, correlation, interval, agreeing, pairs)


def _family(arch: str) -> str:
    """`Llama(NoPE) Canon-A(res)` → `Llama(NoPE)`; `llama-nope+canon` → `llama-nope`."""
    return arch.partition(" ")[0].partition("+")[0]


def _of_cells(task: str, archs: Iterable[str]) -> Scores:
    """The mean over the paper's cells of a task (size, difficulty, slice) that all of these architectures have; without
    those that lack the cell that most have."""
    cells: dict[str, dict[tuple[str, ...], float]] = {}
    for arch in archs:
        for cell, of_slices in paper_cells("accuracy").get(arch, {}).items():
            if _is_of(cell[0], task):
                cells.setdefault(arch, {}).update({(*cell, key): share for key, share in of_slices.items()})
    [(usual, _)] = Counter(cell for own in cells.values() for cell in own).most_common(1)
    known = {arch: own for arch, own in cells.items() if usual in own}
    common = set.intersection(*map(set, known.values()))
    return {arch: mean(own[cell] for cell in common) for arch, own in known.items()}


def _is_of(difficulty: str, task: str) -> bool:
    return difficulty.startswith("cfg") if task == "lano" else difficulty.startswith(task)


def _micro(task: str, outcomes: grid.Outcomes) -> Scores:
    """The mean accuracy of the setting's runs with fresh seeds, also of earlier ones, by architecture. All are at rates
    that tuning seeds chose."""
    setting, runs = schema.setting(f"{task}-micro"), dict[str, list[float]]()
    tuning = range(schema.FIRST_TUNING_SEED, schema.FIRST_TUNING_SEED + setting.tuning_seeds)
    for run in filter(None, outcomes.values()):
        if run.task_label == f"{task}-micro" and run.seed < schema.SEEDS_OF_A_SET and run.seed not in tuning:
            runs.setdefault(run.arch, []).append(accuracy(run.final, setting.slices))
    return {arch: mean(own) for arch, own in runs.items()}


def _models() -> Mapping[str, str]:
    """The paper's names → ours, of the architectures in its grids."""
    rows = published.grids().unique("model", maintain_order=True).iter_rows(named=True)
    return {row["model"]: published.counterpart(row).arch for row in rows}


def _text(group: str) -> Scores:
    """By the paper's names; the mean over seeds where there are several."""
    names = [name.partition(" seed ")[0] for name in _table()["model"]]
    frame = pl.DataFrame({"model": names, "score": _of_group(group)}).group_by("model", maintain_order=True).mean()
    return dict(frame.iter_rows())


def _seeds(group: str) -> list[float]:
    return [score for name, score in zip(_table()["model"], _of_group(group), strict=True) if " seed " in name]


def _of_group(group: str) -> list[float]:
    sign = -1 if group == "Wikipedia" else 1  # a perplexity
    return [sign * mean(row) for row in _table().select(pl.col(TEXT[group]).cast(pl.Float64)).iter_rows()]


def _table() -> pl.DataFrame:
    return published.table("slimpajama").with_columns(model=pl.concat_str("arch", "variant", separator=" "))
