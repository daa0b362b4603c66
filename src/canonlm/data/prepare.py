"""Turns files of text into token shards (`canonlm data prepare`): a plan, its tasks, then the index.

    prepare(Path("corpus"), ["texts/"], tokenizer="bytes", validation=0.01)

The folder is the same to the byte for any number of processes and interruptions: the number of tasks follows from the
inputs, a task's files from its number, and `index.json` (canonlm.data.index) is written when all tasks are done. Tasks
(canonlm.data.pipeline) and their executors (canonlm.data.executors) are datatrove's.
"""

import hashlib
import json
import logging
import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from filelock import Timeout
from pydantic import TypeAdapter, ValidationError

from canonlm import __version__
from canonlm.core import user_folders
from canonlm.core.errors import expected, plain
from canonlm.core.files import lock, make_folder, refuse_links, remove_folder, remove_leftovers, write_text
from canonlm.core.untrusted import open_regular, parse_json, read_bytes, read_object, read_text
from canonlm.data import index, tokenizers
from canonlm.data.executors import checked, execute
from canonlm.data.index import Index
from canonlm.data.pipeline import Places, Reader, TooManyBadLines, Writer
from canonlm.data.reading import Bad, Input, check_key, find, lines, listed, total
from canonlm.tasks.random import check_count

_log = logging.getLogger(__name__)

TASK_SIZE = 2**25  # bytes of input per task
MAX_TASKS = 400_000  # shards of an index
MAX_DEFAULT_TASKS = 1000  # a common limit of SLURM's arrays; larger inputs make larger tasks
BAD_LINES = "bad-lines.jsonl"
_BAD = TypeAdapter(Bad)
LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")  # of the standard library


@dataclass(frozen=True)
class Progress:
    """Bytes of the inputs, read so far and in total, and the documents and tokens so far."""

    read: int
    total: int
    documents: int
    tokens: int


def prepare(
    out: Path,
    inputs: Sequence[str],
    *,
    tokenizer: str | Path,
    text_key: str = "text",
    glob: str | None = None,
    exclude: Sequence[str] = (),
    bos: bool = True,
    eos: bool = True,
    validation: float = 0.0,
    seed: int = 0,
    tasks: int | None = None,
    workers: int | None = None,
    max_bad: int = 0,
    executor: str = "local",
    options: Mapping[str, str] | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Index | None:
    """Write the documents of `inputs` (canonlm.data.reading.find) as tokens into the folder `out`.

    Each document becomes <bos> tokens <eos> (`bos` and `eos`: whether to add these). A share `validation` of them,
    chosen by a hash of (seed, text), is the split "valid". `workers`: processes (default: one per core; with SLURM and
    Ray no limit). `options`: the executor's own (for SLURM: partition, time, …). Called again, it continues after an
    interruption and leaves a finished folder as it is.

    Returns the index, or None after submitting to SLURM. ValueError: a wrong setting, other settings than those of a
    half-done `out`, damaged input, or more than `max_bad` bad lines, which are listed in `out`/bad-lines.jsonl.
    """
    checked_options = checked(executor, options or {}, out)
    check_count("--seed", seed)
    check_count("--max-bad", max_bad)
    if not 0 <= validation < 1:
        raise expected("--validation", "a share >= 0 and < 1", validation)
    if tasks is not None:
        check_count("--tasks", tasks, min=1)
        if tasks > MAX_TASKS:
            raise expected("--tasks", f"at most {MAX_TASKS:,}", tasks)
    if workers is not None:
        check_count("--workers", workers, min=1)
    loaded = tokenizers.load(tokenizer)
    for name, requested, id in (("bos", bos, loaded.bos_id), ("eos", eos, loaded.eos_id)):
        if requested and id is None:
            config = f'a tokenizer_config.json beside it that names one ({{"{name}_token": "<…>"}})'
            what = f"a tokenizer with a known {name.upper()} token: {config}, or --no-{name}"
            raise expected(f"--{name}", what, str(tokenizer))
    files = find(inputs, glob, exclude)
    command: dict[str, Any] = {"canonlm": __version__, "input": list(inputs), "glob": glob, "exclude": list(exclude)}
    command |= {"text-key": text_key, "validation": validation, "seed": seed, "tasks": tasks or default_tasks(files)}
    saved = loaded.tokenizer.to_str()
    plan = Index(
        vocab_size=loaded.vocab_size,
        dtype="uint16" if loaded.vocab_size <= 2**16 else "uint32",
        tokenizer={"name": "tokenizer.json", "sha256": hashlib.sha256(saved.encode("utf-8")).hexdigest()},
        bos_id=loaded.bos_id if bos else None,
        eos_id=loaded.eos_id if eos else None,
        splits={},
        inputs=tuple(file.describe() for file in files),
        bad_lines=0,
        command=command,
    )
    places = Places(out)
    try:
        if (out / index.NAME).exists():
            existing = index.read(out)
            _compare(plan, existing, f"as in {out} (choose another folder)")
            _name_newer(files, out / index.NAME, f"{out}; if its text has changed, choose another folder")
            remove_leftovers(out)
            if executor != "slurm":  # its logs are in `work`
                shutil.rmtree(places.work, ignore_errors=True)
            return existing
        if not (places.work / index.NAME).exists():
            _check_sizes(plan, files)
            check_key(files, text_key, max_bad)
        _begin(places, plan, files)
        place = out.absolute()  # datatrove's file systems resolve a relative path only once
        reader = Reader(place, files, text_key, max_bad)
        writer = Writer(place, files, plan.dtype, plan.bos_id, plan.eos_id, validation, seed)
        with lock(places.work / ".lock", timeout=0), _reporting(places, total(files), on_progress):
            is_finished = (out / index.NAME).exists()  # by another process, since it was checked
            if executor == "local":
                remove_leftovers(out)  # before the first write, as they may have filled the disk
            if not is_finished:
                write_text(places.tokenizer, saved)  # again, as it may have been changed
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            max_workers = workers or (cores if executor == "local" else -1)
            steps, last = [reader, writer], Finish(place, max_bad)
            if not is_finished and not execute(
                executor, steps, last, command["tasks"], max_workers, place / "work", checked_options
            ):
                return None
            described = index.read(out) if is_finished else finish(out, max_bad)
        with suppress(FileNotFoundError):  # another process has found it finished, and cleans up
            remove_folder(places.work)
        return described
    except Timeout:
        raise expected("OUT", "a folder that no other process is writing", str(out)) from None
    except TooManyBadLines:
        raise _too_many(places, command["tasks"], max_bad, "at least ") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and (out / index.NAME).exists():
            reason = "another process has just finished it; the same command shows it"
        raise expected("OUT", f"a folder that can be written ({reason})", str(out)) from None


def default_tasks(inputs: Sequence[Input]) -> int:
    """The number of tasks: one per TASK_SIZE bytes, as far as files are divisible; a function of the inputs alone."""
    pieces = sum(-(-file.size // TASK_SIZE) if file.divisible else 1 for file in inputs)
    return max(1, min(pieces, -(-total(inputs) // TASK_SIZE), MAX_DEFAULT_TASKS))


def _check_sizes(plan: Index, files: Sequence[Input]) -> None:
    """ValueError if the index of these files and tasks could become larger than what is read."""
    tasks, per_task = plan.command["tasks"], index.MAX_SHARD * (2 if plan.command["validation"] else 1)
    size = len(index.encoded(plan))
    fewest = min(tasks, default_tasks(files)) * per_task
    if size + fewest > index.MAX_INDEX:
        max_files = max(0, len(files) * (index.MAX_INDEX - fewest) // size)
        join = "join small ones into JSON lines, one document per line"
        what = f"at most {max_files:,} files with names this long ({join})"
        raise expected("--input", what, len(files))
    if size + tasks * per_task > index.MAX_INDEX:
        raise expected("--tasks", f"at most {(index.MAX_INDEX - size) // per_task:,} with these files", tasks)


def _begin(places: Places, plan: Index, inputs: Sequence[Input]) -> None:
    """Make the folder, or check that it was begun with the same plan. `work` has the plan, an index without shards."""
    make_folder(places.out, "work")
    refuse_links(places.work)
    if (places.work / index.NAME).exists():
        _compare(plan, index.read(places.work), f"as in the half-done {places.out} (or remove it)")
        than = f"the half-done {places.out}; if its text has changed, remove that folder"
        _name_newer(inputs, places.work / index.NAME, than)
        return
    if places.out.exists() and any(path.name not in ("work", "tokenizer.json") for path in places.out.iterdir()):
        raise expected("OUT", "a folder that does not exist yet", str(places.out))
    for kind in ("bad", "done", "progress"):
        make_folder(places.work, kind)
    index.write(places.work, plan)


def _name_newer(inputs: Sequence[Input], written: Path, than: str) -> None:
    """Warn of an input that is newer than the file `written`: an edit need not change its size. No error, as a copy of
    the same text may be newer, too."""
    since = written.stat().st_mtime_ns
    for file in inputs:
        if file.kind != "dataset" and os.stat(file.path).st_mtime_ns > since:
            _log.warning("%s is newer than %s", plain(file.path), plain(than))
            return


def _compare(plan: Index, existing: Index, owner: str) -> None:
    begun, requested = (
        each.command | {"bos": each.bos_id, "eos": each.eos_id, "tokenizer": each.tokenizer["sha256"]}
        for each in (existing, plan)
    )
    for key in ("tokenizer", "input", *requested):
        if requested[key] != begun.get(key):
            what = f"{repr(begun.get(key))[:200]}, {owner}"
            raise expected("canonlm" if key == "canonlm" else f"--{key}", what, requested[key])
    for now, then in zip((*plan.inputs, None), (*existing.inputs, None), strict=False):
        if now != then:
            raise expected("--input", f"the same files, {owner}; one was {then or 'missing'}", now or "none")


class Finish(PipelineStep):
    """The last job on SLURM."""

    type, name = "index", "canonlm"

    def __init__(self, out: Path, max_bad: int) -> None:
        super().__init__()
        self.out, self.max_bad = out, max_bad

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        finish(self.out, self.max_bad)
        yield from ()


def finish(out: Path, max_bad: int) -> Index:
    """After all tasks: list the bad lines and write the index."""
    places = Places(out)
    plan = index.read(places.work)
    if not isinstance(count := plan.command.get("tasks"), int) or not 0 < count <= MAX_TASKS:
        raise expected(f"{places.work / index.NAME}: command.tasks", f"1 to {MAX_TASKS:,}", count)
    tasks = range(count)
    if missing := [rank for rank in tasks if not places.task("done", rank).exists()]:
        logs = f"see {places.work}/logs; the same command continues"
        what = f"all tasks done; {len(missing)} of {len(tasks)} are not: {logs}"
        raise expected("OUT", what, str(out))
    bad_lines = _list_bad_lines(places, len(tasks))
    if bad_lines > max_bad:
        raise _too_many(places, len(tasks), max_bad)
    done = []
    for path in (places.task("done", rank) for rank in tasks):
        done.append({key: index.shard(out, shard, f"{path}: {key}") for key, shard in read_object(path).items()})
    splits = {split: tuple(shards[split] for shards in done if split in shards) for split in index.SPLITS}
    if not any(splits.values()):
        raise expected("--input", "at least one document", ", ".join(plan.command["input"]))
    described = replace(plan, splits=splits, bad_lines=bad_lines)
    index.write(out, described)
    remove_leftovers(out)
    return described


def _list_bad_lines(places: Places, tasks: int) -> int:
    """Write the list of bad lines, if there are any; return their number."""
    bad_lines = []
    for rank in range(tasks):
        if places.task("bad", rank).exists():
            bad_lines += _bad_lines(places.task("bad", rank))
    (places.out / BAD_LINES).unlink(missing_ok=True)
    if bad_lines:
        write_text(places.out / BAD_LINES, "".join(json.dumps(line) + "\n" for line in listed(bad_lines)))
    return len(bad_lines)


def _bad_lines(path: Path) -> list[Bad]:
    try:
        with open_regular(path) as file:
            # A line without an end: the task was stopped while it wrote it.
            return [_parsed(line, path) for line, _ in lines(file) if line is None or line.endswith(b"\n")]
    except OSError as error:
        raise index.cannot_be_read(path, error) from None


def _parsed(line: bytes | None, place: Path) -> Bad:
    try:
        return _BAD.validate_python(parse_json(line or b"", str(place)))
    except ValidationError:
        raise expected(str(place), "lines of file, line, reason and offset", str(line)) from None


def _too_many(places: Places, tasks: int, max_bad: int, prefix: str = "") -> ValueError:
    count = _list_bad_lines(places, tasks)
    with open_regular(places.out / BAD_LINES) as file:
        first = json.loads(file.readline())
    return ValueError(
        f"--max-bad: {prefix}{count} bad lines, more than {max_bad}; the first: {first['file']}, line {first['line']}: "
        f"{first['reason']}. All are in {places.out / BAD_LINES}; the same command with a larger --max-bad continues"
    )


@contextmanager
def _reporting(places: Places, length: int, on_progress: Callable[[Progress], None]) -> Iterator[None]:
    """Call on_progress twice a second with the sums over tasks."""
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(0.5):
            on_progress(Progress(*_sums(places.work / "progress", length)))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _sums(folder: Path, length: int) -> tuple[int, int, int, int]:
    """The fields of Progress, summed over tasks; incomplete and damaged files do not count."""
    sums = [0, 0, 0]
    for path in folder.glob("*.json"):
        with suppress(ValueError, TypeError):
            numbers = parse_json(read_text(path, 100), str(path))
            sums = [before + int(number) for before, number in zip(sums, numbers, strict=True)]
    return sums[0], length, sums[1], sums[2]


def prepare_stdlib() -> tuple[Path, str]:
    """The source of this machine's own Python standard library (its tests left out), one document per file, as bytes.

    Returns the folder, in the user's cache under a name that holds the hash, and the sha256 over the sorted names and
    contents of the files. Made once, by whichever process comes first; 5 % of the files are held out.
    """
    library = sysconfig.get_path("stdlib")
    digest = hashlib.sha256()
    for file in find([library], "*.py", LEFT_OUT):
        content = read_bytes(Path(file.path))
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    sha256 = digest.hexdigest()
    if (cache := user_folders.cache()) is None:
        raise expected("XDG_CACHE_HOME", "a folder that can be written", os.environ.get("XDG_CACHE_HOME"))
    folder = cache / f"python-stdlib-{sha256[:16]}"
    make_folder(folder.parent)
    with lock(folder.with_name(f".{folder.name}.lock")):  # others wait
        if not (folder / index.NAME).exists():  # else perhaps by an earlier version, with the same text
            prepare(folder, [library], tokenizer="bytes", glob="*.py", exclude=LEFT_OUT, validation=0.05, max_bad=10)
    return folder, sha256
