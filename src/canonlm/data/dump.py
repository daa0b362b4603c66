"""Writes samples to a Parquet file that is complete or absent; a killed dump continues where it stopped.

| column | type | |
|---|---|---|
| index | int64 | the sample is `task.sample(split, seed, index)` |
| tokens | list<int32> | |
| labels | list<int32> | the target for each token, or -100; the model shifts them, as in transformers |
| answers | list<struct<start, stop>> | tokens[:start] is the prompt of an answer, tokens[start:stop] the answer |

The schema's metadata has `canonlm` (JSON: version, task, settings, split, seed, n, loss_on) and `canonlm.vocab` (JSON:
the tokens' names, in the order of their ids).

Samples are first written in parts, each under a temporary name and then renamed, to the folder X.parquet.parts beside
X.parquet; finally the parts are joined. A part holds the same samples after any number of interruptions, so the file
is the same to the byte.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import Timeout

from canonlm import __version__
from canonlm.core.errors import expected
from canonlm.core.files import complete_file, lock, make_folder, refuse_links, remove_leftovers, write_json
from canonlm.core.untrusted import open_regular, parse_json, read_object
from canonlm.tasks import Task
from canonlm.tasks.random import check_count

PART_TOKENS = 2**21  # max tokens of a part: some 30 MB while it is written
SPAN = pa.struct([pa.field("start", pa.int32(), False), pa.field("stop", pa.int32(), False)])
COLUMNS = [
    pa.field("index", pa.int64(), False),
    pa.field("tokens", pa.list_(pa.field("element", pa.int32(), False)), False),
    pa.field("labels", pa.list_(pa.field("element", pa.int32(), False)), False),
    pa.field("answers", pa.list_(pa.field("element", SPAN, False)), False),
]


def dump(
    task: Task,
    out: Path,
    *,
    n: int,
    split: str = "train",
    seed: int = 0,
    loss_on: str | None = None,
    on_progress: Callable[[str, int], None] = lambda phase, done: None,
) -> bool:
    """Write samples 0 … n - 1 of (split, seed) to `out`. Returns False if it exists already, with the same settings.

    on_progress gets ("drawn" or "joined", number of samples). ValueError: a wrong setting, other content in `out`, a
    half-done dump with other settings, or a file that cannot be written.
    """
    if out.suffix != ".parquet":
        raise expected("--out", "a name that ends in .parquet", str(out))
    check_count("n", n, min=1)
    task.sample(split, seed, 0, loss_on=loss_on)  # raises for a wrong setting before anything is written
    about = _describe(task, n=n, split=split, seed=seed, loss_on=loss_on)
    folder = out.with_name(out.name + ".parts")
    try:
        if out.exists():
            _compare(about, _about_of(out), f"the dump that is already in {out} (choose another --out)")
            shutil.rmtree(folder, ignore_errors=True)
            return False
        _prepare(folder, about)
        with lock(folder / ".lock", timeout=0):
            remove_leftovers(folder)
            rows = max(1, PART_TOKENS // task.max_len)
            firsts = range(0, n, rows)
            parts = [folder / f"part-{first // rows:06}.arrow" for first in firsts]
            for first, part in zip(firsts, parts, strict=True):
                stop = min(first + rows, n)
                if not part.exists():
                    _write_part(part, _table(task, split, seed, first, stop, loss_on))
                on_progress("drawn", stop)
            _join(parts, folder / out.name, about, task, on_progress)
            (folder / out.name).replace(out)
            shutil.rmtree(folder, ignore_errors=True)  # the next dump to this name removes what is left
    except Timeout:
        raise expected("--out", "a file that no other process is writing", str(out)) from None
    except OSError as error:
        reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
        raise expected("--out", f"a file that can be written ({reason})", str(out)) from None
    return True


def _describe(task: Task, **stream: Any) -> dict[str, Any]:
    """All settings that the samples depend on, ready for JSON."""
    settings = task.spec.model_dump(mode="json")
    loss_on = stream.pop("loss_on") or task.loss_on
    return {"version": __version__, "task": task.name, "settings": settings, **stream, "loss_on": loss_on}


def _table(task: Task, split: str, seed: int, first: int, stop: int, loss_on: str | None) -> pa.Table:
    rows = task.sample_rows(split, seed, first, stop - first, loss_on=loss_on)
    answers = pa.StructArray.from_arrays([rows.starts, rows.stops], fields=list(SPAN))
    columns = [
        pa.array(np.arange(first, stop)),
        _lists(COLUMNS[1], rows.lengths, rows.tokens),
        _lists(COLUMNS[2], rows.lengths, rows.labels),
        _lists(COLUMNS[3], rows.spans, answers),
    ]
    return pa.table(columns, schema=pa.schema(COLUMNS))


def _lists(field: pa.Field, lengths: Any, values: Any) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=field.type)


def _write_part(path: Path, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with complete_file(path) as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table)


def _join(
    parts: list[Path], out: Path, about: dict[str, Any], task: Task, on_progress: Callable[[str, int], None]
) -> None:
    metadata = {"canonlm": json.dumps(about), "canonlm.vocab": json.dumps(task.vocab.names)}
    done = 0
    with (
        complete_file(out) as file,
        pq.ParquetWriter(file, pa.schema(COLUMNS, metadata=metadata), compression="zstd") as writer,
    ):
        for part in parts:
            try:
                with pa.OSFile(str(part)) as source:
                    table = pa.ipc.open_file(source).read_all()
                if table.schema != pa.schema(COLUMNS):
                    raise pa.ArrowInvalid
            except pa.ArrowException:
                part.unlink()
                what = f"undamaged parts ({part} was damaged and is removed; the same command writes it again)"
                raise expected("--out", what, out.name) from None
            writer.write_table(table, row_group_size=len(table))
            done += len(table)
            on_progress("joined", done)


def _prepare(folder: Path, about: dict[str, Any]) -> None:
    """Make the folder of parts, or check that it belongs to the same dump, half-done."""
    make_folder(folder.parent, folder.name)
    refuse_links(folder)
    settings = folder / "settings.json"
    if settings.exists():
        _compare(about, _checked(read_object(settings), settings), f"the half-done dump in {folder} (or remove it)")
    elif any(not path.name.startswith(".") for path in folder.iterdir()):
        raise expected("--out", "a name whose folder of parts does not exist yet", str(folder))
    else:
        write_json(settings, about)


def _about_of(out: Path) -> dict[str, Any]:
    """The settings in a file's metadata. They are only compared with those of the command."""
    try:
        with open_regular(out) as file:
            about = parse_json(pq.read_schema(file).metadata[b"canonlm"], str(out))
        return _checked(about, out)
    except (pa.ArrowException, KeyError, TypeError, ValueError, OSError):
        raise expected("--out", "a file that does not exist yet", str(out)) from None


def _checked(about: Any, path: Path) -> dict[str, Any]:
    """`about`, or ValueError if it is not a result of `_describe`."""
    if not isinstance(about, dict) or not isinstance(about.get("settings"), dict) or {"version", "task"} - {*about}:
        raise ValueError(f"{path}: expected version, task, settings, … of a dump")
    return about


def _compare(about: dict[str, Any], existing: dict[str, Any], owner: str) -> None:
    requested, begun = _flat(about), _flat(existing)
    for key in [*requested, *begun]:
        if requested.get(key) != begun.get(key):
            raise expected(key, f"{json.dumps(begun.get(key))[:200]}, as in {owner}", requested.get(key))


def _flat(about: dict[str, Any]) -> dict[str, Any]:
    """`{"canonlm": version, "task": …, "task.N": 225, …, "--split": "train", …}`: the keys that an error names."""
    stream = {"--" + key.replace("_", "-"): value for key, value in about.items()}
    version, task, settings = stream.pop("--version"), stream.pop("--task"), stream.pop("--settings")
    return {"task": task, **{f"task.{key}": value for key, value in settings.items()}, **stream, "canonlm": version}
