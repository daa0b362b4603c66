"""Files that are complete or absent: written under a temporary name, flushed to disk, renamed.

All files are written by this module, as a folder may be somebody else's: a new file never follows a link and never
opens a file that is there, and its temporary name cannot be guessed. Sub-folders of a folder that the user named are
made by `make_folder`, which refuses links.

A temporary name is `.NAME.tmp-MACHINE-RANDOM`. Its owner holds a lock on it, so the next process that writes NAME on
this machine can remove those of killed processes.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zlib import crc32

from pydantic import BaseModel, ConfigDict

from canonlm.core.untrusted import LINKS, is_inside, linked_disks, open_regular, path_inside, read_json

if TYPE_CHECKING:
    from filelock import FileLock

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would wait for a reader
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
CARD = "README.md"
MANIFEST = "canonlm-manifest.json"
"""The manifest of an exported model. Commands that read the model compare the files with it."""


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
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | _NO_LINK, 0o666))


def create(path: Path) -> BinaryIO:
    """Create a file, to be written. FileExistsError if there is one, or a link."""
    return open(os.open(path, _NEW, 0o666), "wb")


def lock(path: Path, timeout: float = -1) -> "FileLock":
    """A lock between processes, held on a separate file. ValueError if that is a link, as its target would be
    emptied."""
    if path.is_symlink():
        raise ValueError(f"{path}: expected a file, got a link")
    from filelock import FileLock  # takes milliseconds, and few commands need it

    return FileLock(path, timeout=timeout)


def make_folder(root: Path, *names: str) -> Path:
    """Make the folder `root/name/…` unless it exists. `root`, which the user named, may be a link; ValueError if one of
    the folders below it is, as it may lead to one of your folders. (CANONLM_DISKS names folders where links may lead.)
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root)) from None
    folder = root
    for name in names:
        folder = folder / name
        if folder.is_symlink() and not is_inside(folder, *linked_disks()):
            raise ValueError(f"{folder}: expected a folder, got a link ({LINKS})")
        folder.mkdir(exist_ok=True)
    return folder


def refuse_links(folder: Path) -> None:
    """ValueError if anything below the folder is a link: for folders in which libraries write."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path}: expected a file or a folder, got a link")


@contextmanager
def complete_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to be written, which replaces `path` at the end, on disk. After an error there is none."""
    temporary, descriptor = _begin(path, is_folder=False)
    try:
        with _naming(path, temporary), open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    with complete_file(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, for a folder or a file that will be renamed to it; removed at the end."""
    temporary, descriptor = _begin(path, is_folder=True)
    try:
        with _naming(path, temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


def damage(folder: Path, stamps: Mapping[str, Stamp]) -> str | None:
    """A description of the damage to files in a folder, or None. ValueError: a name leads out of the folder."""
    paths = [(path_inside(folder, name, str(folder)), stamp) for name, stamp in stamps.items()]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        return next(filter(None, pool.map(lambda item: item[1].damage(item[0]), paths)), None)


class Manifest(BaseModel):
    """The content of `MANIFEST`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    files: dict[str, Stamp]


def write_manifest(folder: Path) -> None:
    """Write `MANIFEST`, with the size and sha256 of every file in the folder but its card, which is for its owner to
    edit."""
    names = sorted(
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file != folder / CARD
    )
    manifest = Manifest(files={name: Stamp.of(folder / name) for name in names})
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")


def check_manifest(folder: Path) -> None:
    """ValueError unless the files in a folder are those of its `MANIFEST`, if it has one."""
    if not os.path.lexists(path := folder / MANIFEST):
        return
    try:
        problem = damage(folder, Manifest.model_validate(read_json(path)).files)
    except ValueError as error:
        problem = f"it cannot be read ({str(error).partition(chr(10))[0]})"
    if problem is not None:
        raise ValueError(f"{path}: {problem}; after a change on purpose, remove {MANIFEST}")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` with what `fill(folder)` writes into it. FileExistsError if another process has made one
    of that name meanwhile."""
    with temporary_folder(path) as temporary:
        fill(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        try:
            with _naming(path, temporary):
                temporary.replace(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) or not os.path.lexists(path):
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None


def temporary_name(path: Path) -> Path:
    """A temporary name that cannot be guessed, for a library that creates the file. Only `remove_leftovers` removes
    one of a killed process."""
    return path.with_name(f".{path.name[:50]}.tmp-{secrets.token_hex(8)}")


def time_in(folder: Path) -> float:
    """Seconds since 1970 by the clock of the folder's file system, from a new file, which is removed. The change makes
    a file system that caches missing files (NFS) look again."""
    with _naming(folder, folder / "clock"):
        temporary, descriptor = _begin(folder / "clock", is_folder=False)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a folder, whose files are flushed to disk, to `path`; a folder of that name is replaced."""
    if os.path.lexists(path):
        remove_folder(path)
    with _naming(path, temporary):
        temporary.replace(path)


def remove_folder(path: Path) -> None:
    """Remove a folder; if the process is killed, the folder is complete or absent. Of a link, only the link."""
    temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}")
    path.replace(temporary)
    with _naming(path, temporary):
        _remove(temporary)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in `folder`, also those of killed processes of other machines."""
    for path in folder.glob(".*.tmp-*"):
        if path.is_symlink() or path.is_fifo():  # not ours
            path.unlink(missing_ok=True)
        else:
            _remove_unless_used(path)


def _prefix(path: Path) -> str:
    return f".{path.name[:50]}.tmp-{crc32(os.uname().nodename.encode()):08x}-"


def _begin(path: Path, is_folder: bool) -> tuple[Path, int]:
    """A new temporary file or folder beside `path`, and its descriptor, which holds the lock."""
    _remove_stale(path)
    while True:
        temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}")
        with _naming(path, temporary):
            if is_folder:
                temporary.mkdir(parents=True)
            descriptor = os.open(temporary, os.O_DIRECTORY | _NO_LINK if is_folder else _NEW, 0o666)
        with suppress(OSError):  # a file system without locks: nobody removes it then
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(temporary)):
                return temporary, descriptor
        os.close(descriptor)  # another process has taken it for a leftover, in between


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    """An OSError about `temporary`, or a file below it, names `path`: nobody knows the temporary name."""
    try:
        yield
    except OSError as error:
        if str(error.filename).startswith(str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise


def _remove_stale(path: Path) -> None:
    """Remove temporary files and folders for `path` of killed processes of this machine."""
    with suppress(OSError):
        for name in os.listdir(path.parent):
            if name.startswith(_prefix(path)):
                _remove_unless_used(path.with_name(name))


def _remove_unless_used(temporary: Path) -> None:
    """Remove a temporary file or folder, unless a process that is writing it holds its lock."""
    with suppress(OSError):  # in use, or gone, or a link
        descriptor = os.open(temporary, os.O_RDONLY | _NO_LINK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(temporary)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
