"""Files that are complete or absent: written under a temporary name, flushed to disk, renamed.

Temporary names start with a dot and contain ".tmp-" and the process id; `remove_leftovers` removes those of killed
processes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic import BaseModel, ConfigDict

from canonlm.untrusted import open_regular

if TYPE_CHECKING:
    from filelock import FileLock


class Stamp(BaseModel):
    """Size and checksum that identify a file's content."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: int  # bytes
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(size=file.tell(), sha256=digest)

    def damage(self, path: Path) -> str | None:
        """A description of the damage to a file, or None."""
        try:
            if (size := path.stat().st_size) < self.size:
                return f"{path.name} is truncated, {size} of {self.size} bytes"
            if size > self.size:
                return f"{path.name} has {size} bytes, not {self.size}"
            return None if Stamp.of(path) == self else f"sha256 of {path.name} differs"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror})"


def append(path: Path) -> BinaryIO:
    """Open a file for appending, or create it. OSError if it is a link: in somebody else's folder it may lead to one
    of your files."""
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a FIFO would wait for a reader
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | extra, 0o666))


def lock(path: Path, timeout: float = -1) -> "FileLock":
    """A lock between processes, held on a separate file. ValueError if that is a link, as its target would be
    emptied."""
    if path.is_symlink():
        raise ValueError(f"{path}: expected a file, got a link")
    from filelock import FileLock  # takes milliseconds, and few commands need it

    return FileLock(path, timeout=timeout)


def write_text(path: Path, text: str) -> None:
    temporary = _temporary(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` with what `fill(folder)` writes into it; a folder of that name is replaced."""
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a folder, whose files are flushed to disk, to `path`; a folder of that name is replaced."""
    if path.exists():
        remove_folder(path)
    temporary.replace(path)


def remove_folder(path: Path) -> None:
    """Remove a folder; if the process is killed, the folder is complete or absent."""
    temporary = path.with_name(f"{_temporary(path).name}-removed")
    path.replace(temporary)
    shutil.rmtree(temporary)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes in `folder`; no other process may be writing there."""
    for path in folder.glob(".*.tmp-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")
