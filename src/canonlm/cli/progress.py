"""Follow a grid of runs: a live table on a terminal, plain lines in a log."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from canonlm.cli.status import say
from canonlm.core.errors import plain
from canonlm.launch.grid import PlannedRun
from canonlm.launch.local import Progress, default_jobs, run_grid
from canonlm.launch.remaining import seconds_left
from canonlm.report.format import in_words
from canonlm.runs.identity import slug
from canonlm.runs.task_info import named

LOG_SECONDS = 10.0  # between two lines of one run in a log
ORDER = ("running", "failed", "waiting", "finished")  # runs in progress stand where they can be seen
ROWS_AROUND = 4  # of the terminal: the head of the table, its last line, and the prompt
WIDE = 120  # columns; from this width on, the table has speeds and a longer bar
OTHERS = 50  # columns that the rest of a row takes, with the first of its scores


Show = Callable[[list[Progress]], None]


def follow(runs: Sequence[PlannedRun], jobs: int | None, page: Show) -> list[Progress]:
    """Run the grid and show its progress, on the terminal and on the page."""
    console = Console()
    jobs = min(jobs or default_jobs(runs), len(runs))
    if not console.is_terminal:
        say(f"{_count(runs)} in {runs[0].folder.parent}, {jobs} at a time")
        return run_grid(runs, jobs, _both(_Lines(console, jobs), page))
    with Live(console=console, refresh_per_second=4) as live:
        return run_grid(runs, jobs, _both(lambda grid: live.update(table(grid, jobs, console)), page))


def _both(first: Show, then: Show) -> Show:
    def show(grid: list[Progress]) -> None:
        first(grid)
        then(grid)

    return show


def _count(runs: Sequence[object]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


class _Lines:
    """A line when a run changes its state or evaluates, and one every `LOG_SECONDS` while it trains."""

    def __init__(self, console: Console, jobs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.jobs, self.clock = console, jobs, clock
        self.seen: dict[str, tuple[str, int]] = {}
        self.steps: dict[str, int] = {}
        self.times: dict[str, float] = {}

    def __call__(self, grid: list[Progress]) -> None:
        now = self.clock()
        for progress in grid:
            key = progress.run.name
            state = progress.state, progress.evaluation.step if progress.evaluation else -1
            changed = state != self.seen.get(key, ("waiting", -1))
            moved = progress.state == "running" and progress.step != self.steps.get(key, 0)
            if changed or (moved and now - self.times[key] >= LOG_SECONDS):
                settled = progress.state in ("finished", "failed") and changed
                total = f"({_total(grid, self.jobs)})" if settled else ""
                parts = (line(progress), _scores(progress) if changed else "", total)
                self.console.print(plain("  ".join(filter(None, parts))), highlight=False, soft_wrap=True, markup=False)
                self.seen[key], self.steps[key], self.times[key] = state, progress.step, now


def line(progress: Progress) -> str:
    """`depo-llama-lr0.001-seed0: running, step 300/600  loss 1.234  12,345 tokens/s  0:40 left`"""
    parts = [f"{progress.run.name}: {progress.state}, step {progress.step}/{_steps(progress)}"]
    if progress.train is not None and progress.state == "running":
        parts += [f"loss {progress.train.loss:.3f}", f"{_speed(progress)} tokens/s" if _speed(progress) else ""]
        parts += [f"{duration(progress.time_left)} left" if progress.time_left is not None else ""]
    return "  ".join(filter(None, parts))


def _total(grid: Sequence[Progress], jobs: int) -> str:
    """`3 of 12 runs, about 8 min left`"""
    settled = sum(progress.state in ("finished", "failed") for progress in grid)
    seconds = seconds_left(grid, jobs) if settled < len(grid) else None
    left = "" if seconds is None else f", about {max(1, round(seconds / 60))} min left"
    return f"{settled} of {_count(grid)}{left}"


def table(grid: Sequence[Progress], jobs: int, console: Console) -> Table:
    """A row per run, as many as fit, and the total below."""
    wide = console.width >= WIDE
    names = [short_name(progress.run) for progress in grid]
    grid_table = Table(box=None, padding=(0, 2, 0, 0), caption_justify="left")
    grid_table.add_column("run", overflow="fold", width=min(max(map(len, names)), max(12, console.width - OTHERS)))
    for name, width in (
        ("progress", 14 if wide else 8),
        ("loss", 6),
        ("left", 8),
        *([("tokens/s", 9)] if wide else []),
    ):
        grid_table.add_column(name, width=width, no_wrap=True)
    grid_table.add_column("on the test", no_wrap=True)
    rows = sorted(zip(grid, names, strict=True), key=lambda row: ORDER.index(row[0].state))
    max_rows = max(1, console.height - ROWS_AROUND)
    for progress, name in rows[:max_rows]:
        bar = ProgressBar(total=_steps(progress), completed=progress.step)
        loss = f"{progress.train.loss:.3f}" if progress.train else ""
        seconds = progress.time_left if progress.state == "running" else None
        left = progress.state if seconds is None else duration(seconds)
        speed = [_speed(progress)] if wide else []
        grid_table.add_row(Text(name), bar, loss, left, *speed, _scores(progress))
    more = f"; {len(rows) - max_rows} more not shown" if len(rows) > max_rows else ""
    grid_table.caption = f"{_total(grid, jobs)}{more}"
    return grid_table


def short_name(run: PlannedRun) -> str:
    """The run's name without its task, which all runs of a grid share: `llama-lr0.001-seed0`."""
    return run.name[max(0, run.name.find(slug(run.config.arch))) :]


def _scores(progress: Progress) -> str:
    return in_words(named(progress.run.task), progress.evaluation)


def _steps(progress: Progress) -> int:
    return progress.run.config.train.steps


def _speed(progress: Progress) -> str:
    return f"{progress.train.tokens_per_s:,.0f}" if progress.train and progress.train.tokens_per_s else ""


def duration(seconds: float) -> str:
    """`4:05`, `2:04:05` or `3 d 2 h`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
