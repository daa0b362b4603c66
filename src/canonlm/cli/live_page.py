"""The page of a play folder while its runs go on."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from canonlm.launch.local import Progress
from canonlm.report import load_play
from canonlm.report.page import place_of, write_page

SECONDS = 30.0  # between two writes, unless a run ends
MOST_OF_THE_TIME = 1 / 20  # that writing may take


class LivePage:
    """Called with the state of a grid, it writes the page: at the start, when a run has ended, and else every
    `SECONDS`. The page reads itself again until it is written without `live`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self.settled, self.next = -1, 0.0

    def __call__(self, grid: Sequence[Progress]) -> None:
        settled = sum(progress.state in ("finished", "failed") for progress in grid)
        start = self.clock()
        if settled != self.settled or start >= self.next:
            self.write(live=settled < len(grid))
            self.settled = settled
            self.next = self.clock() + max(SECONDS, (self.clock() - start) / MOST_OF_THE_TIME)

    def write(self, *, live: bool) -> None:
        """Nothing happens where it cannot be written: the runs do not depend on it, and the report at the end says
        why."""
        try:
            write_page(load_play(self.folder), place_of(self.folder, None), live=live)
        except (OSError, ValueError):
            return
