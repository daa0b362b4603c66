"""The page of a play folder while its runs train."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from canonlm.launch.local import Progress
from canonlm.report import load_play
from canonlm.report.page import place_of, write_page

SECONDS = 30.0  # between two writes, unless a run ends
MAX_SHARE = 1 / 20  # of the time, for writing


class LivePage:
    """Writes the page when called with the state of a grid: at the start, when a run has ended, and otherwise
    every `SECONDS`. The page reloads itself until it is written without `live`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self.settled, self.next = -1, 0.0

    def __call__(self, grid: Sequence[Progress]) -> None:
        settled = sum(progress.state in ("finished", "failed") for progress in grid)
        start = self.clock()
        if settled != self.settled or start >= self.next:
            self.write(live=settled < len(grid))
            self.settled = settled
            self.next = self.clock() + max(SECONDS, (self.clock() - start) / MAX_SHARE)

    def write(self, *, live: bool) -> None:
        """Write the page. Errors are ignored: runs do not depend on it, and the report at the end shows them."""
        try:
            write_page(load_play(self.folder), place_of(self.folder, None), live=live)
        except (OSError, ValueError):
            return
