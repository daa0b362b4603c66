"""Where numba keeps the compiled samplers: in a folder named after their sources.

numba's own rule looks at the file of the compiled function only, not at the files that it imports, and would go on
running the old code after an edit or an update there.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba

HERE = Path(__file__).parent
config: Any = numba.config  # whose names mypy cannot see


@contextmanager
def cache_by_content() -> Iterator[None]:
    """Functions that are decorated with `njit(cache=True)` in here are cached for these very sources.

    Where the folder cannot be written, numba falls back on its own. A NUMBA_CACHE_DIR of the user's is left alone.
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
