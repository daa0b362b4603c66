"""`metrics.jsonl`: one row per logged step and evaluation, appended as the run goes."""

import json
from pathlib import Path
from typing import Any

from canonlm.files import write_text

TRAIN_KEYS = {
    "kind": '"train"',
    "step": "optimizer steps done, from 1",
    "loss": "mean cross-entropy of the step's targets before its update, in nats, plus z-loss and router loss",
    "z_loss": "the part of the loss that is z-loss; only where the model has one",
    "lr": "learning rate of the step",
    "grad_norm": "length of the gradient before clipping",
    "tokens": "tokens read since the run began, on all devices",
    "windows": "numbers of the first and the last window of the step",
    "tokens_per_s": "speed since the last row, of all devices together, without evaluations and checkpoints; "
    "null while a process warms up (its first 3 steps)",
    "mfu": "model FLOPs utilisation: the share of the devices' peak that the model's own arithmetic makes up, at this "
    "speed; null where the peak is not known, as on CPUs",
    "data_wait_s": "seconds that the loop waited for its data since the last row; null as the speed is",
    "data_wait_share": "the same as a share of the time for training; null as the speed is",
    "elapsed_s": "seconds of all processes of the run so far, evaluations and checkpoints included",
    "memory_gb": "most memory in use, 1e9 bytes, of the first process. GPU: by tensors, since the last row. "
    "CPU: resident, since the process began",
}
"""The keys of a row of a logged step, in order, and what they mean."""

TIMINGS = {"tokens_per_s", "mfu", "data_wait_s", "data_wait_share", "memory_gb", "elapsed_s"}
"""Those that differ when the same run is done again; `train_seconds` of `result.json` does, too."""


class Metrics:
    """Rows up to `last_step` are kept; later ones, of a run that was cut off, move to `metrics.discarded.jsonl`.

    `elapsed_s` is that of the last row that is kept: the time that earlier processes spent on this run.
    """

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
        self.elapsed_s: float = max((row.get("elapsed_s", 0.0) for row in self._rows()), default=0.0)

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation row of a step, if there is one."""
        return next((row for row in self._rows() if row["kind"] == "eval" and row["step"] == step), None)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]


def _step(line: str) -> float:
    """The step of a row; infinity for half a row, be it only its line end that is missing."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
