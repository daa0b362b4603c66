"""The data behind the views of results, as one JSON value: models, questions, scores, pairs, curves, settings.

Numbers are as in the frames of `canonlm.runs.table`; only differences, and their means, are computed in the
browser.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from canonlm.experiments import published
from canonlm.experiments.published.benchmarks import LOWER_IS_BETTER
from canonlm.experiments.published.confounders import NOTES, mark, notes
from canonlm.experiments.published.runs import curves, finals, nothing_in, settings
from canonlm.experiments.published.training import as_in_the_paper
from canonlm.report.results_tables import groups_of
from canonlm.report.theme import MUTED, Look, looks
from canonlm.runs.gather import Gathered
from canonlm.runs.load import LeftOut
from canonlm.runs.seed_statistics import t_factor
from canonlm.runs.table import MODEL, QUESTION, choose, has_canon, over_seeds, paired, results

Row = Mapping[str, Any]
OVER_SEEDS = "mean over seeds"
OTHER = "other"
MAX_POINTS = 200_000  # of all curves together: 6 MB


@dataclass(frozen=True)
class Shown:
    """The data of a page: final numbers and curves as frames, the settings of models by name (`parameters` among
    them, where known), and what was left out."""

    numbers: pl.DataFrame
    curves: pl.DataFrame
    settings: Mapping[str, Row] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()


def beside_the_published(gathered: Sequence[Gathered], filters: Sequence[str] = ()) -> Shown:
    """The published results and the user's, both filtered. Runs without final numbers are filtered by their newest
    ones, and have curves only."""
    mine, left_out = finals(gathered)
    of_mine, curves_left_out = curves(gathered)
    if gathered and not len(mine) and not len(of_mine):
        raise nothing_in(gathered[0].folder, [*left_out, *curves_left_out])
    unfinished = of_mine.join(mine, on="model", how="anti", maintain_order="left")
    newest = unfinished.unique(["model", *QUESTION], keep="last", maintain_order=True)
    chosen = choose(pl.concat([published.everything(), mine, newest]), filters)
    numbers = chosen.join(newest, on=["source", "model"], how="anti", maintain_order="left")
    along = pl.concat([published.curves(), of_mine])
    if filters:  # filters on final numbers do not apply to the tokens and questions of curves
        along = along.join(chosen.select("source", "model").unique(), on=["source", "model"], how="semi")
    names = {*numbers["model"], *along["model"]}
    known = {row["model"]: row for row in published.settings().iter_rows(named=True)} | settings(gathered)
    shown_settings = {name: row for name, row in known.items() if name in names}
    return Shown(numbers, along, shown_settings, list(dict.fromkeys([*left_out, *curves_left_out])))


def of_runs(gathered: Sequence[Gathered]) -> Shown:
    """The user's final results, and the paper's of the same synthetic tasks."""
    mine, left_out = finals(gathered)
    grids = published.grids().filter(pl.col("task").is_in(mine["task"].unique().to_list()))
    return Shown(pl.concat([mine, grids]), results(), settings(gathered), left_out)


def payload(shown: Shown) -> dict[str, Any]:
    """The data as plain values. Models and questions are referred to by their index in `models` and `questions`."""
    models, questions = _Places(), _Places()
    scores: list[tuple[Any, ...]] = []
    for row in shown.numbers.iter_rows(named=True):
        numbers = (row["value"], row["stderr"], row["total"], None, None, 1)
        scores.append((models.of(row, MODEL), questions.of(row, QUESTION), *numbers))
    single = set(range(len(models)))
    for row in over_seeds(shown.numbers).iter_rows(named=True):
        numbers = (row["value"], None, None, row["low"], row["high"], row["runs"])
        scores.append((models.of(row | {"model": OVER_SEEDS}, MODEL), questions.of(row, QUESTION), *numbers))
    along = list(_curves(shown.curves, models, questions))
    all_models = [_model(row, shown.settings) for row in models.rows(MODEL)]
    sizes = {_setting(model): model["parameters"] for model in all_models if model["parameters"]}
    for place, model in enumerate(all_models):
        if model["model"] == OVER_SEEDS and place not in single:
            others = [one for one in all_models if _setting(one) == _setting(model) and one is not model]
            alike = {one["as_in_the_paper"] for one in others}
            model |= {"mean": True, "parameters": sizes.get(_setting(model)), "as_in_the_paper": alike == {True}}
    columns = ("model", "question", "value", "stderr", "n", "low", "high", "runs")
    return {
        "models": all_models,
        "questions": [_question(row) for row in questions.rows(QUESTION)],
        "groups": {
            name: {
                "questions": [questions.of(column.question._asdict(), QUESTION) for column in columns],
                "labels": [column.label for column in columns],
            }
            for name, columns in groups_of(shown.numbers).items()
        },
        "scores": dict(zip(columns, map(list, zip(*scores, strict=True)), strict=True)) if scores else {},
        "pairs": list(_pairs(shown, models)),
        "t_factors": {runs: t_factor(runs) for runs in range(2, shown.numbers["seed"].n_unique() + 1)},
        "curves": along,
        "settings": {name: _plain(values) for name, values in shown.settings.items()},
        "notes": notes(NOTES, several=True),
    }


class _Places:
    """Numbers rows, identified by some of their columns, in order of appearance."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], int] = {}

    def of(self, row: Row, keys: Sequence[str]) -> int:
        return self._places.setdefault(tuple(row.get(key) for key in keys), len(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def rows(self, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
        return (dict(zip(keys, values, strict=True)) for values in self._places)


def _model(row: Row, settings: Mapping[str, Row]) -> dict[str, Any]:
    """A model for the page. `parameters`: as counted, or by its size. `look`: the same at all sizes and rates of an
    architecture. `as_in_the_paper`: None if unknown. `counterpart`: how to train one of the paper's."""
    arch, canon = row["arch"] or OTHER, has_canon(row["canon"])
    family, run = arch.partition(" (")[0], settings.get(row["model"], {})
    known = run.get("parameters")
    of_grids = row["source"] == "paper" and re.fullmatch(r"\d+L\d+D", row["size"] or "")
    match = published.counterpart(row) if of_grids else None
    return {
        **row,
        "counterpart": match and {"arch": match.arch, "arguments": match.arguments, "why": match.why},
        "family": family,
        "as_in_the_paper": as_in_the_paper(run) if row["source"] == "yours" and "arch" in run else None,
        "mean": False,
        "has_canon": canon if row["canon"] is not None else None,
        "look": family.lower() + ("+canon" if canon else ""),
        "parameters": known if isinstance(known, int) else _parameters(row["size"]),
        "mark": mark(row["model"]) if row["source"] in ("published", "best") else "",
    }


def model_looks(models: Sequence[Row]) -> dict[str, Look]:
    """The looks of architectures. Other open models, which are many and diverse, are grey crosses."""
    known = looks([model["look"] for model in models if model["look"] != OTHER])
    return known | {OTHER: Look(MUTED, "dot", "x-thin-open", "")}


def _parameters(size: str | None) -> float | None:
    """`1.3B` → 1.3e9; None for a shape such as 12L768D."""
    match = re.fullmatch(r"([\d.]+)([KMB])", size or "")
    return float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[match[2]] if match else None


def _question(row: Row) -> dict[str, Any]:
    name = " ".join(filter(None, (row["task"], row["setting"], row["slice"] if row["slice"] != "all" else "")))
    full = name if row["metric"] == "accuracy" else f"{name} ({row['metric']})"
    return {**row, "full": full, "less": row["metric"] in LOWER_IS_BETTER}


def _setting(model: Row) -> tuple[Any, ...]:
    return tuple(model[key] for key in MODEL if key not in ("model", "seed"))


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: a date, a set or an infinity of a configuration becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    known = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def _pairs(shown: Shown, models: _Places) -> Iterator[dict[str, Any]]:
    """Pairs of models that differ in Canon layers; the page finds the questions that both answered. The user's models
    are a pair unless settings of data or training are known to differ."""
    shared = ("source", "arch", "size", "tokens", "lr", "seed")
    sides = ("base_model", "base_canon", "canon_model", "canon")
    pairs = paired(shown.numbers).select(*shared, *sides).unique(maintain_order=True)
    for row in pairs.iter_rows(named=True):
        settings = [shown.settings.get(row[f"{side}_model"]) for side in ("base", "canon")]
        if row["source"] == "yours" and not _alike(*settings):
            continue
        same = {key: row[key] for key in shared}
        yield {
            "base": models.of(same | {"model": row["base_model"], "canon": row["base_canon"]}, MODEL),
            "canon": models.of(same | {"model": row["canon_model"], "canon": row["canon"]}, MODEL),
        }


def _alike(base: Row | None, canon: Row | None) -> bool:
    if base is None or canon is None:
        return True
    keys = {key for key in (*base, *canon) if key.startswith(("task", "text", "data.", "train.", "preset"))}
    return all(base.get(key) == canon.get(key) for key in keys)


def _curves(curves: pl.DataFrame, models: _Places, questions: _Places) -> Iterator[dict[str, Any]]:
    """A curve per model and question. A model is identified by everything but its tokens, which vary along a curve."""
    but_tokens = [key for key in MODEL if key != "tokens"]
    at_the_end = {tuple(row[key] for key in but_tokens): row["tokens"] for row in models.rows(MODEL)}
    grouped = curves.filter(pl.col("tokens").is_not_null()).group_by([*but_tokens, *QUESTION], maintain_order=True)
    rows = grouped.agg("tokens", "value")
    max_points = max(50, min(400, MAX_POINTS // max(1, len(rows))))
    for row in rows.iter_rows(named=True):
        key = tuple(row[key] for key in but_tokens)
        end = at_the_end.setdefault(key, row["tokens"][-1])
        yield {
            "model": models.of(row | {"tokens": end}, MODEL),
            "question": questions.of(row, QUESTION),
            "tokens": _thinned(row["tokens"], max_points),
            "values": _thinned(row["value"], max_points),
        }


def _thinned(values: list[Any], max_points: int) -> list[Any]:
    """Every n-th value, the last one included."""
    step = math.ceil(len(values) / max_points)
    return values[(len(values) - 1) % step :: step]
