"""The progress of runs: of one, from its loop or from a growing `metrics.jsonl`, or of all runs in some folders.

Folders are read repeatedly while other processes write them. This is cheap: files with the same size and time are not
opened, and of a grown file only the new end is read.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from canonlm.core.untrusted import open_regular, own_file
from canonlm.runs.folder import Folders, as_paths, configured, fields_of, read_config, read_object
from canonlm.runs.load import named_sources, task_of
from canonlm.runs.rows import DAMAGE, MAX_LINE, Evaluation, Remark, TrainRow, bounded_lines, parse, writable
from canonlm.runs.task_info import TaskInfo

QUIET_SECONDS = 300.0  # without a row, after which a run counts as unfinished


class Latest:
    """The newest rows. `step` is the largest of any row."""

    step = 0
    train: TrainRow | None = None
    evaluation: Evaluation | None = None

    def take(self, row: TrainRow | Evaluation | Remark) -> None:
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

    def __init__(self, path: Path) -> None:
        self.path = path
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
            self.take(parse(json.loads(line)))
        except DAMAGE:
            return False
        return True


class Stamp(NamedTuple):
    """A file's inode, size and time: they differ if the file has changed."""

    file: int
    size: int
    seconds: float


class Watched(Followed):
    """One run. `state`: waiting (nothing recorded), running, unfinished (no row for `QUIET_SECONDS`), finished, or
    damaged (its configuration cannot be read). `quiet`: seconds since the last row."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / "metrics.jsonl")
        self.folder, self.name = folder, name
        self.arch, self.task = "?", TaskInfo("?")
        self.lr: float | None = None
        self.seed: int | None = None
        self.steps: int | None = None
        self.state = "waiting"
        self.quiet = 0.0
        self._damaged = self._finished = False
        self._stamps: dict[str, Stamp | None] = {}

    def look(self, now: float) -> bool:
        """Read what is new at the time `now` (seconds, as in the times of files). Returns whether the state or the
        evaluation has changed."""
        before = self.state, self.evaluation
        if self._changed("config.yaml"):
            self._configure()
        if self._changed("metrics.jsonl"):
            self.read()
        if self._changed("result.json"):
            self._finished = bool(read_object(self.folder / "result.json", []))
        self._judge(now)
        return (self.state, self.evaluation) != before

    @property
    def state_text(self) -> str:
        """The state in words."""
        return f"unfinished, no row for {self.quiet / 60:.0f} min" if self.state == "unfinished" else self.state

    def _changed(self, name: str) -> bool:
        stamp = _stamp(self.folder / name)
        changed = stamp != self._stamps.get(name)
        self._stamps[name] = stamp
        return changed

    def _configure(self) -> None:
        try:
            config = read_config(self.folder)
            known = fields_of(config)
            on_text = config.get("text") is not None
            sources = ", ".join(named_sources(config)) if on_text else ""
            self.task = TaskInfo(sources) if on_text else task_of(config, self.folder, [])[0]
        except (ValueError, OSError):
            self._damaged = True
        else:
            self._damaged = False
            self.arch, self.lr, self.seed, self.steps = (known[key] for key in ("arch", "lr", "seed", "steps"))

    def _judge(self, now: float) -> None:
        stamp = self._stamps["metrics.jsonl"]
        self.quiet = max(0.0, now - stamp.seconds) if stamp else 0.0
        if self._damaged or self._finished:
            self.state = "damaged" if self._damaged else "finished"
        elif stamp is None:
            self.state = "waiting"
        else:
            self.state = "running" if self.quiet < QUIET_SECONDS else "unfinished"


class Watch:
    """All runs in some folders, including those created later."""

    def __init__(self, folders: Folders) -> None:
        self.folders = as_paths(folders)
        self._runs: dict[Path, Watched] = {}

    def read(self, now: float) -> list[Watched]:
        """Read what is new; returns the runs that have changed."""
        folders = {path.resolve(): (folder, path) for folder in reversed(self.folders) for path in configured(folder)}
        for resolved, (folder, path) in folders.items():
            if resolved not in self._runs:
                name = path.absolute().name
                name = f"{folder}/{name}" if len(self.folders) > 1 and path != folder else name
                self._runs[resolved] = Watched(path, writable(name))
        return [run for run in self.runs if run.look(now)]

    @property
    def runs(self) -> list[Watched]:
        return sorted(self._runs.values(), key=lambda run: run.name)

    @property
    def done(self) -> bool:
        """Whether no run is waiting or running. Unfinished runs do not count: they may be dead."""
        return bool(self.runs) and not any(run.state in ("waiting", "running") for run in self.runs)


def _stamp(path: Path) -> Stamp | None:
    """None where there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return Stamp(stat.st_ino, stat.st_size, stat.st_mtime)
