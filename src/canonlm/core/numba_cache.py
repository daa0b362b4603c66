"""numba's decorators, with a cache that also follows changes in other files, and that no folder is needed for.

numba itself checks only the file of the compiled function, not the files that it imports: after an edit in one of those
it would still run the old code. So the cache is in a folder named by a hash of the sources: beside them, or if they
cannot be written (a package that root has installed, a container) among the user's caches. If neither can be written,
every process compiles again. A NUMBA_CACHE_DIR that the user set is left alone.
"""

import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from canonlm.core import user_folders

HERE = Path(__file__).parents[1]
config: Any = numba.config  # mypy cannot see its names
_lock = threading.RLock()  # for `config`


def njit(*, cache: bool = False, **options: Any) -> Any:
    """numba.njit"""
    return _cached(numba.njit, **options) if cache else numba.njit(**options)


def cfunc(signature: Any, **options: Any) -> Any:
    """numba.cfunc, cached."""
    return _cached(numba.cfunc, signature, **options)


def _cached(decorator: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        with _lock:
            before = config.CACHE_DIR
            if not (before and user_folders.usable(Path(before))):
                config.CACHE_DIR = _folder(Path(function.__code__.co_filename).relative_to(HERE).parts[0])
            try:
                return decorator(*arguments, cache=bool(config.CACHE_DIR), **options)(function)
            finally:
                config.CACHE_DIR = before

    return decorate


@functools.cache
def _folder(package: str) -> str:
    """The cache for functions of a subpackage of ours; "" if no folder can be written."""
    package = "tasks" if package == "data" else package  # it compiles functions of `tasks`
    digest = hashlib.sha256()
    for source in sorted((HERE / package).rglob("*.py")):
        digest.update(source.read_bytes())
    name = f"numba-{digest.hexdigest()[:16]}"
    if user_folders.usable(beside := HERE / package / "__pycache__" / name):
        return str(beside)
    cache = user_folders.cache()
    return str(cache / name) if cache and user_folders.usable(cache / name) else ""
