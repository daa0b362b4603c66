"""`canonlm.play` and `canonlm.train`: the commands of these names as functions that return a data frame."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canonlm.cli import later
from canonlm.cli import play as play_command
from canonlm.cli import train as train_command
from canonlm.core.extras import import_named

if TYPE_CHECKING:
    import polars as pl


def play(
    task: str,
    archs: str | Sequence[str] = "llama,llama+canon",
    *,
    preset: str = "tiny",
    difficulty: str | None = None,
    lrs: Sequence[float] | None = None,
    seeds: int | None = None,
    match: str | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> "pl.DataFrame":
    """Train architectures on a task, show progress, write `report.html` into `out`, and return all measurements, as
    `canonlm.load_runs(out)` does.

    The arguments are the options of `canonlm play`. archs: "llama,gdn2{num_heads=4}+canon", or one name each.
    settings: {"train.steps": 300}. The same call continues what was interrupted, and repeats nothing that is finished.

    InvalidSetting (a ValueError): a setting that cannot be. RuntimeError: a run failed; the others are finished.
    KeyboardInterrupt: every run is saved.
    """
    load_runs = _load_runs()
    options = {"preset": preset, "difficulty": difficulty, "seeds": seeds, "match": match, "jobs": jobs, "out": out}
    names = archs if isinstance(archs, str) else ",".join(archs)
    command = ["canonlm", "play", task, *_overrides(settings), "--arch", names]
    command += [] if lrs is None else ["--lr", ",".join(map(str, lrs))]
    for name, value in options.items():
        command += [] if value is None else [f"--{name}", str(value)]
    runs, folder = play_command.lay_out(
        task,
        archs,
        preset=preset,
        difficulty=difficulty,
        lrs=None if lrs is None else list(lrs),
        seeds=seeds,
        match=match,
        out=None if out is None else Path(out),
        jobs=jobs,
        overrides=_overrides(settings),
        command=shlex.join(command),
    )
    grid = play_command.run_all(runs, folder, jobs)
    failed = [f"{progress.run.name}: {progress.message}" for progress in grid if progress.state == "failed"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(grid)} runs failed; {failed[0]}")
    return load_runs(folder)


def train(
    recipe: str | Path,
    *,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> "pl.DataFrame":
    """Train one model by a recipe, show progress, and return the run's measurements, as `canonlm.load_runs(out)` does.

    The arguments are the options of `canonlm train`; settings: {"train.steps": 300}. The same call continues an
    interrupted run. InvalidSetting (a ValueError): a setting that cannot be. KeyboardInterrupt: the run is saved.
    """
    load_runs = _load_runs()
    run, folder = train_command.lay_out(str(recipe), _overrides(settings), None if out is None else Path(out), trust)
    try:
        train_command.run_it(run, folder)
    except later.loop.Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
    return load_runs(folder)


def _overrides(settings: Mapping[str, Any] | None) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]


def _load_runs() -> "Callable[[Path], pl.DataFrame]":
    """`canonlm.load_runs`; before anything is trained, as polars may be missing."""
    return import_named("canonlm.experiments.published.runs").load_runs
