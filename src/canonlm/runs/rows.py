"""`metrics.jsonl`: one row per logged step, evaluation and skipped step, appended during the run.

`Metrics` writes rows. `parse` reads one and trusts no file: it raises one of `DAMAGE` for a damaged row, which `read`
counts and skips.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from io import TextIOWrapper
from itertools import compress
from pathlib import Path
from typing import IO, Any, TypeGuard

from canonlm.core.errors import plain
from canonlm.core.files import append, complete_file
from canonlm.core.untrusted import open_regular, own_file, parse_json

TRAIN_KEYS = {
    "kind": '"train"',
    "step": "optimizer steps done, from 1",
    "loss": "mean cross-entropy of the step's targets before its update, in nats, plus z-loss and router loss",
    "z_loss": "the part of the loss that is z-loss; only if the model has one",
    "lr": "learning rate of the step",
    "grad_norm": "norm of the gradient before clipping",
    "tokens": "tokens read since the run began, on all devices",
    "windows": "numbers of the first and the last window of the step",
    "tokens_per_s": "speed since the last row, of all devices together, without evaluations and checkpoints; "
    "null while a process warms up (its first 3 steps)",
    "mfu": "model FLOPs utilisation: the share of the devices' peak that the model's own arithmetic makes up, at this "
    "speed; null if the peak is not known, as on CPUs",
    "data_wait_s": "seconds that the loop waited for its data since the last row; null when the speed is",
    "data_wait_share": "the same as a share of the time for training; null when the speed is",
    "elapsed_s": "seconds of all processes of the run so far, evaluations and checkpoints included",
    "memory_gb": "peak memory, 1e9 bytes. GPU: of tensors, since the last row. CPU: resident, since the process began",
    "data_wait_rank": "only with several processes: the number of the one that waited longest, whose wait this is",
    "memory_rank": "only with several processes: the number of the one with the most memory, whose memory this is",
}
"""The keys of a row of a logged step, in order, and what they mean."""

TIMINGS = {"tokens_per_s", "mfu", "elapsed_s", *(key for key in TRAIN_KEYS if key.startswith(("data_wait", "memory")))}
"""Keys whose values differ when the same run is repeated; `train_seconds` of `result.json` does, too."""

DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Exceptions from reading a damaged row."""

LARGEST = 1e100
"""Larger numbers count as infinite: sums and squares of them would overflow."""

MAX_COUNT = 2**53
"""Larger counts are not exact as doubles, in which a browser holds them."""

MAX_LINE = 2**20
"""Max bytes of a row."""

MAX_KEPT_LINE = 2**26
"""Max bytes of a line in the file of a run that is continued."""

MAX_BYTES = 2**30
"""Max bytes that are read of a file."""

MAX_LETTERS = 100
"""Max letters of a name from a file."""

_NUMBER = re.compile(r"(?:(?<==)-)?\d+(?:\.\d+)?(?:e[-+]?\d+)?")  # the 9 and 16 of n=9-16, the -3 of shift=-3

OF_A_SET = ("loss", "bits per byte")
"""Measures on each validation set of text."""


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A logged step; see `TRAIN_KEYS`. None: not known."""

    step: int
    loss: float
    tokens_per_s: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    z_loss: float | None = None
    tokens: float | None = None
    mfu: float | None = None
    data_wait_share: float | None = None
    memory_gb: float | None = None


_NUMBERS = tuple(each.name for each in fields(TrainRow))[2:]


@dataclass(frozen=True)
class Count:
    """Right answers, and all answers."""

    correct: int
    total: int

    def __add__(self, other: "Count") -> "Count":
        return Count(self.correct + other.correct, self.total + other.total)

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


@dataclass(frozen=True)
class Evaluation:
    """One eval row: `slices` maps a slice such as `k=1` to its count, `measures` a name such as `kl` to its number.

    A row may slice the same answers by several scales (`n=70`, `depth=1`, …). The first in the row is the primary one.

    A row of a run on text has no slices. `sets`: the number of evaluated tokens of each validation set, whose losses
    are measures (`of_set`); the measure `loss` is the mean over the tokens of all sets.
    """

    step: int
    slices: Mapping[str, Count]
    loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    unusable: tuple[str, ...] = ()  # names of measures without a usable number, as a diverged run has them
    place: str = field(default="", compare=False, repr=False)  # the file, and perhaps the line, for errors
    sets: Mapping[str, int | None] = field(default_factory=dict)

    def answers(self, key: str) -> Count:
        """The answers on a slice. ValueError if the row lacks it."""
        if key not in self.slices:
            listed = ", ".join(self.slices) or "none"
            raise ValueError(f"{self.place}: expected answers on the slice {key} at step {self.step}, got {listed}")
        return self.slices[key]

    @property
    def accuracy(self) -> float:
        """Unweighted mean over the slices of the primary scale."""
        shares = [self.slices[key].accuracy for key in primary(self.slices)]
        return sum(shares) / len(shares)

    @property
    def of_sets(self) -> set[str]:
        """The measures on single validation sets."""
        return {of_set(measure, name) for name in self.sets for measure in OF_A_SET}

    def value(self, key: str) -> float | None:
        """The accuracy on a slice or the number of a measure; None if the row lacks it."""
        return self.slices[key].accuracy if key in self.slices else self.measures.get(key)


@dataclass(frozen=True)
class Remark:
    """A row of another kind: a step that was skipped, a note, a checkpoint."""

    kind: str
    step: int
    why: str = ""


def parse(row: Any) -> Evaluation | TrainRow | Remark:
    """A row from the loop or from JSON. Raises one of `DAMAGE`."""
    if row["kind"] == "eval":
        return evaluation(row)
    if row["kind"] != "train":
        return Remark(one_line(str(row["kind"])), count(row.get("step", 0)), one_line(str(row.get("why", "")), 300))
    loss = float(row["loss"])
    loss = loss if finite(loss) or math.isnan(loss) else math.copysign(math.inf, loss)
    return TrainRow(count(row["step"]), loss, *(_number(row.get(name)) for name in _NUMBERS))


def read(path: Path, notes: list[str] | None = None) -> tuple[list[Evaluation], list[TrainRow], int]:
    """(evaluations, logged steps, the number of damaged rows), in order of steps. Of two rows for a step, the last
    counts. A missing file has no rows. If a file is not read, or not to its end, the reason is added to `notes`."""
    evals: dict[int, Evaluation] = {}
    train: dict[int, TrainRow] = {}
    damaged = 0
    for line in _lines(path, [] if notes is None else notes):
        if not line.strip():
            continue
        try:
            row = parse(json.loads(line))
        except DAMAGE:
            damaged += 1
            continue
        if isinstance(row, TrainRow):
            train[row.step] = row
        elif not isinstance(row, Remark):
            evals[row.step] = replace(row, place=str(path))
    return [evals[step] for step in sorted(evals)], [train[step] for step in sorted(train)], damaged


def _lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    try:
        file = open_regular(own_file(path))
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
        return
    except ValueError:
        notes.append(f"{path.name} is a link out of its folder")
        return
    with file:
        read = 0
        for line in bounded_lines(file):
            if (read := read + len(line)) > MAX_BYTES:
                notes.append(f"{path.name} is not read beyond {MAX_BYTES:,} bytes")
                return
            yield line


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file; lines longer than `MAX_LINE` come in pieces of that length, which are not rows."""
    return iter(lambda: file.readline(MAX_LINE), b"")


def evaluation(row: Any, step: int | None = None) -> Evaluation:
    """An eval row. step: of a row that does not say it. A run on text without held-out text has `{}` in place of a
    row (earlier versions: None). Raises one of `DAMAGE`."""
    if row in ({}, None) and step is not None:
        return Evaluation(step, {})
    more = row.get("measures")
    more = more if isinstance(more, dict) else {}
    measures = {one_line(name): value for name, value in more.items() if name and not is_slice(name)}
    slices: dict[str, Count] = {}
    sets = {}
    if "sets" in row:
        measures = {"loss": row["loss"], **measures}
        for name, entry in row["sets"].items():
            name = one_line(name)
            sets[name] = known_count(entry.get("tokens"))
            measures |= {of_set("loss", name): entry["loss"], of_set("bits per byte", name): entry.get("bits_per_byte")}
    else:
        for entry in row["slices"]:
            if (answers := counted(entry["correct"], entry["total"])).total:
                key = one_line(slice_key(entry["slice"]))  # of k=1 and k="1"
                slices[key] = slices.get(key, Count(0, 0)) + answers
        if not slices:
            raise ValueError("no questions")
    return Evaluation(
        count(row.get("step", step)),
        {key: slices[key] for key in in_order(slices)},
        _number(row.get("loss")),
        {name: float(value) for name, value in measures.items() if finite(value)},
        tuple(name for name, value in measures.items() if not finite(value)),
        sets=sets,
    )


def of_set(measure: str, name: str) -> str:
    """The name of a measure on one validation set of text: `loss (web)`, `bits per byte (web)`."""
    return f"{measure} ({name})"


def slice_key(where: Mapping[str, Any]) -> str:
    """`{"k": 1}` → `k=1`; the key of a slice everywhere in the report and in `task.json`."""
    return ", ".join(f"{key}={value}" for key, value in where.items()) or "all"


def accuracy_of(key: str, keys: Collection[str]) -> str:
    """The name of the accuracy on one of these slices, in tables that have the task's score as the accuracy on `all`:
    answers without a slice are the others, where some have one."""
    return "accuracy of other questions" if key == "all" and len(keys) > 1 else "accuracy"


def is_slice(key: str) -> bool:
    """Whether a key names a slice and not a measure; no measure is named like a slice."""
    return "=" in key or key == "all"


def scale_of(key: str) -> str:
    """The scale of a slice: `k=1` → `k`."""
    return key.partition("=")[0]


def in_order(keys: Iterable[str]) -> list[str]:
    """Each slice once, scale by scale in order of appearance; within a scale `k=2` before `k=10`, words last."""
    keys = list(dict.fromkeys(keys))
    scales = list(dict.fromkeys(map(scale_of, keys)))
    numbers = {key: [float(part) for part in _NUMBER.findall(key)] or [math.inf] for key in keys}
    return sorted(keys, key=lambda key: (scales.index(scale_of(key)), numbers[key]))


def primary(slices: Iterable[str]) -> list[str]:
    """The slices of the first scale. slices: in order."""
    keys = list(slices)
    return [key for key in keys if scale_of(key) == scale_of(keys[0])]


def finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def count(value: Any) -> int:
    """A count from a file. Raises one of `DAMAGE`, also if it is negative or too large for a count."""
    if not 0 <= (number := int(value)) <= MAX_COUNT:
        raise ValueError(f"expected a count, got {str(value)[:MAX_LETTERS]}")
    return number


def counted(correct: Any, total: Any) -> Count:
    """The answers on a slice, from a file. Raises one of `DAMAGE`."""
    answers = Count(count(correct), count(total))
    if answers.correct > answers.total:
        raise ValueError(f"more right answers than questions, {answers.correct}/{answers.total}")
    return answers


def known_count(value: Any) -> int | None:
    """The value, or None if it is not a count."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


def writable(text: str) -> str:
    """The text without lone surrogates, which names of folders and escapes in files may contain, and which cannot be
    written to a file."""
    return text.encode("utf-8", "replace").decode()


def one_line(text: str, longest: int = MAX_LETTERS) -> str:
    """A name from somebody's file as one printable line. A long name ends with a hash of all of it, so that different
    names stay different."""
    if len(text) > longest:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        text = f"{text[: longest - 8]}… {digest[:6]}"
    return plain(writable(text))


def _number(value: Any) -> float | None:
    return float(value) if finite(value) else None


class Metrics:
    """Writes rows. Existing rows up to `last_step` are kept; later rows, of an interrupted run, move to
    `metrics.discarded.jsonl`.

    `elapsed_s` is that of the last row that is kept: the time that earlier processes spent on this run. `evaluation` is
    the evaluation row of `last_step`, if there is one.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self._path = path = folder / "metrics.jsonl"
        self.elapsed_s: float = 0.0
        self.evaluation: dict[str, Any] | None = None
        if path.is_symlink():
            raise ValueError(f"{path}: expected a file, got a link")
        if path.exists():
            self._keep(path, last_step)
        self._file = TextIOWrapper(append(path), encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """ValueError, and nothing is written, for a row that `read` would not take."""
        line = json.dumps(row) + "\n"
        if len(line) > MAX_LINE:
            what = f"a row of at most {MAX_LINE:,} bytes (an evaluation with fewer slices)"
            raise ValueError(f"{self._path}: expected {what}, got {len(line):,}")
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _keep(self, path: Path, last_step: int) -> None:
        """Line by line, as a file may be larger than the memory."""
        try:
            file = open_regular(path)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        with file:
            moves = bytearray(self._take(line, last_step) for line in _whole_lines(file))  # one for each line
            if any(moves):
                with append(path.with_name("metrics.discarded.jsonl")) as discarded:
                    discarded.writelines(line.rstrip(b"\n") + b"\n" for line in compress(_whole_lines(file), moves))
                with complete_file(path) as kept:
                    kept.writelines(line for line, moved in zip(_whole_lines(file), moves, strict=True) if not moved)

    def _take(self, line: bytes, last_step: int) -> bool:
        """Whether a line moves: a row after `last_step`, or anything else, such as a row without its line end."""
        try:
            row = parse_json(line, "metrics.jsonl")
            if not line.endswith(b"\n") or not float(row["step"]) <= last_step:
                return True
        except DAMAGE:
            return True
        self.elapsed_s = max(self.elapsed_s, _number(row.get("elapsed_s")) or 0.0)
        if self.evaluation is None and row.get("kind") == "eval" and row["step"] == last_step:
            self.evaluation = row
        return False


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file from its start. ValueError for a line that is too long for a row and for the memory."""
    file.seek(0)
    for line in iter(lambda: file.readline(MAX_KEPT_LINE + 1), b""):
        if len(line) > MAX_KEPT_LINE:
            raise ValueError(f"metrics.jsonl: expected lines of at most {MAX_KEPT_LINE:,} bytes")
        yield line
