"""`metrics.jsonl`: one row per logged step and evaluation, appended as the run goes."""

import json
from pathlib import Path
from typing import Any

from canonlm.train.files import write_text


class Metrics:
    """Rows up to `last_step` are kept; later ones, of a run that was cut off, move to `metrics.discarded.jsonl`."""

    def __init__(self, folder: Path, last_step: int) -> None:
        self._path = path = folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step(line) <= last_step]
            if len(kept) < len(lines):
                with (folder / "metrics.discarded.jsonl").open("a", encoding="utf-8") as discarded:
                    discarded.writelines(line.rstrip("\n") + "\n" for line in lines if _step(line) > last_step)
                write_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation row of a step, if there is one."""
        rows = map(json.loads, self._path.read_text(encoding="utf-8").splitlines())
        return next((row for row in rows if row["kind"] == "eval" and row["step"] == step), None)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _step(line: str) -> float:
    """The step of a row; infinity for half a row, be it only its line end that is missing."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
