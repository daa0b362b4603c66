"""The progress of runs, read repeatedly from their folders while other processes write them.

This is cheap: files with the same size and time are not opened, and of a grown file only the new end is read
(`canonlm.runs.follow`).
"""

from pathlib import Path
from typing import NamedTuple

from canonlm.runs.folder import Folders, about, as_paths, configured, read_config, read_object
from canonlm.runs.follow import Followed
from canonlm.runs.load import named_sources, task_of
from canonlm.runs.rows import evaluation, text_evaluation, writable
from canonlm.runs.task_info import TaskInfo

QUIET_SECONDS = 300.0  # without a row, after which a run counts as unfinished


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
            known = about(config)
            on_text = config.get("text") is not None
            self.evaluate = text_evaluation if on_text else evaluation
            sources = ", ".join(named_sources(config)) if on_text else ""
            self.task = TaskInfo(sources) if on_text else task_of(config, self.folder)[0]
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
