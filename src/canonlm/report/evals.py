"""What `canonlm eval` found: `results.json` files in, tables out (shares in percent, with their standard errors)."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape as escape_rich
from rich.table import Table

from ..runs.rows import DAMAGE, finite, known_count, one_line, plain, slice_key, writable
from ..suites.results import check_answers
from ..untrusted import read_object
from .blocks import Block, Cell, fold, table
from .runs import MAX_LABEL, MAX_REASON, LeftOut
from .words import count_of, number, percent, score_of, shown

SUITES = {
    "multihop": (
        "Birth years in a text",
        "Share of questions whose birth year was written exactly; 1hop-2k: stated directly, among 2,000 "
        "tokens of other text.",
    ),
    "babilong": (
        "Stories in a longer text",
        "Share of right answers; babilong-qa1-2k: the first kind of question, in 2,000 tokens.",
    ),
    "harness": ("Benchmarks", "Tasks of the lm-evaluation-harness, as it counts them."),
    "playground": ("Synthetic tasks", "Accuracy of the saved model; x1.5: beyond the length it was trained at."),
}


@dataclass(frozen=True)
class Evaluated:
    """One `results.json`: a model and what it was asked."""

    label: str
    model: Mapping[str, Any]
    entries: tuple[Mapping[str, Any], ...]
    path: Path


def load_evaluated(folder: str | Path) -> tuple[list[Evaluated], list[LeftOut]]:
    """All of a folder, its own and those of the runs in it, and what cannot be read."""
    found, left_out = [], []
    for path in sorted(Path(folder).rglob("results.json")):
        name = writable(str(path.relative_to(folder)))
        try:
            raw = read_object(path)
            entries = tuple(checked for entry in raw["results"] if (checked := whole(entry))["scores"])
            model = dict(raw["model"])
            found.append(Evaluated(_label(path, Path(folder), model), model, entries, path))
        except DAMAGE as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = str(error).removeprefix(f"{path}: ")
            left_out.append(LeftOut(name, one_line(f"not readable: {kind}{reason}", MAX_REASON)))
            continue
        for entry in entries:
            try:
                check_answers(path.parent, entry)
            except ValueError as error:
                left_out.append(LeftOut(f"answers of {entry['name']} in {name}", one_line(str(error), MAX_REASON)))
    return found, left_out


def whole(entry: Any) -> dict[str, Any]:
    """An entry of `results.json` whose parts have the types that they should have. Raises one of `DAMAGE`."""
    settings = entry.get("settings")
    return {
        **entry,
        "suite": one_line(str(entry["suite"])),
        "name": one_line(str(entry["name"])),
        "settings": settings if isinstance(settings, dict) else {},
        "scores": _with_headline(entry["suite"], settings, [_score(score) for score in entry["scores"]]),
    }


def _with_headline(suite: Any, settings: Any, scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier versions noted the mean over all slices as the accuracy, also where the task's score is that on one."""
    task = settings.get("task") if suite == "playground" and isinstance(settings, dict) else None
    one = score_of(str(task.get("name"))).slice if isinstance(task, dict) else ""
    headline = next((score for score in scores if one and slice_key(score["slice"]) == one), None)
    if headline is None:
        return scores
    return [{**headline, "slice": {}} if _is_whole_accuracy(score) else score for score in scores]


def _is_whole_accuracy(score: Mapping[str, Any]) -> bool:
    return score["measure"] == "accuracy" and not score["slice"]


def _score(raw: Any) -> dict[str, Any]:
    value, stderr = float(raw["value"]), raw.get("stderr")
    return {
        "measure": one_line(str(raw["measure"])),
        "value": value if finite(value) or math.isnan(value) else math.copysign(math.inf, value),
        "stderr": float(stderr) if finite(stderr) else None,
        "n": known_count(raw.get("n")),
        "slice": dict(raw["slice"]),
        "share": raw.get("share") is not False,
    }


def _label(path: Path, folder: Path, model: Mapping[str, Any]) -> str:
    """The folder that the file is in, without what all have: `depo-llama+canon`, `step 300 of debug`."""
    parts = [part for part in path.parent.relative_to(folder).parts if part not in ("runs", "evals")]
    return writable("/".join(parts) or Path(str(model["source"])).name)


def value(score: Mapping[str, Any]) -> str:
    """`93.0% ± 1.1`, `19.8 ± 0.4`"""
    stderr = score["stderr"]
    if not score["share"]:
        return number(score["value"]) + ("" if stderr is None else f" ± {number(stderr)}")
    return percent(score["value"]) + (f" ± {100 * stderr:.1f}" if stderr else "")  # 0: all answers were alike


def suites(evaluated: Sequence[Evaluated]) -> Iterator[tuple[str, list[Evaluated]]]:
    """Each suite, and the models that were asked it."""
    for suite in dict.fromkeys(entry["suite"] for one in evaluated for entry in one.entries):
        yield suite, [one for one in evaluated if any(entry["suite"] == suite for entry in one.entries)]


def rows(evaluated: Sequence[Evaluated], suite: str) -> list[tuple[str, str, list[str]]]:
    """(name, measure, value of each model or "–"). Where the same name was asked with several settings, by one model or
    by two, they are rows of their own, and the name tells in what they differ."""
    asked: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for place, one in enumerate(evaluated):
        for entry in one.entries:
            if entry["suite"] == suite:
                asked.setdefault((entry["name"], _noted(entry)), {})[place] = entry
    found = []
    for (name, noted), entries in asked.items():
        others = [json.loads(other) for other_name, other in asked if other_name == name]
        told = name + _difference(json.loads(noted), others)
        cells = {
            place: {score["measure"]: value(score) for score in entry["scores"] if not score["slice"]}
            for place, entry in entries.items()
        }
        for measure in dict.fromkeys(measure for cell in cells.values() for measure in cell):
            found.append((told, measure, [cells.get(place, {}).get(measure, "–") for place in range(len(evaluated))]))
    return found


def _noted(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry["settings"], sort_keys=True)


def _difference(settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """` (people=3)`"""
    keys = [key for key in settings if any(other.get(key) != settings[key] for other in others)]
    told = ", ".join(f"{key}={shown(settings[key])}" for key in keys)
    return f" ({one_line(told, MAX_LABEL)})" if keys else ""


def years_of(evaluated: Mapping[str, Evaluated], run: str) -> dict[str, tuple[float, int]]:
    """(share right, questions) of the birth-year questions that a run was asked, by their names."""
    found = {}
    for name, one in evaluated.items():
        for entry in one.entries if name.startswith(f"{run}/") else ():
            for score in entry["scores"] if entry["suite"] == "multihop" else ():
                if score["measure"] == "exact" and not score["slice"] and score["n"]:
                    found[entry["name"]] = (score["value"], score["n"])
    return found


def evals_tables(evaluated: Sequence[Evaluated]) -> Iterator[Table]:
    """For the terminal: a table per suite, a column per model."""
    for suite, here in suites(evaluated):
        table = Table(
            title=escape_rich(f"\n{SUITES.get(suite, (suite, ''))[0]}"), title_justify="left", title_style="bold"
        )
        table.add_column("asked")
        table.add_column("measure")
        for one in here:
            table.add_column(escape_rich(plain(one.label)), justify="right", overflow="fold")
        for name, measure, cells in rows(here, suite):
            table.add_row(escape_rich(plain(name)), escape_rich(plain(measure)), *cells)
        yield table


def evals_blocks(evaluated: Sequence[Evaluated], *, opened: bool) -> list[Block]:
    """For the page: what is behind a title, for each suite."""
    blocks = []
    for suite, here in suites(evaluated):
        title, about = SUITES.get(suite, (suite, ""))
        body: list[list[Cell]] = [[name, measure, *cells] for name, measure, cells in rows(here, suite)]
        shown = table(["asked", "measure", *(one.label for one in here)], body, kind="models")
        note = f"{count_of(len(here), 'model')}. {about} ± is one standard error."
        blocks += fold(title, [{"note": note}, shown], opened=opened)
    return blocks
