"""Code from outside the package: `mine.py:Parity`, a class in a user's file, or `package.module:Parity`.

Every file runs as a separate module: two files with the same name are independent, a changed file is run again, and its
imports must be installed (its folder is not searched). This module does not need torch.
"""

import hashlib
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from canonlm.core.errors import InvalidSetting, brief, expected, unknown, why
from canonlm.core.untrusted import MAX_BYTES, is_inside, open_regular, read_bytes, read_object
from canonlm.core.user_folders import expanded

LIBRARIES = ("hf", "fla")
"""Before a colon, these names stand for models of a library (`canonlm.models.build`)."""

_REFERENCE = re.compile(r"([^{}+]*?\.py|[A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_PREFIX = "canonlm_outside_"
Trust = bool | Collection[str]
"""The references in a file that may be loaded: all, none, or these."""


@dataclass(frozen=True)
class _Scope:
    """The origin of references for `load`. Without a scope, they are yours: from a command line, or your program."""

    run: Path | None = None  # the run with the references
    trust: Trust = True
    flag: str = "--trust"


_SCOPE: ContextVar[_Scope | None] = ContextVar("scope", default=None)


@dataclass(frozen=True)
class Outside:
    """The object of a reference, its file, that file's sha256, and the name alone."""

    object: Any
    file: Path
    sha256: str
    name: str


def reference_of(arch: str) -> str | None:
    """The reference in an architecture's name, if any: `mine.py:Block` in `mine.py:Block+canon`."""
    match = _REFERENCE.match(arch)
    return match[0] if match and match[1] not in LIBRARIES else None


def is_reference(name: str) -> bool:
    return ":" in name or name.endswith(".py")


@contextmanager
def of_run(run: Path, trust: Trust | None = None, flag: str = "--trust-remote-code") -> Iterator[None]:
    """Within this context, references come from the files in the folder `run`, which may be somebody else's: only those
    in `trust` are loaded (None: as in a surrounding scope, else none). If the run has recorded a file's sha256, your
    file is used if it has the same, else the run's copy. `flag`: the option to name in errors.
    """
    around = _SCOPE.get()
    if trust is None:
        trust, flag = (False, flag) if around is None else (around.trust, around.flag)
    token = _SCOPE.set(_Scope(run, trust, flag))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def check_trusted(reference: str) -> None:
    """ValueError for a reference in a file that is not trusted (`of_run`)."""
    scope = _SCOPE.get()
    if scope is not None and scope.trust is not True and reference not in (scope.trust or ()):
        what = f"{scope.flag}, as it is a program named in a file; read it first"
        raise ValueError(f"{brief(reference)}: expected {what}")


def load(reference: str) -> Outside:
    """Import the object of a reference. One-line ValueError for a malformed reference, an unknown file, module or name,
    and code that does not run; for references in files (`of_run`) also for one that is not trusted, and a file that has
    changed since the run began.
    """
    check_trusted(reference)
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise expected("name", "FILE.py:NAME or package.module:NAME", reference)
    module = None if place.endswith(".py") else _import(place)
    yours = expanded(place).resolve() if module is None else Path(str(module.__file__))
    source = _read(place, file := _file(reference, place, yours))
    if module is None or file != yours:
        module = _run(place, file, source)
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise unknown(f"name in {place}", name, own, f"names in {place}")
    return Outside(getattr(module, name), file, hashlib.sha256(source).hexdigest(), name)


def file_of(cls: type) -> Path | None:
    """The user's file that defines a class; None for classes of modules that Python can import."""
    module = sys.modules.get(cls.__module__)
    return Path(str(module.__file__)) if module and cls.__module__.startswith(_PREFIX) else None


def rerun(file: str, module: str) -> ModuleType:
    """The module of a user's file that another process has run. ValueError if the file has changed."""
    if module not in sys.modules and _run(file, Path(file), _read(file, Path(file))).__name__ != module:
        raise expected(file, "the file that the other process has run, unchanged", module)
    return sys.modules[module]


def _file(reference: str, place: str, yours: Path) -> Path:
    scope = _SCOPE.get()
    recorded = _recorded(scope.run).get(reference) if scope is not None and scope.run is not None else None
    if scope is None or scope.run is None or recorded is None or (yours.is_file() and _sha256(yours) == recorded):
        return yours
    copies = sorted((scope.run / "code").glob("*.py")) if scope.trust is True else []
    for copy in copies:
        if copy.is_file() and is_inside(copy, scope.run) and _sha256(copy) == recorded:
            return copy.resolve()
    raise InvalidSetting(reference, f"{place}: expected the file that the run began with, sha256 {recorded}")


def _recorded(run: Path) -> dict[str, str]:
    """The sha256 of the files that a run began with, by reference (`canonlm.runs.folder`)."""
    try:
        return dict(read_object(run / "code.json")["outside"])
    except (ValueError, KeyError, TypeError):
        return {}


def _sha256(file: Path) -> str:
    return hashlib.sha256(read_bytes(file)).hexdigest()


def _read(place: str, file: Path) -> bytes:
    try:
        with open_regular(file) as opened:
            return opened.read(MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{place}: {why(error, file)} ({file})") from None


def _run(place: str, file: Path, source: bytes) -> ModuleType:
    key = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"{_PREFIX}{key[:16]}_{file.stem}"  # without a dot: pickle would import what is before it
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    if not place.endswith(".py"):
        module.__package__ = place.rpartition(".")[0]  # relative imports of a run's copy are those of the package
    sys.modules[name] = module  # data classes and the like look up their module
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
        is_file = Path(f"{place}.py").is_file()
        raise ValueError(f"{place}: {_brief(error)}" + f". A file is named {place}.py:NAME" * is_file) from None
    if getattr(module, "__file__", None) is None:
        raise expected("name", "a module with a source file", place)
    return module


def _line(error: BaseException, file: Path) -> str:
    """The line of an error in the file: `, line 3`."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


def _brief(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
