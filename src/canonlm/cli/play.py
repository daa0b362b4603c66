"""`canonlm play`: compare architectures on a task: train, grade, report."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import completion, later
from canonlm.cli.options import Match
from canonlm.cli.status import doing, keep_going, load_torch, say
from canonlm.core.errors import expected
from canonlm.core.extras import needed

TASK = typer.Argument(
    help="A task; `canonlm tasks` lists them. FILE.py:NAME: one of yours. text: prepared text, with data=FOLDER.",
    autocompletion=lambda: [*completion.tasks(), "text"],
    metavar="TASK",
)
OVERRIDES = typer.Argument(help="Settings to change in every run, such as train.steps=100.", metavar="KEY=VALUE")
PRESET = typer.Option(
    help="tiny: minutes on two CPU cores. small: one GPU. paper: the paper's own settings. Or a setting of another "
    "paper, such as zoology-fig2: `canonlm tasks` lists them.",
    autocompletion=completion.presets,
)
DIFFICULTY = typer.Option(help="For presets of papers: one of their named difficulties.")
ARCH = typer.Option(
    help="Architectures, separated by commas; `canonlm archs` lists them.", autocompletion=completion.architectures
)
LR = typer.Option(help="Learning rates, separated by commas. Default: the preset's.")
SEEDS = typer.Option(help="Seeds 0 … N-1 for every learning rate. Default: the preset's.")
OUT = typer.Option(help="Folder for runs and report. Default: runs/TASK-PRESET.")
JOBS = typer.Option(help="How many runs at a time. Default: one per GPU, or as many as fit the CPU cores.")


def play(
    task: Annotated[str, TASK],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    preset: Annotated[str, PRESET] = "tiny",
    difficulty: Annotated[str | None, DIFFICULTY] = None,
    arch: Annotated[str, ARCH] = "llama,llama+canon",
    lr: Annotated[str | None, LR] = None,
    seeds: Annotated[int | None, SEEDS] = None,
    match: Match = None,
    out: Annotated[Path | None, OUT] = None,
    jobs: Annotated[int | None, JOBS] = None,
) -> int:
    """Train architectures on a synthetic task or on text, on the same data in the same order, and compare them.

    For example: `canonlm play depo --arch llama,llama+canon train.steps=300`

    Ends with a table and `report.html`, a page that exists from the start and follows the runs. Ctrl-C saves every
    run; the same command continues where it stopped and repeats nothing that is finished.
    """
    keep_going()
    runs, folder = lay_out(
        task,
        arch,
        preset=preset,
        difficulty=difficulty,
        lrs=_rates(lr),
        seeds=seeds,
        match=match,
        out=out,
        jobs=jobs,
        overrides=overrides or [],
        command=shlex.join(["canonlm", *sys.argv[1:]]),
    )
    try:
        grid = run_all(runs, folder, jobs)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"every run is saved in {folder}. The same command continues.") from None
    later.report.show(folder)
    failed = [progress for progress in grid if progress.state == "failed"]
    for progress in failed:
        say(f"canonlm: {progress.run.name} failed: {progress.message}", file=sys.stderr)
    return 1 if failed else 0


def lay_out(
    task: str,
    archs: str | Sequence[str],
    *,
    preset: str,
    difficulty: str | None,
    lrs: list[float] | None,
    seeds: int | None,
    match: str | None,
    out: Path | None,
    jobs: int | None,
    overrides: list[str],
    command: str,
) -> "tuple[list[later.grid.PlannedRun], Path]":
    """The runs and their folder, with a file that says what is planned. InvalidSetting: they cannot be started."""
    needed("plotly", "canonlm play")
    chosen = later.recipes.load_preset(task, preset, difficulty)  # mistakes are reported at once
    if jobs is not None and jobs < 1:
        raise expected("--jobs", "an integer >= 1", jobs)
    later.grid.check_seeds(seeds)
    folder = out or Path("runs") / f"{chosen.difficulty or chosen.task}-{preset}"
    load_torch()
    archs = later.names.split_names(archs) if isinstance(archs, str) else archs
    with doing("checking the models (the first time, the task is compiled)"):
        runs = later.grid.plan(chosen, folder, archs=archs, lrs=lrs, seeds=seeds, overrides=overrides, match=match)
    later.grid.write_plan(runs, chosen, folder, command)
    return runs, folder


def run_all(runs: "list[later.grid.PlannedRun]", folder: Path, jobs: int | None) -> "later.live.Grid":
    """Run what is not finished; the page follows, also if it is interrupted or fails."""
    page = later.live.LivePage(folder)
    try:
        grid = later.live.follow_grid(runs, jobs, page)
        for progress in grid:
            if progress.state == "finished" and progress.run.task is None:
                _ask_birth_years(progress.run)
    except BaseException:
        page.write(live=False)
        raise
    return grid


def _ask_birth_years(run: "later.grid.PlannedRun") -> None:
    try:
        later.birth_years.ask(run.folder, run.config)
    except ValueError as error:  # windows too short for a question; the losses are still reported
        say(f"canonlm: {run.name}: no birth-year questions: {error}", file=sys.stderr)


def _rates(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise expected("--lr", "numbers separated by commas, such as 1e-3,3e-3", text) from None
