"""Estimates the remaining time of a grid from the speeds of its runs, and from the times of finished runs."""

import statistics
from collections.abc import Sequence

from canonlm.launch.local import Progress

START_SECONDS = 10.0
"""Seconds from the start of a process to its first step."""


def seconds_left(grid: Sequence[Progress], jobs: int) -> float | None:
    """Seconds until all runs have ended, `jobs` at a time. None until a run has reported its speed."""
    speeds: dict[str, list[float]] = {}
    for progress in grid:
        if progress.train is not None and progress.train.tokens_per_s:
            speeds.setdefault(_model(progress), []).append(progress.train.tokens_per_s)
    if not speeds:
        return None
    mean_speed = statistics.mean(speed for reported in speeds.values() for speed in reported)

    def predicted(progress: Progress, since: int) -> float:
        """Seconds from step `since` to the end, without evaluations and checkpoints."""
        config = progress.run.config
        reported = speeds.get(_model(progress), [mean_speed])
        steps = max(0, config.train.steps - since)
        return steps * config.train.batch_size * config.data.seq_len / statistics.mean(reported)

    ended = [progress for progress in grid if progress.state == "finished" and progress.seconds is not None]
    elapsed = sum(progress.seconds or 0.0 for progress in ended)
    expected = sum(START_SECONDS + predicted(progress, progress.first_step) for progress in ended)
    ratio = elapsed / expected if expected else 1.0
    remaining = [
        ratio * (START_SECONDS * (progress.state == "waiting") + predicted(progress, progress.step))
        for progress in grid
        if progress.state in ("waiting", "running")
    ]
    return max(sum(remaining) / jobs, max(remaining, default=0.0))


def _model(progress: Progress) -> str:
    config = progress.run.config
    return f"{config.arch} {config.model} {config.data.seq_len}"
