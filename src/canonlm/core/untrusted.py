"""Reads files that somebody else may have written. Such a file is data: it must be a regular file, and its size, its
nesting and its numbers are bounded, so that no file hangs the reader, fills the memory or overflows the stack.

Every problem is a one-line ValueError with the name of the file. `canonlm.core.safe_yaml` does the same for YAML.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from canonlm.core.errors import expected, why

MAX_BYTES = 2**26
"""Max bytes of a file that is read into memory."""

MAX_JSON = 2**25
"""Max bytes of JSON: as Python objects they take up to fifty times as much."""

LOG_END = 2**16
"""Max bytes that are read of a log, from its end."""

MAX_DEPTH = 100
"""Max nesting of lists and mappings. Python overflows its stack at about a thousand function calls."""

MAX_DIGITS = 300
"""Max digits of an integer: a longer one is not a finite float."""

SURROGATE = "half of a surrogate pair, which is not a Unicode character"
"""In errors: the part of a text that is not `is_unicode`."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. OSError if it cannot be read, or is something else, such as a FIFO or a device,
    which may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "a folder" if stat.S_ISDIR(mode) else "not a regular file", str(path))
    return open(descriptor, "rb")


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file. ValueError if it cannot be read, or has more than `limit` bytes."""
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ValueError(f"{path}: cannot be read ({why(error, path)})") from None
    if len(content) > limit:
        raise ValueError(f"{path}: expected at most {limit:,} bytes, got {path.stat().st_size:,}")
    return content


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The content of a file as text in UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start + 1})") from None


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """The value of a JSON file, which belongs to its folder (`own_file`)."""
    return parse_json(read_bytes(own_file(path), limit), str(path))


def read_object(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The value of a JSON file that holds an object."""
    if not isinstance(value := read_json(path, limit), dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def last_lines(path: Path, start: int = 0) -> list[str]:
    """The last lines that a process has written to a log (UTF-8) after `start` bytes; none if it has no log. Only the
    end of the file is read."""
    try:
        with open_regular(path) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - LOG_END))
            return file.read(LOG_END).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []


def parse_json(content: str | bytes, place: str) -> Any:
    """The value of JSON text; `place` begins the error message."""
    try:
        # Not `json.loads` of bytes: it also takes UTF-16, and a byte order mark.
        value = json.loads(content.decode("utf-8") if isinstance(content, bytes) else content, parse_int=_integer)
    except RecursionError:
        value = ...
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{place}: not JSON ({error})") from None
    if value is ... or _is_deep(value):
        raise ValueError(f"{place}: expected JSON with at most {MAX_DEPTH} levels of nesting")
    return value


def is_unicode(text: str) -> bool:
    """Whether it is without half of a surrogate pair, which an escape in JSON or an argument may be: neither tokenizers
    nor files take it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_inside(path: Path, *folders: Path) -> bool:
    """Whether a file or folder lies in one of the folders, once all links are followed: the only notion of a place in
    decisions about trust. False for a path that leads nowhere. (`..` and links cannot be resolved as text: `d/..` is
    the parent of the folder to which the link `d` leads.)"""
    try:
        place = os.path.realpath(path, strict=True)
        return any(Path(place).is_relative_to(os.path.realpath(folder)) for folder in folders)
    except (OSError, ValueError):  # ValueError: a name with a null byte
        return False


DISKS = "CANONLM_DISKS"
LINKS = f"the environment variable {DISKS} names folders to which links may lead"


def linked_disks() -> list[Path]:
    """The folders to which links in runs, models and prepared text may lead, from the environment variable
    CANONLM_DISKS (separated by `:`)."""
    return [Path(name) for name in os.environ.get(DISKS, "").split(os.pathsep) if os.path.isabs(name)]


def path_inside(folder: Path, name: object, place: str = "") -> Path:
    """The path of `name` in `folder`. ValueError, beginning with `place` (default: the path), if it leads out of the
    folder: an absolute name, one with `..`, a link (except to CANONLM_DISKS, and those of the Hub's cache)."""
    path = Path(name) if isinstance(name, str) and "\0" not in name else None
    if path is None or not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{place or folder}: expected the name of a file in {folder}, got {str(name)[:100]!r}")
    target, links = folder, False
    for part in path.parts:
        target = target / part
        try:
            links = links or target.is_symlink()
        except OSError as error:  # a name that is too long, say
            raise ValueError(f"{place or folder}: {str(name)[:100]!r} cannot be read ({error.strerror})") from None
    if links:
        home = Path(os.path.realpath(folder))
        blobs = home.parent.parent / "blobs"
        hub = home.parent.name == "snapshots" and not blobs.is_symlink()
        if not is_inside(target, home, *([blobs] if hub else []), *linked_disks()):
            where = f"a link out of it, {name} ({LINKS})"
            raise ValueError(f"{place or target}: expected a file in {folder}, got {where}")
    return target


def own_file(path: Path) -> Path:
    """The path of a file that belongs to its folder. ValueError if it is a link out of it: somebody else's folder may
    have links to your files."""
    return path_inside(path.parent, path.name)


def check_tokenizer(folder: Path) -> None:
    """ValueError unless the files of the folder from which transformers may make a tokenizer are regular ones in it, of
    a size that can be read, and its settings name no file outside and no number of tokens that fills the memory."""
    names = [each.name for each in folder.iterdir() if each.exists() and not each.is_dir()]
    names += [str(each.relative_to(folder)) for each in folder.glob("additional_chat_templates/*.jinja")]
    for name in sorted(names):
        if (usual := _OF_TOKENIZERS.fullmatch(name)) or name.endswith((".json", ".txt")):
            path = path_inside(folder, name, str(folder))
            if usual:  # others may be large, such as a text
                read_bytes(path)
    for file, unread in ((folder / "tokenizer_config.json", _UNREAD), (folder / "special_tokens_map.json", ())):
        settings = read_object(file) if file.exists() else {}
        for key, value in settings.items():
            is_path = re.fullmatch("vocab|merges|init_inputs|.*_file", key) and key not in unread
            for each in _leaves(value):
                if isinstance(each, int) and each > MAX_TOKENS and "max_len" not in key:  # 1e30 where it has no limit
                    raise expected(f"{file}: {key}", f"at most {MAX_TOKENS:,}", each)
                if isinstance(each, str) and key in ("fast_tokenizer_files", "gguf_file"):
                    path_inside(folder, each, f"{file}: {key}")
                elif isinstance(each, str) and is_path and os.path.isfile(each) and not is_inside(Path(each), folder):
                    raise expected(f"{file}: {key}", f"no file outside {folder}", each)


MAX_TOKENS = 10**6
"""Max integer in a tokenizer's settings."""

_OF_TOKENIZERS = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|config\.json).*|.*\.(jinja|model|codes|tokenizer)"
)
_UNREAD = ("tokenizer_file", "special_tokens_map_file")  # old settings, which the library replaces or ignores


def _leaves(value: Any) -> Iterator[Any]:
    """All values in lists and objects."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return False
        level = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return True
