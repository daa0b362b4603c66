"""Progress of a run: its newest rows, from the loop itself or from a growing `metrics.jsonl`."""

import json
import os
from pathlib import Path
from typing import Any

from canonlm.core.untrusted import open_regular, own_file
from canonlm.runs.rows import (
    DAMAGE,
    MAX_LINE,
    Evaluate,
    Evaluation,
    Remark,
    TextEvaluation,
    TrainRow,
    bounded_lines,
    evaluation,
    parse,
)


class Latest:
    """The newest rows. `step` is the largest of any row."""

    step = 0
    train: TrainRow | None = None
    evaluation: Evaluation | TextEvaluation | None = None

    def take(self, row: TrainRow | Evaluation | TextEvaluation | Remark) -> None:
        self.step = max(self.step, row.step)
        if isinstance(row, TrainRow):
            self.train = row
        elif not isinstance(row, Remark):
            self.evaluation = row

    def seconds_left(self, steps: int, tokens_per_step: int) -> float | None:
        """Time left at the speed of the last row, without evaluations and checkpoints."""
        speed = self.train and self.train.tokens_per_s
        return (steps - self.step) * tokens_per_step / speed if speed else None


class Followed(Latest):
    """The newest rows of a file that another process writes. Each call of `read` reads new rows only; an incomplete row
    is read later; a damaged row is skipped. A resume may cut the file back: it is then another file, and read from
    its start.
    """

    def __init__(self, path: Path, evaluate: Evaluate[Any] = evaluation) -> None:
        self.path, self.evaluate = path, evaluate
        self._inode = self._offset = 0

    def read(self) -> bool:
        """Read the rows since the last call; True if there were any."""
        try:
            with open_regular(own_file(self.path)) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                    self.step, self.train, self.evaluation = 0, None, None
                file.seek(self._offset)
                return sum(map(self._take_line, bounded_lines(file))) > 0
        except (OSError, ValueError):
            return False

    def _take_line(self, line: bytes) -> bool:
        if not line.endswith(b"\n") and len(line) < MAX_LINE:
            return False  # an incomplete row at the end of the file
        self._offset += len(line)
        try:
            self.take(parse(json.loads(line), self.evaluate))
        except DAMAGE:
            return False
        return True
