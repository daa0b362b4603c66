"""The cache of numba's compiled samplers: a folder named by a hash of their sources.

numba itself checks only the file of the compiled function, not the files that it imports. After an edit in one of those
it would still run the old code.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba

HERE = Path(__file__).parent
config: Any = numba.config  # mypy cannot see its names


@contextmanager
def cache_by_content() -> Iterator[None]:
    """Within this context, `njit(cache=True)` caches in the folder of these sources.

    If that folder cannot be written, numba uses its default. A NUMBA_CACHE_DIR that the user set is left alone.
    """
    if config.CACHE_DIR:
        yield
        return
    digest = hashlib.sha256()
    for source in sorted(HERE.rglob("*.py")):
        digest.update(source.read_bytes())
    config.CACHE_DIR = str(HERE / "__pycache__" / f"numba-{digest.hexdigest()[:16]}")
    try:
        yield
    finally:
        config.CACHE_DIR = ""
