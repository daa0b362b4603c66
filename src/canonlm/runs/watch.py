"""How runs are getting on, read from their folders again and again while others write them.

Cheap: a file that has kept its size and time is not opened, and of one that has grown only the new end is read
(`canonlm.runs.follow`).
"""

from pathlib import Path
from typing import NamedTuple

from ..runs.folder import about, read_config, read_object
from ..runs.follow import Followed
from ..runs.rows import Evaluation, TextEvaluation, evaluation, primary, text_evaluation, writable
from .gather import Folders, as_paths, configured
from .runs import task_of
from .text import named_sources
from .words import number, quantity, slice_label

QUIET_SECONDS = 300.0  # without a row, after which a run is not said to be running
MOST_SLICES = 4  # that fit a line


class Stamp(NamedTuple):
    """By which it is known whether a file has changed."""

    file: int
    size: int
    seconds: float


class Watched(Followed):
    """One run. `state`: waiting (nothing recorded), running, unfinished (nothing for `QUIET_SECONDS`), finished, or
    damaged (its configuration cannot be read). `quiet`: seconds since the last row."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / "metrics.jsonl")
        self.folder, self.name = folder, name
        self.arch = self.task = "?"
        self.lr: float | None = None
        self.seed: int | None = None
        self.steps: int | None = None
        self.state = "waiting"
        self.quiet = 0.0
        self._damaged = self._finished = False
        self._stamps: dict[str, Stamp | None] = {}

    def look(self, now: float) -> bool:
        """Take in what is new at the time `now` (seconds, as of the files). Whether there is something to tell: another
        state, or another evaluation."""
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
    def evaluated(self) -> str:
        """The last evaluation in words."""
        return in_words(self.task, self.evaluation)

    @property
    def told(self) -> str:
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
            self.task = ", ".join(named_sources(config)) if on_text else task_of(config, self.folder)[0]
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
    """All runs in some folders, those that are made meanwhile included."""

    def __init__(self, folders: Folders) -> None:
        self.folders = as_paths(folders)
        self._runs: dict[Path, Watched] = {}

    def read(self, now: float) -> list[Watched]:
        """The runs of which something is new."""
        found = {path.resolve(): (folder, path) for folder in reversed(self.folders) for path in configured(folder)}
        for resolved, (folder, path) in found.items():
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
        """Whether nothing is to come, as far as can be seen: runs that are unfinished may be dead."""
        return bool(self.runs) and not any(run.state in ("waiting", "running") for run in self.runs)


def in_words(task: str, row: Evaluation | TextEvaluation | None) -> str:
    """`1 hop 0.93  2 hops 0.41`: the task's own scale (the mean, of more than four), and the first measure; of text
    `loss hops 2.210`."""
    if row is None:
        return ""
    if isinstance(row, TextEvaluation):
        said = [f"{name} {one.loss:.3f}" for name, one in row.sets.items() if one.loss is not None]
        return "loss " + ", ".join(said[:MOST_SLICES]) if said else ""
    keys = primary(row.slices)
    told = [f"{slice_label(task, key)} {row.slices[key].accuracy:.2f}" for key in keys]
    if len(keys) > MOST_SLICES:
        told = [f"mean accuracy {row.accuracy:.2f}"]
    told += [f"{quantity(task, key).label} {number(value)}" for key, value in row.measures.items()][:1]
    return "  ".join(told)


def _stamp(path: Path) -> Stamp | None:
    """None where there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime)
