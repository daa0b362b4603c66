"""Reads documents from files. Each is read, or counted as a bad line; nothing is dropped silently.

All inputs lie end to end, in order, each as long as its file (and one more, so that an empty file has a place too). A
task reads what *starts* in its interval: lines of a JSON lines file, row groups of a Parquet file. Text files,
compressed files and shards of a dataset are read in full, as reading cannot start in the middle of them. So documents
come in the same order for any number of tasks. datatrove's own reader drops an entire file for one bad byte and does
not count bad lines.
"""

import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from glob import glob, has_magic
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from canonlm.core.errors import brief, expected, unknown
from canonlm.core.extras import needed
from canonlm.core.untrusted import SURROGATE, open_regular
from canonlm.data.parquet_guard import check_pages, check_texts

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
SHARD_SIZE = 2**25  # nominal size of a dataset's shard, whose real size is unknown before it is read
BUFFER = 2**20

MAX_DOCUMENT = 2**26
"""Max bytes of a document: of its line, its file or its cell, decompressed. A longer one is a bad line."""

PEEKED = 100
"""Lines of a file in which a key is looked for before all are read."""

TOO_LONG = f"longer than {MAX_DOCUMENT:,} bytes"


@dataclass(frozen=True)
class Input:
    """A file, or a shard of a Hugging Face dataset. `name` is relative to the input folder; `size` is in bytes, and
    nominal for a shard."""

    path: str
    name: str
    size: int
    kind: str  # lines, table, text or dataset
    shard: tuple[int, int] | None = None  # of a dataset: (index, number of shards)
    revision: str | None = None  # of a dataset on the Hub

    @property
    def divisible(self) -> bool:
        """Whether several tasks can share it."""
        return self.kind == "table" or (self.kind == "lines" and self.codec is None)

    @property
    def codec(self) -> str | None:
        """The compression, by the file's name."""
        return COMPRESSED.get(Path(self.path).suffix.lower())

    def describe(self) -> dict[str, Any]:
        """The entry in an index and a plan, without fields that do not affect the documents."""
        size = {} if self.kind == "dataset" else {"bytes": self.size}
        shard = {} if self.shard is None else {"shard": self.shard[0], "revision": self.revision}
        return {"name": self.name, **size, **shard}


class Text(NamedTuple):
    """A document, and the position after it in all inputs."""

    text: str
    position: int


@dataclass(frozen=True)
class Bad:
    """A bad line. `line` counts from 1 (rows of a table too). In a task that starts in the middle of a file, `line` is
    None and `offset` is the position in the file."""

    file: str
    line: int | None
    reason: str
    offset: int | None = None


def find(inputs: Iterable[str], pattern: str | None = None, exclude: Iterable[str] = ()) -> list[Input]:
    """The files of each input in turn: a file, a folder (its files, sorted by path), a glob (the same; folders that it
    matches are not read), or `hf:NAME`.

    `pattern` (such as *.py): only files with such names, of any kind. Default: in folders those of known kinds, .jsonl,
    .json (also .gz, .zst), .parquet, .txt; else all. `exclude`: names of folders that are left out, below the folder or
    the part of the glob that is the same for all files. ValueError: an input that does not exist, or has no files to
    read.
    """
    files, exclude = [], tuple(exclude)
    for source in inputs:
        if source.startswith("hf:"):
            matches = _dataset_shards(source)
        elif os.path.isdir(source):
            paths = ((f"{source.rstrip('/')}/{name}", name) for name in sorted(_names(source, pattern, exclude)))
            matches = [_file(path, name) for path, name in paths if _is_file(path)]
        elif _is_file(source):
            matches = [_file(source, os.path.basename(source))] if _is_chosen(source, pattern) else []
        else:
            matches = [_file(path, path) for path in sorted(_globbed(source, pattern, exclude)) if _is_file(path)]
        if not matches:
            exists = has_magic(source) or os.path.exists(source)
            what = "files to read" if exists else "a file, a folder, a glob or hf:NAME"
            raise expected("--input", what, source)
        files += matches
    return files


def _names(top: str, pattern: str | None, exclude: tuple[str, ...]) -> Iterator[str]:
    """The chosen files below a folder, relative to it. Excluded folders are not opened: all installed packages are
    below Python's standard library. Links to folders come last, so that a folder that is also linked keeps its name;
    every folder is read once."""
    seen, starts = set(), [top]
    for start in starts:
        for folder, folders, files in os.walk(start, onerror=_raise):
            if (place := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(name for name in folders if not _is_excluded(name, exclude))
            starts += [path for name in folders if os.path.islink(path := f"{folder}/{name}")]
            below = Path(folder).relative_to(top).as_posix()
            for name in files:
                if _is_chosen(name, pattern) and (pattern or _kind(name) is not None):
                    yield name if below == "." else f"{below}/{name}"


def _globbed(source: str, pattern: str | None, exclude: tuple[str, ...]) -> Iterator[str]:
    """The paths that match a glob, and are chosen."""
    fixed = len([*takewhile(lambda part: not has_magic(part), Path(source).parts)])
    for path in glob(source, recursive=True):
        below = Path(path).parts[fixed:-1]
        if _is_chosen(path, pattern) and not any(_is_excluded(name, exclude) for name in below):
            yield path


def _is_chosen(path: str, pattern: str | None) -> bool:
    return not pattern or fnmatch(os.path.basename(path), pattern)


def _is_excluded(name: str, exclude: tuple[str, ...]) -> bool:
    return any(fnmatch(name, left_out) for left_out in exclude)


def _raise(error: OSError) -> None:
    raise expected("--input", f"folders that can be read ({error.strerror})", error.filename)


def _is_file(path: str) -> bool:
    """Whether it is a regular file; False for folders. ValueError for a broken link, whose text would be missing, and
    for a device, a FIFO or a socket, which may have no end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # ValueError: a name with a null byte
        if os.path.islink(path):
            raise expected("--input", "no broken links", path) from None
        return False
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise expected("--input", "regular files", path)
    return stat.S_ISREG(mode)


def _file(path: str, name: str) -> Input:
    return Input(path, name, os.path.getsize(path), _kind(path) or "text")


def _kind(path: str) -> str | None:
    """The kind of a file by its name; None if unknown, and then the file is one text."""
    suffixes = [suffix for suffix in map(str.lower, Path(path).suffixes[-2:]) if suffix not in COMPRESSED]
    return {".jsonl": "lines", ".json": "lines", ".parquet": "table", ".txt": "text"}.get(
        suffixes[-1] if suffixes else ""
    )


def _dataset_shards(source: str) -> list[Input]:
    needed("datasets", source)
    name = source.removeprefix("hf:").split(":")[0]
    revision = None
    try:
        if not os.path.exists(name):
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(name).sha
        shards = _dataset(source, revision).num_shards
    except Exception as error:  # errors of the Hub, the network or the data, of many classes
        reason = " ".join(str(error).split())
        raise expected("--input", f"hf:NAME[:config[:split]] of a dataset ({reason})", source) from None
    return [Input(source, source, SHARD_SIZE, "dataset", (index, shards), revision) for index in range(shards)]


def _dataset(source: str, revision: str | None) -> Any:
    import datasets

    name, config, split, *_ = [*source.removeprefix("hf:").split(":"), "", ""]
    datasets.disable_progress_bars()
    return datasets.load_dataset(name, config or None, split=split or "train", streaming=True, revision=revision)


def read(inputs: list[Input], start: int, stop: int, key: str) -> Iterator[Text | Bad]:
    """The documents that start in [start, stop) of the inputs laid end to end. `key`: the text's key in JSON, or its
    column in a table.

    ValueError: a damaged file, or a table without such a column of text.
    """
    base = 0
    for source in inputs:
        first, last = max(start - base, 0), min(stop - base, source.size + 1)
        if first < last and (source.divisible or first == 0):
            try:
                yield from _READERS[source.kind](source, base, first, last, key)
            except (OSError, EOFError, pa.ArrowException) as error:
                raise ValueError(f"{source.path}: cannot be read ({' '.join(str(error).split())})") from None
        base += source.size + 1


def total(inputs: Iterable[Input]) -> int:
    """The length of the inputs laid end to end."""
    return sum(source.size + 1 for source in inputs)


def lines(file: IO[bytes]) -> Iterator[tuple[bytes | None, int]]:
    """The lines of a file with their ends, and their lengths. A line of more than MAX_DOCUMENT bytes is None."""
    while line := file.readline(BUFFER):
        length = len(line)
        if length < BUFFER or line.endswith(b"\n"):
            yield line, length
            continue
        pieces = [line]
        while not line.endswith(b"\n") and (line := file.readline(BUFFER)):
            length += len(line)
            pieces.append(line)
            if length > MAX_DOCUMENT:
                pieces.clear()
        yield (b"".join(pieces) if length <= MAX_DOCUMENT else None), length


def _lines(source: Input, base: int, first: int, last: int, key: str) -> Iterator[Text | Bad]:
    codec = source.codec
    with open_regular(Path(source.path)).detach() as raw:
        file = _buffered(source, raw)
        number: int | None = 0
        offset = 0
        if first > 0:
            file.seek(first - 1)
            offset = first - 1 + next(lines(file), (None, 0))[1]  # the rest of a line that started before
            number = None
        for line, length in lines(file):
            if offset >= last and not codec:
                return
            number = None if number is None else number + 1
            text = None if line is None else _text_of(line, key)
            if text is None:
                reason = TOO_LONG if line is None else _fault(line, key)
                yield Bad(source.path, number, reason, None if codec else offset)
            else:
                yield Text(text, base + (raw.tell() if codec else offset + length))
            offset += length


def _buffered(source: Input, raw: Any) -> io.BufferedReader:
    """The decompressed file."""
    return io.BufferedReader(pa.CompressedInputStream(raw, source.codec) if source.codec else raw, BUFFER)


def _text_of(line: bytes, key: str) -> str | None:
    """The text in a JSON line; None for a bad line. Not `json.loads(line)`, which would also accept UTF-16."""
    try:
        text = json.loads(line.decode("utf-8"))[key]
        text.encode("utf-8")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def _fault(line: bytes, key: str) -> str:
    """The reason for a bad line."""
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 (byte {error.start + 1} of the line)"
    try:
        value = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return "an empty line" if not decoded.strip() else f"not JSON ({error})"
    if not isinstance(value, dict):
        return f"not a JSON object but {_kind_of_value(value)}"
    return _without_text(value, key) or SURROGATE


def _without_text(value: Mapping[str, object], key: str) -> str:
    """Why an object has no text under the key; "" if it has one."""
    if key not in value:
        return f'no key "{key}", but {brief(", ".join(map(str, value)) or "no keys")}'
    return "" if isinstance(value[key], str) else f'"{key}" is not a string but {_kind_of_value(value[key])}'


def check_key(inputs: list[Input], key: str, max_bad: int) -> None:
    """ValueError, with the keys that have texts, if the first file of JSON lines or the first table has no text under
    `key`: none in the first PEEKED lines, and these are more than `max_bad`. So a wrong key is found before anything is
    written. A file that cannot be read is left to `read`."""
    first: dict[str, Input] = {}
    for source in inputs:
        first.setdefault(source.kind, source)
    with suppress(OSError, EOFError, pa.ArrowException):
        if "table" in first:
            with open_regular(Path(first["table"].path)) as file:
                texts = _text_columns(pq.read_schema(file))
            if key not in texts:
                raise unknown("--text-key", key, texts, f"columns of strings in {first['table'].path}")
        if "lines" in first:
            keys, count = set(), 0
            with open_regular(Path(first["lines"].path)).detach() as raw:
                for line, _ in islice(lines(_buffered(first["lines"], raw)), PEEKED):
                    with suppress(ValueError, AttributeError, RecursionError):
                        value = json.loads((line or b"").decode("utf-8"))
                        keys |= {name for name, text in value.items() if isinstance(text, str)}
                        count += 1
            if count > max_bad and key not in keys:
                raise unknown("--text-key", key, keys, f"keys of texts in {first['lines'].path}")


def _text_columns(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if schema.names.count(name) == 1 and _is_text(schema.field(name).type)]


def _kind_of_value(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _table(source: Input, base: int, first: int, last: int, key: str) -> Iterator[Text | Bad]:
    with open_regular(Path(source.path)) as file:
        schema = pq.read_schema(file)
        if key not in (texts := _text_columns(schema)):
            raise unknown("--text-key", key, texts, f"columns of strings in {source.path}")
        # Dictionary-encoded: a long text that is in many rows is held once.
        table = pq.ParquetFile(file, read_dictionary=[key])
        done, rows = 0, max(1, table.metadata.num_rows)
        for group in range(table.num_row_groups):
            if first <= source.size * done // rows < last:
                number = done
                _check_pages(source, file, table, group, key)
                for batch in table.iter_batches(1000, row_groups=[group], columns=[key]):
                    for value in _cells(batch.column(0)):
                        number += 1
                        position = base + source.size * number // rows
                        yield _decoded(value, source, number, f'"{key}" is null', position)
            done += table.metadata.row_group(group).num_rows


def _check_pages(source: Input, file: IO[bytes], table: pq.ParquetFile, group: int, key: str) -> None:
    try:
        check_pages(file, table, group, (key,))
        check_texts(table, group, key, source.size)
    except ValueError as error:
        raise ValueError(f"{source.path}: cannot be read ({error})") from None


def _cells(column: Any) -> Iterator[memoryview | None]:
    """The bytes of each text, or None for null. They may not be UTF-8, as Arrow does not check that."""
    values = column.dictionary if pa.types.is_dictionary(column.type) else column
    places = column.indices if pa.types.is_dictionary(column.type) else range(len(column))
    for place in places:
        index = place if isinstance(place, int) else place.as_py()
        buffer = None if index is None else values[index].as_buffer()
        yield None if buffer is None else memoryview(buffer)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _decoded(value: memoryview | None, source: Input, line: int, if_none: str, position: int) -> Text | Bad:
    if value is None or len(value) > MAX_DOCUMENT:
        return Bad(source.path, line, if_none if value is None else TOO_LONG)
    try:
        return Text(str(value, "utf-8"), position)
    except UnicodeDecodeError as error:
        return Bad(source.path, line, f"invalid UTF-8 (byte {error.start + 1})")


def _text_file(source: Input, base: int, first: int, last: int, key: str) -> Iterator[Text | Bad]:
    with open_regular(Path(source.path)) as raw:
        value = (pa.CompressedInputStream(raw, source.codec) if source.codec else raw).read(MAX_DOCUMENT + 1)
    if len(value) > MAX_DOCUMENT:
        yield Bad(source.path, 1, TOO_LONG)
        return
    try:
        yield Text(value.decode("utf-8-sig"), base + source.size)
    except UnicodeDecodeError as error:
        line = value.count(b"\n", 0, error.start) + 1
        yield Bad(source.path, line, f"invalid UTF-8 (byte {error.start + 1} of the file)")


def _dataset_rows(source: Input, base: int, first: int, last: int, key: str) -> Iterator[Text | Bad]:
    assert source.shard is not None
    index, shards = source.shard
    name = f"{source.path}#{index}"
    try:
        for number, row in enumerate(_dataset(source.path, source.revision).shard(shards, index), 1):
            if (fault := _without_text(row, key)) or len(row[key].encode()) > MAX_DOCUMENT:
                yield Bad(name, number, fault or TOO_LONG)
            else:
                yield Text(row[key], base)
    except (ValueError, RuntimeError) as error:  # the library's own, for a file that it cannot parse
        raise ValueError(f"{name}: cannot be read ({' '.join(str(error).split())})") from None


_READERS = {"lines": _lines, "table": _table, "text": _text_file, "dataset": _dataset_rows}


def listed(bad_lines: list[Bad]) -> list[dict[str, Any]]:
    """Bad lines as file, line and reason; missing line numbers are counted now, in one pass per file."""
    counted: dict[tuple[str, int], int] = {}
    offsets = [(bad.file, bad.offset) for bad in bad_lines if bad.line is None and bad.offset is not None]
    for path in dict.fromkeys(file for file, _ in offsets):
        with open_regular(Path(path)) as file:
            line, at = 1, 0
            for offset in sorted(offset for owner, offset in offsets if owner == path):
                while at < offset and (block := file.read(min(BUFFER, offset - at))):
                    line, at = line + block.count(b"\n"), at + len(block)
                counted[path, offset] = line
    numbered = [asdict(bad) | {"line": bad.line or counted[bad.file, bad.offset or 0]} for bad in bad_lines]
    return [{key: bad[key] for key in ("file", "line", "reason")} for bad in numbered]
