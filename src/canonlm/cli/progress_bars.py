"""Progress of a long command: a bar on a terminal, a line now and then elsewhere. On standard error, so that the output
can be piped."""

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from canonlm.data.prepare import Progress as Prepared

EVERY = 10.0  # seconds between two lines


class Bars:
    """A bar on a terminal; elsewhere a line now and then. Shown during a `with` block."""

    def __init__(self, *columns: ProgressColumn) -> None:
        console = Console(stderr=True)
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._last = time.monotonic()

    def line(self, text: str) -> None:
        if self._bars.disable and time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._bars.console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class Count(Bars):
    """Progress in samples: `with Count(1000, "drawn", "joined") as count: count("drawn", 250)`.

    A phase is shown from its first count on.
    """

    def __init__(self, total: int, *phases: str) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        super().__init__(*columns, TextColumn("{task.fields[rate]}"))
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
        counts = TextColumn("{task.fields[documents]:,} documents  {task.fields[tokens]:,} tokens")
        super().__init__(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), counts)
        self._task = self._bars.add_task("", total=None, documents=0, tokens=0)

    def __call__(self, now: "Prepared") -> None:
        self._bars.update(self._task, completed=now.read, total=now.total, documents=now.documents, tokens=now.tokens)
        share = f"{now.read / 1e6:,.0f} of {now.total / 1e6:,.0f} MB"
        self.line(f"{share}, {now.documents:,} documents, {now.tokens:,} tokens")
