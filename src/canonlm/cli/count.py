"""How far a long command is: a bar on a terminal, now and then a line elsewhere. On standard error, so that what is
printed can be piped."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds from line to line


class Count:
    """`with Count(1000, "drawn", "joined") as count: count("drawn", 250)`; a phase is shown from its first count on."""

    def __init__(self, total: int, *phases: str) -> None:
        self.total = total
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        self._bars = Progress(*columns, TextColumn("{task.fields[rate]}"), console=console, transient=True)
        self._bars.disable = not console.is_terminal
        self._tasks = {phase: self._bars.add_task(phase, total=total, visible=False, rate="") for phase in phases}
        self._since: dict[str, tuple[float, int]] = {}
        self._line = time.monotonic()

    def __call__(self, phase: str, done: int) -> None:
        now = time.monotonic()
        begun, before = self._since.setdefault(phase, (now, done))
        rate = f"{(done - before) / (now - begun):,.0f} samples/s" if now > begun else ""
        self._bars.update(self._tasks[phase], completed=done, visible=True, rate=rate)
        if self._bars.disable and now - self._line >= EVERY:
            self._line = now
            self._bars.console.print(
                f"{phase} {done:,} of {self.total:,} samples  {rate}".rstrip(), highlight=False, soft_wrap=True
            )

    def __enter__(self) -> "Count":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
