"""A status line on the terminal while a command has nothing to show yet."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0
"""Seconds before a line is shown."""


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show `what` on standard error if the block takes longer than `PATIENCE`, and clear the line at its end. Logs and
    pipes get nothing: there, standard error is for errors only."""
    if not sys.stderr.isatty():
        yield
        return
    is_shown = threading.Event()

    def show() -> None:
        is_shown.set()
        print(f"{what} …", end="", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if is_shown.is_set():
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def load_torch() -> None:
    """Import what takes seconds to load: our models, with torch and transformers."""
    with doing("loading torch and transformers"):
        import canonlm.models.build  # noqa: F401
