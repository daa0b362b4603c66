"""Code from outside the package: `mine.py:Parity`, a class in a file of the user's, or `package.module:Parity`.

A file is run as it is, in a module of its own: two files with the same name do not meet, a changed file is run again,
and what it imports must be installed (the folder it lies in is not searched). Nothing here needs torch.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from canonlm.errors import InvalidSetting, expected, unknown

LIBRARIES = ("hf", "fla")
"""Before a colon these mean a library's models (`canonlm.models.build`)."""

_REFERENCE = re.compile(r"([^{}+]*?\.py|[A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_RUN: ContextVar[tuple[Path | None, bool]] = ContextVar("run", default=(None, False))
"""The run whose files are meant, and whether its copies may run."""


@dataclass(frozen=True)
class Outside:
    """What a reference names, the file it stands in, that file's sha256, and the name alone."""

    object: Any
    file: Path
    sha256: str
    name: str


def reference_of(arch: str) -> str | None:
    """`mine.py:Block` of the architecture `mine.py:Block+canon`: the code from outside that it needs, if any."""
    match = _REFERENCE.match(arch)
    return match[0] if match and match[1] not in LIBRARIES else None


def is_reference(name: str) -> bool:
    return ":" in name or name.endswith(".py")


@contextmanager
def of_run(run: Path, trust: bool | None = None) -> Iterator[None]:
    """In here `load` gives the files that a run began with: yours where it is still the same, else, with `trust`, the
    run's copy. A run folder may be a stranger's, so its copy never runs without trust (None: as in the context around).
    """
    token = _RUN.set((run, _RUN.get()[1] if trust is None else trust))
    try:
        yield
    finally:
        _RUN.reset(token)


def load(reference: str) -> Outside:
    """Import what a reference names. ValueError, in one line: not a reference, no such file or module or name, code
    that does not run, another file than the run at hand began with (`of_run`)."""
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise expected("reference", "FILE.py:NAME or package.module:NAME", reference)
    if place.endswith(".py"):
        file = _file(reference, place)
        source = _read(place, file)
        module = _run(place, file, source)
    else:
        module = _import(place)
        file = Path(str(module.__file__))
        source = _read(place, file)
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise unknown(f"name in {place}", name, own, f"names in {place}")
    return Outside(getattr(module, name), file, hashlib.sha256(source).hexdigest(), name)


def _file(reference: str, place: str) -> Path:
    yours, (run, trust) = Path(place).expanduser().resolve(), _RUN.get()
    began = None if run is None else _kept(run).get(reference)
    if began is None or run is None or (yours.is_file() and _sha256(yours) == began):
        return yours
    for copy in sorted((run / "code").glob("*.py")):
        if _sha256(copy) == began:
            if trust:
                return copy.resolve()
            what = f"the file that the run began with, sha256 {began}; --trust-remote-code runs its copy, {copy}"
            raise InvalidSetting(reference, f"{place}: expected {what}")
    raise InvalidSetting(reference, f"{place}: expected the file that the run began with, sha256 {began}")


def _kept(run: Path) -> dict[str, str]:
    """The sha256 of the files that a run began with, by reference (`canonlm.runs.folder`)."""
    try:
        return dict(json.loads((run / "code.json").read_text(encoding="utf-8"))["outside"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read(place: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{place}: {error.strerror or error} ({file})") from None


def _run(place: str, file: Path, source: bytes) -> ModuleType:
    key = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"canonlm_outside_{key[:16]}.{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # data classes and the like look their module up
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{place}{_line(error, file)}: {_brief(error)}") from None
    return module


def _import(place: str) -> ModuleType:
    try:
        module = import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place}: {_brief(error)}") from None
    if getattr(module, "__file__", None) is None:
        raise expected("reference", "a module with a file of its own", place)
    return module


def _line(error: BaseException, file: Path) -> str:
    """Where in the file it went wrong: `, line 3`."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


def _brief(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
