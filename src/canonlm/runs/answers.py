"""Files of answers, which an evaluation has written: one line of JSON per question."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canonlm.core.files import append
from canonlm.core.untrusted import parse_json, path_inside, read_bytes

MAX_ANSWERS = 2**30
"""Max bytes of a file of answers."""

Row = dict[str, Any]

GRADED: Mapping[str, type] = {"slice": dict, "right": dict}
"""The parts of a graded answer beside its index."""


def read_answers(folder: Path, entry: Mapping[str, Any]) -> list[Row]:
    """The answers of an entry of `folder/results.json`, in the order of the questions: `{"index", "slice", "answer",
    "output", "right"}` with the right answer, the model's text and whether it is right by each measure; for the
    playground also `question`.

    ValueError: the entry names no answers, they cannot be read, or its scores are from other answers.
    """
    noted = entry.get("answers")
    count, sha256 = (noted.get(key) for key in ("count", "sha256")) if isinstance(noted, dict) else (None, None)
    if not isinstance(noted, dict) or not isinstance(count, int) or not isinstance(sha256, str):
        raise ValueError(f"{folder / 'results.json'}: {str(entry.get('name'))[:100]!r} names no answers")
    path = path_inside(folder, noted.get("file"), str(folder / "results.json"))
    if not os.path.exists(path):
        raise ValueError(f"{str(path)[:300]}: cannot be read (no such file)")
    by_index = rows_in(path)
    rows = [by_index[index] for index in sorted(by_index) if index < count]
    if len(rows) != count or digest(rows) != sha256:
        what = "the answers behind the scores in results.json, got others"
        raise ValueError(f"{path}: expected {what} (to ask again, remove this file and its entry in results.json)")
    return rows


def check_answers(folder: Path, entry: Mapping[str, Any]) -> None:
    """ValueError if the answers of an entry were changed. Entries of earlier versions name no answers, and answers may
    have been removed: both are fine."""
    noted = entry.get("answers")
    if noted is None:
        return
    name = noted.get("file") if isinstance(noted, dict) else noted
    if os.path.exists(path_inside(folder, name, str(folder / "results.json"))):
        read_answers(folder, entry)


def digest(rows: Sequence[Row]) -> str:
    return hashlib.sha256("\n".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()


def damaged(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path}: a damaged line ({str(reason)[:200]}); remove it to ask these questions again")


def rows_in(path: Path, cut: bool = False, parts: Mapping[str, type] = GRADED) -> dict[int, Row]:
    """The answers in a file, by index. cut: remove an incomplete last line. parts: what a row has beside its index."""
    if not os.path.exists(path):
        return {}
    data = read_bytes(path, MAX_ANSWERS)
    lines = data[: data.rfind(b"\n") + 1]
    rows: dict[int, Row] = {}
    for number, line in enumerate(lines.split(b"\n"), 1):
        if not line:
            continue
        try:
            row = parse_json(line, f"line {number}")
        except ValueError as error:
            raise damaged(path, error) from None
        kinds = {"index": int, **parts}
        if not isinstance(row, dict) or not all(isinstance(row.get(key), kind) for key, kind in kinds.items()):
            *most, last = kinds
            raise damaged(path, f"line {number}: expected an answer with {', '.join(most)} and {last}")
        rows[row["index"]] = row
    if cut and len(lines) < len(data):
        with append(path) as file:
            file.truncate(len(lines))
    return rows
