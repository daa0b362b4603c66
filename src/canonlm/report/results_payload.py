"""What the views of results show, as one JSON value: models, questions, scores, pairs, curves, settings. No HTML here.

Numbers are as in the frames of `canonlm.experiments.tidy`; only differences are taken in the browser.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import expected
from ..experiments import published, tidy
from ..experiments.published.benchmarks import LOWER_IS_BETTER
from ..experiments.published.training import as_in_the_paper
from ..experiments.tidy import MODEL, QUESTION, has_canon
from ..runs.load import LeftOut
from . import frames
from .gather import Gathered
from .results_tables import NORM, ROPE, groups_of, mark, notes
from .theme import MUTED, Look, looks

if TYPE_CHECKING:
    import polars as pl

Row = Mapping[str, Any]
OVER_SEEDS = "mean over seeds"
OTHER = "other"
MOST_POINTS = 200_000  # of all curves together: 6 MB


@dataclass(frozen=True)
class Shown:
    """What a page is made of: final numbers and curves as frames, the settings of models by name (`parameters` among
    them, where known), and what was left out."""

    numbers: "pl.DataFrame"
    curves: "pl.DataFrame"
    settings: Mapping[str, Row] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()


def beside_the_published(found: Sequence[Gathered], filters: Sequence[str] = ()) -> Shown:
    """The published results and the user's, both filtered."""
    import polars as pl

    mine, left_out = frames.finals(found)
    curves, unread = frames.curves(found)
    if found and not len(mine) and not len(curves):
        reasons = (
            "; ".join(f"{entry.name}: {entry.reason}" for entry in [*left_out, *unread][:3]) or "nothing is in them"
        )
        raise expected(
            "FOLDER", f"runs, or results of `canonlm eval`, that can be read ({reasons})", str(found[0].folder)
        )
    numbers = tidy.choose(pl.concat([published.everything(), mine]), filters)
    curves = pl.concat([published.curves(), curves])
    if filters:  # the tokens of a point, or what it answers, are not what a filter on final numbers means
        curves = curves.join(numbers.select("source", "model").unique(), on=["source", "model"], how="semi")
    names = {*numbers["model"], *curves["model"]}
    known = {row["model"]: row for row in published.settings().iter_rows(named=True)} | frames.settings(found)
    settings = {name: row for name, row in known.items() if name in names}
    return Shown(numbers, curves, settings, list(dict.fromkeys([*left_out, *unread])))


def of_runs(found: Sequence[Gathered]) -> Shown:
    """The user's final results, and the paper's of the same synthetic tasks."""
    import polars as pl

    mine, left_out = frames.finals(found)
    grids = published.grids().filter(pl.col("task").is_in(mine["task"].unique().to_list()))
    return Shown(pl.concat([mine, grids]), tidy.frame(), frames.settings(found), left_out)


def payload(shown: Shown) -> dict[str, Any]:
    """Lists of plain values; whatever refers to a model or a question has its place in `models` or `questions`."""
    models, questions = _Places(), _Places()
    scores: list[tuple[Any, ...]] = []
    for row in shown.numbers.iter_rows(named=True):
        found = (row["value"], row["stderr"], row["n"], None, None, 1)
        scores.append((models.of(row, MODEL), questions.of(row, QUESTION), *found))
    single = set(range(len(models)))
    for row in tidy.over_seeds(shown.numbers).iter_rows(named=True):
        found = (row["value"], None, None, row["low"], row["high"], row["runs"])
        scores.append((models.of(row | {"model": OVER_SEEDS}, MODEL), questions.of(row, QUESTION), *found))
    curves = list(_curves(shown.curves, models, questions))
    told = [_model(row, shown.settings) for row in models.rows(MODEL)]
    sizes = {_setting(model): model["parameters"] for model in told if model["parameters"]}
    for place, model in enumerate(told):
        if model["model"] == OVER_SEEDS and place not in single:
            alike = {one["as_in_the_paper"] for one in told if _setting(one) == _setting(model) and one is not model}
            model |= {"mean": True, "parameters": sizes.get(_setting(model)), "as_in_the_paper": alike == {True}}
    columns = ("model", "question", "value", "stderr", "n", "low", "high", "runs")
    return {
        "models": told,
        "questions": [_question(row) for row in questions.rows(QUESTION)],
        "groups": _groups(shown.numbers, questions),
        "scores": dict(zip(columns, map(list, zip(*scores, strict=True)), strict=True)) if scores else {},
        "pairs": list(_pairs(shown, models)),
        "pairs_over_seeds": [
            {key: row[key] for key in row if key not in QUESTION} | {"question": questions.of(row, QUESTION)}
            for row in tidy.paired_over_seeds(shown.numbers).iter_rows(named=True)
        ],
        "curves": curves,
        "settings": {name: _plain(values) for name, values in shown.settings.items()},
        "notes": [str(note) for note in notes({ROPE, NORM}, several=True)],
    }


class _Places:
    """Rows by some of their columns, numbered as they come."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], int] = {}

    def of(self, row: Row, keys: Sequence[str]) -> int:
        return self._found.setdefault(tuple(row.get(key) for key in keys), len(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def rows(self, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
        return (dict(zip(keys, found, strict=True)) for found in self._found)


def _model(row: Row, settings: Mapping[str, Row]) -> dict[str, Any]:
    """With its parameters, as counted or as the size tells, and the name of its look: an architecture looks the same
    at all sizes and rates. `as_in_the_paper`: whether it was trained so; None where that is unknown. `counterpart`: how
    to train one of the paper's."""
    arch, canon = row["arch"] or OTHER, has_canon(row["canon"])
    family, run = arch.partition(" (")[0], settings.get(row["model"], {})
    known = run.get("parameters")
    of_grids = row["source"] == "paper" and re.fullmatch(r"\d+L\d+D", row["size"] or "")
    ours = published.counterpart(row) if of_grids else None
    return {
        **row,
        "counterpart": ours and {"arch": ours.arch, "arguments": ours.arguments, "why": ours.why},
        "family": family,
        "as_in_the_paper": as_in_the_paper(run) if row["source"] == "yours" and "arch" in run else None,
        "mean": False,
        "has_canon": canon if row["canon"] is not None else None,
        "look": family.lower() + ("+canon" if canon else ""),
        "parameters": known if isinstance(known, int) else _parameters(row["size"]),
        "mark": mark(row["model"]) if row["source"] in ("published", "best") else "",
    }


def model_looks(models: Sequence[Row]) -> dict[str, Look]:
    """Of architectures; open models of others, which are many and unlike, are grey crosses."""
    return looks([model["look"] for model in models if model["look"] != OTHER]) | {
        OTHER: Look(MUTED, "dot", "x-thin-open", "")
    }


def _parameters(size: str | None) -> float | None:
    """`1.3B` → 1.3e9; None for a shape such as 12L768D."""
    found = re.fullmatch(r"([\d.]+)([KMB])", size or "")
    return float(found[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[found[2]] if found else None


def _question(row: Row) -> dict[str, Any]:
    asked = " ".join(
        part for part in (row["task"], row["setting"], row["slice"] if row["slice"] != "all" else "") if part
    )
    full = asked if row["metric"] == "accuracy" else f"{asked} ({row['metric']})"
    return {**row, "full": full, "less": row["metric"] in LOWER_IS_BETTER}


def _groups(numbers: "pl.DataFrame", questions: _Places) -> dict[str, dict[str, Any]]:
    """Questions to be shown together, with the labels that they have there. `grid`: a synthetic task of the paper."""
    found = {}
    for name, columns in groups_of(numbers).items():
        places = [questions.of(column.question._asdict(), QUESTION) for column in columns]
        found[name] = {"questions": places, "labels": [column.label for column in columns]}
    return found


def _setting(model: Row) -> tuple[Any, ...]:
    return tuple(model[key] for key in MODEL if key not in ("model", "seed"))


def _plain(value: Any) -> Any:
    """As JSON can say it: a date, a set or an infinity of a configuration becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    known = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def _pairs(shown: Shown, models: _Places) -> Iterator[dict[str, Any]]:
    """Two models that differ in Canon layers; which questions both answered, the page sees. The user's are a pair
    unless settings of data or training are known to differ."""
    shared = ("source", "arch", "size", "tokens", "lr", "seed")
    sides = ("base_model", "base_canon", "canon_model", "canon")
    pairs = tidy.paired(shown.numbers).select(*shared, *sides).unique(maintain_order=True)
    for row in pairs.iter_rows(named=True):
        if row["source"] == "yours" and not _alike(
            *(shown.settings.get(row[f"{side}_model"]) for side in ("base", "canon"))
        ):
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


def _curves(curves: "pl.DataFrame", models: _Places, questions: _Places) -> Iterator[dict[str, Any]]:
    """A curve per model and question. A model is found again by everything but its tokens, which a curve counts."""
    import polars as pl

    but_tokens = [key for key in MODEL if key != "tokens"]
    at_the_end = {tuple(row[key] for key in but_tokens): row["tokens"] for row in models.rows(MODEL)}
    grouped = curves.filter(pl.col("tokens").is_not_null()).group_by([*but_tokens, *QUESTION], maintain_order=True)
    rows = grouped.agg("tokens", "value")
    most = max(50, min(400, MOST_POINTS // max(1, len(rows))))
    for row in rows.iter_rows(named=True):
        key = tuple(row[key] for key in but_tokens)
        end = at_the_end.setdefault(key, row["tokens"][-1])
        yield {
            "model": models.of(row | {"tokens": end}, MODEL),
            "question": questions.of(row, QUESTION),
            "tokens": _thinned(row["tokens"], most),
            "values": _thinned(row["value"], most),
        }


def _thinned(values: list[Any], most: int) -> list[Any]:
    """Evenly, the last one among them."""
    step = math.ceil(len(values) / most)
    return values[(len(values) - 1) % step :: step]
