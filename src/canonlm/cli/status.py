"""What commands share about their output: a status line while there is nothing to show yet, and what happens when
nobody reads it any more (`canonlm train … | head -1`)."""

import io
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 1.0
"""Seconds before a line is shown."""


def say(text: object, **options: Any) -> None:
    """`print` for text with names from files: without the characters that a terminal would obey."""
    print(_plain(str(text)), **options)


class PlainWarnings(logging.Formatter):
    """Log messages as `say` prints text."""

    def format(self, record: logging.LogRecord) -> str:
        return _plain(super().format(record))


def _plain(text: str) -> str:
    from canonlm.core.errors import plain  # imports pydantic, which `--help` does not need

    return re.sub(r"[^\n\t]+", lambda match: plain(match[0]), text)


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


class _Output(io.FileIO):
    """Standard output or error, of which the rest is dropped once its reader has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            drop(self.fileno())
            return super().write(data)


def keep_going() -> None:
    """From now on, this process continues when nobody reads its output: its results are files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None:  # and not a test's, or a notebook's
            stream.flush()
            raw = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
            buffered = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, **buffered))


def drop(descriptor: int) -> None:
    """Drop what is written to a file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def load_torch() -> None:
    """Import what takes seconds to load: our models, with torch and transformers."""
    with doing("loading torch and transformers"):
        import canonlm.models.build  # noqa: F401
