"""Run the grid of `canonlm play` on this machine, and follow its progress: several runs at a time, in the order of the
grid, each in its own folder."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

from canonlm.core.files import temporary_folder
from canonlm.launch import local, queue
from canonlm.launch.grid import PlannedRun
from canonlm.launch.plan import START_SECONDS, Timed, time_left, tokens_of
from canonlm.runs.watch import Followed
from canonlm.train.config import RunConfig

State = Literal["waiting", "running", "finished", "failed"]


class Progress(Followed):
    """The progress of a run in a grid, read from its folder."""

    def __init__(self, run: PlannedRun) -> None:
        super().__init__(run.folder / "metrics.jsonl")
        self.run = run
        self.state: State = "waiting"
        self.message = ""
        self.first_step = 0  # at the start of its process: above 0 if it was continued
        self.seconds: float | None = None  # its process's time; None while it runs, or if it was finished before
        self.begin = 0.0  # of its process, by the monotonic clock

    @property
    def time_left(self) -> float | None:
        """In seconds."""
        train = self.run.config.train
        return self.seconds_left(train.steps, train.batch_size * self.run.config.data.seq_len)

    def update(self) -> bool:
        """Read what is new; returns whether anything is. Another command may finish a waiting run."""
        if self.state == "waiting" and (self.run.folder / "result.json").exists():
            self.state = "finished"
            self.read()
            return True
        return self.state == "running" and self.read()

    def take_event(self, event: queue.Event) -> None:
        self.read()
        if event.kind == "started":
            self.state, self.first_step, self.begin = "running", self.step, time.monotonic()
        elif event.kind in ("finished", "failed"):
            self.state = "finished" if event.kind == "finished" else "failed"
            self.message, self.seconds = event.message, time.monotonic() - self.begin
        elif event.kind != "stopped":
            self.state = "waiting"


def default_jobs(runs: Sequence[PlannedRun]) -> int:
    """The number of runs at a time: the number of GPUs, or of runs whose threads fit the cores."""
    cores, train = os.cpu_count() or 1, runs[0].config.train
    return max(1, (len(local.gpus()) if train.device != "cpu" else 0) or cores // (train.num_threads or cores))


def run_grid(runs: Sequence[PlannedRun], jobs: int, show: Callable[[list[Progress]], None]) -> list[Progress]:
    """Run all unfinished runs, `jobs` at a time; calls `show` after every change. A run that fails is not tried again.

    In any case, no run is left running, as in `queue.work`: on Ctrl-C, SIGTERM or a closed terminal every running
    process saves its state, then KeyboardInterrupt is raised; the folders can be resumed.
    """
    grid = {run.name: Progress(run) for run in runs}
    shown = list(grid.values())
    for progress in shown:
        progress.read()
        progress.update()
    show(shown)

    def on_event(event: queue.Event) -> None:
        grid[event.run.name].take_event(event)
        show(shown)

    def on_poll() -> None:
        changed = [progress.update() for progress in shown]
        if any(changed):
            show(shown)

    with temporary_folder(runs[0].folder.parents[1] / "leases") as leases:  # no other worker may join
        queue.work(leases, lambda: runs, jobs=jobs, on_event=on_event, on_poll=on_poll, tries=1)
    on_poll()
    return shown


def grid_time_left(
    grid: Sequence[Progress], jobs: int, seconds_per_token: Callable[[RunConfig], float] | None = None
) -> float | None:
    """Seconds until all runs have ended, `jobs` at a time, from the speeds that runs report. For models without one:
    from `seconds_per_token` or, without it, from the others' mean speed; None if there is none."""
    speeds: dict[str, list[float]] = {}
    for progress in grid:
        if progress.train is not None and progress.train.tokens_per_s:
            speeds.setdefault(_model(progress), []).append(progress.train.tokens_per_s)
    if not speeds and seconds_per_token is None:
        return None

    def predicted(progress: Progress, since: int) -> float:
        """Seconds from step `since` to the end, without evaluations and checkpoints."""
        config = progress.run.config
        tokens = tokens_of(config) * max(0, config.train.steps - since) / config.train.steps
        if (reported := speeds.get(_model(progress))) is None and seconds_per_token is not None:
            return tokens * seconds_per_token(config)
        return tokens / statistics.mean(reported or itertools.chain(*speeds.values()))

    timed = [
        Timed(START_SECONDS + predicted(progress, progress.first_step), progress.seconds, ended=True)
        for progress in grid
        if progress.state == "finished" and progress.seconds is not None
    ]
    timed += [
        Timed(START_SECONDS * (progress.state == "waiting") + predicted(progress, progress.step))
        for progress in grid
        if progress.state in ("waiting", "running")
    ]
    return time_left(timed, jobs)


def _model(progress: Progress) -> str:
    config = progress.run.config
    return f"{config.arch} {config.model} {config.data.seq_len}"
