"""Reads `results.json` files of `canonlm eval`, which may be damaged or come from somebody else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canonlm.core.untrusted import read_object
from canonlm.runs.answers import check_answers
from canonlm.runs.load import MAX_REASON, LeftOut
from canonlm.runs.rows import DAMAGE, finite, known_count, one_line, slice_key, writable
from canonlm.runs.task_info import TaskInfo


@dataclass(frozen=True)
class Evaluated:
    """One `results.json`: a model and its evaluations."""

    label: str
    model: Mapping[str, Any]
    entries: tuple[Mapping[str, Any], ...]
    path: Path


def load_evaluated(folder: str | Path) -> tuple[list[Evaluated], list[LeftOut]]:
    """All `results.json` files of a folder and of the runs in it, and those that cannot be read."""
    evaluated, left_out = [], []
    for path in sorted(Path(folder).rglob("results.json")):
        name = writable(str(path.relative_to(folder)))
        try:
            raw = read_object(path)
            entries = tuple(checked for entry in raw["results"] if (checked := checked_entry(entry))["scores"])
            model = dict(raw["model"])
            evaluated.append(Evaluated(_label(path, Path(folder), model), model, entries, path))
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
    return evaluated, left_out


def checked_entry(entry: Any) -> dict[str, Any]:
    """An entry of `results.json`, its parts checked to have the right types. Raises one of `DAMAGE`."""
    settings = entry.get("settings")
    return {
        **entry,
        "suite": one_line(str(entry["suite"])),
        "name": one_line(str(entry["name"])),
        "settings": settings if isinstance(settings, dict) else {},
        "scores": _with_headline(entry["suite"], settings, [_score(score) for score in entry["scores"]]),
    }


def _with_headline(suite: Any, settings: Any, scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The scores, with the task's score as the accuracy: earlier versions wrote the mean over all slices in its place,
    even if the task's score is of one slice."""
    task = settings.get("task") if suite == "playground" and isinstance(settings, dict) else None
    one = TaskInfo(str(task.get("name"))).score.slice if isinstance(task, dict) else ""
    headline = next((score for score in scores if one and slice_key(score["slice"]) == one), None)
    if headline is None:
        return scores
    return [
        {**headline, "slice": {}} if score["measure"] == "accuracy" and not score["slice"] else score
        for score in scores
    ]


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
    """The folder that the file is in, without the parts that all have: `depo-llama+canon`, `step 300 of debug`."""
    parts = [part for part in path.parent.relative_to(folder).parts if part not in ("runs", "evals")]
    return writable("/".join(parts) or Path(str(model["source"])).name)


def difference(settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in which any of the others differs."""
    return {key: value for key, value in settings.items() if any(other.get(key) != value for other in others)}
