"""Follow a grid of runs: a live table on a terminal, plain lines in a log."""

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from canonlm.launch.local import Progress, default_jobs, run_grid
from canonlm.launch.play import PlannedRun
from canonlm.report.watch import in_words
from canonlm.runs.words import named


def follow(runs: Sequence[PlannedRun], jobs: int | None) -> list[Progress]:
    """Run the grid and show how it goes."""
    console = Console()
    jobs = min(jobs or default_jobs(runs), len(runs))
    if not console.is_terminal:
        return run_grid(runs, jobs, _Lines(console))
    with Live(console=console, refresh_per_second=4) as live:
        return run_grid(runs, jobs, lambda grid: live.update(_table(grid)))


class _Lines:
    """A line whenever a run evaluated, or changed its state."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seen: dict[str, tuple[str, int]] = {}

    def __call__(self, grid: list[Progress]) -> None:
        for progress in grid:
            now = progress.state, progress.evaluation.step if progress.evaluation else -1
            if now != self.seen.get(progress.run.name, ("waiting", -1)):
                self.seen[progress.run.name] = now
                text = f"{progress.run.name}: {progress.state}, step {progress.step}/{_steps(progress)}"
                self.console.print(f"{text}  {_scores(progress)}".rstrip(), highlight=False, soft_wrap=True)


def _table(grid: list[Progress]) -> Table:
    table = Table("run", "progress", "loss", "on the test", "tokens/s", "left", box=None, padding=(0, 2, 0, 0))
    for progress in grid:
        row = progress.train
        bar = ProgressBar(total=_steps(progress), completed=progress.step, width=20)
        loss = f"{row.loss:.3f}" if row else ""
        speed = f"{row.tokens_per_s:,.0f}" if row and row.tokens_per_s else ""
        seconds = progress.time_left if progress.state == "running" else None
        left = progress.state if seconds is None else duration(seconds)
        table.add_row(progress.run.name, bar, loss, _scores(progress), speed, left)
    return table


def _scores(progress: Progress) -> str:
    return in_words(named(progress.run.task), progress.evaluation)


def _steps(progress: Progress) -> int:
    return progress.run.config.train.steps


def duration(seconds: float) -> str:
    """`4:05`, `2:04:05` or `3 d 2 h`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
