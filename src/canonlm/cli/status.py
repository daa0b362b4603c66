"""What commands share about their output: a status line while there is nothing to show yet, bars while there is, and
what happens when nobody reads it any more (`canonlm train … | head -1`)."""

import gc
import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from canonlm.cli import later

PATIENCE = 1.0
"""Seconds before a line is shown."""

EVERY = 10.0
"""Seconds between two lines that stand for a bar."""


def say(text: object, **options: Any) -> None:
    """`print` for text with names from files: without the characters that a terminal would obey."""
    print(_plain(str(text)), **options)


class PlainWarnings(logging.Formatter):
    """Log messages as `say` prints text."""

    def format(self, record: logging.LogRecord) -> str:
        return _plain(super().format(record))


def _plain(text: str) -> str:
    return re.sub(r"[^\n\t]+", lambda match: later.errors.plain(match[0]), text)


def wide_console(width: int = 160, **options: Any) -> "later.console.Console":
    """A console for tables, as wide as the terminal. A log has no width of its own, and 80 columns would cut rows."""
    terminal = later.console.Console(**options)
    return terminal if terminal.is_terminal else later.console.Console(width=width, **options)


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


class Bars:
    """A bar on a terminal; elsewhere a line now and then. Shown during a `with` block, on standard error, so that the
    output can be piped."""

    def __init__(self, *columns: "later.progress.ProgressColumn | str") -> None:
        terminal = later.console.Console(stderr=True)
        is_log = not terminal.is_terminal
        self._bars = later.progress.Progress(*columns, console=terminal, transient=True, disable=is_log)
        self._last = time.monotonic()

    def line(self, text: str) -> None:
        if self._bars.disable and time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._bars.console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bars.disable:  # before rich 14.3, it would print an empty line
            self._bars.stop()


class Count(Bars):
    """Progress in samples: `with Count(1000, "drawn", "joined") as count: count("drawn", 250)`.

    A phase is shown from its first count on.
    """

    def __init__(self, total: int, *phases: str) -> None:
        rich = later.progress
        bar, percent, left = rich.BarColumn(), rich.TaskProgressColumn(), rich.TimeRemainingColumn()
        super().__init__("{task.description}", bar, percent, left, "{task.fields[rate]}")
        self.total = total
        self._tasks = {phase: self._bars.add_task(phase, total=total, visible=False, rate="") for phase in phases}
        self._since: dict[str, tuple[float, int]] = {}

    def __call__(self, phase: str, done: int) -> None:
        now = time.monotonic()
        begun, before = self._since.setdefault(phase, (now, done))
        rate = f"{(done - before) / (now - begun):,.0f} samples/s" if now > begun else ""
        self._bars.update(self._tasks[phase], completed=done, visible=True, rate=rate)
        self.line(f"{phase} {done:,} of {self.total:,} samples  {rate}".rstrip())


class Reading(Bars):
    """Progress of `canonlm data prepare`: in bytes, with documents and tokens."""

    def __init__(self) -> None:
        bar, left = later.progress.BarColumn(), later.progress.TimeRemainingColumn()
        counts = "{task.fields[documents]:,} documents  {task.fields[tokens]:,} tokens"
        super().__init__(bar, later.progress.DownloadColumn(), later.progress.TransferSpeedColumn(), left, counts)
        self._task = self._bars.add_task("", total=None, documents=0, tokens=0)

    def __call__(self, now: "later.prepare.Progress") -> None:
        self._bars.update(self._task, completed=now.read, total=now.total, documents=now.documents, tokens=now.tokens)
        share = f"{now.read / 1e6:,.0f} of {now.total / 1e6:,.0f} MB"
        self.line(f"{share}, {now.documents:,} documents, {now.tokens:,} tokens")


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
    had_torch = "torch" in sys.modules
    with doing("loading torch and transformers"):
        import canonlm.models.build  # noqa: F401
    if not had_torch:
        gc.freeze()  # Python would search it all for garbage when the command ends, which takes a second
