"""`canonlm work`: a worker for the runs in a folder; any number of workers may run at a time."""

import functools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import later, main
from canonlm.cli.options import SlurmSettings, SlurmWorkers
from canonlm.cli.status import keep_going, say
from canonlm.core.errors import brief, expected
from canonlm.runs.folder import configured

FOLDER = typer.Argument(help="A folder of runs, or a play folder.", metavar="DIR")
JOBS = typer.Option(help="How many runs at a time, each in its own process; small models share a GPU.", min=1)
STATUS = typer.Option("--status", help="Show how far the runs are, and start nothing.")
DRY_RUN = typer.Option("--dry-run", help="Show what is left to do and how long that takes, and start nothing.")
GPU = typer.Option(help="With --dry-run: hours on this GPU (h100, …). Default: on this machine.")
MFU = typer.Option(help="With --gpu: the share of its peak that training will reach.")
TRUST = typer.Option(
    "--trust", help="Run the on_checkpoint commands and the Python files that somebody else's runs name."
)


def work(
    folder: Annotated[Path, FOLDER],
    settings: SlurmSettings = None,
    jobs: Annotated[int, JOBS] = 1,
    status: Annotated[bool, STATUS] = False,
    dry_run: Annotated[bool, DRY_RUN] = False,
    slurm: SlurmWorkers = False,
    gpu: Annotated[str | None, GPU] = None,
    mfu: Annotated[float, MFU] = 0.4,
    trust: Annotated[bool, TRUST] = False,
) -> int:
    """Train the runs of a folder that no other worker has finished or is training, until all are finished.

    Start it as often as you like, on any machines that see the folder: each run is trained by one worker at a time, and
    one whose worker was interrupted or killed continues where it stopped.
    """
    if settings and not slurm:
        raise ValueError(f"{brief(settings[0])}: settings of a job only work with --slurm")
    if status and (slurm or dry_run):
        raise ValueError(f"--status cannot be used with {'--slurm' if slurm else '--dry-run'}")
    if gpu is not None and (slurm or not dry_run):
        raise ValueError("--gpu only works with --dry-run, and without --slurm")
    if slurm:
        return _slurm(folder, settings or [], jobs, dry_run, trust)
    if status:
        return _status(folder, trust)
    if dry_run:
        _show_cost(_plan(folder, trust), gpu, mfu)
        return 0
    keep_going()
    return _work(folder, jobs, trust)


def _plan(folder: Path, trust: bool) -> "list[later.grid.PlannedRun]":
    """The runs of a folder. ValueError: one that cannot be read, or that needs --trust."""
    runs = []
    if not (folders := configured(folder)):
        raise expected("DIR", "a folder of runs, each with its config.yaml", str(folder))
    for path in folders:
        recipe = later.load_config.Recipe(path / "config.yaml", trust=trust, trains=True)
        runs.append(later.grid.PlannedRun(path.absolute().name, path, recipe.run))
    return runs


def _show_cost(runs: "Sequence[later.grid.PlannedRun]", gpu: str | None, mfu: float) -> None:
    """Print the number of runs, tokens, FLOPs and hours, in total and left to do. Without `gpu`: hours on this machine,
    whose speed is measured with one of their models."""
    unfinished = [run for run in runs if not (run.folder / "result.json").exists()]
    total = later.plan.cost([run.config for run in runs], gpu or "h100", mfu)
    remaining = later.plan.cost([run.config for run in unfinished], gpu or "h100", mfu)
    print(f"  {'runs':<15} {total.runs:,}, of which {total.runs - remaining.runs:,} are finished")
    for name, in_all, to_do in (("tokens", total.tokens, remaining.tokens), ("FLOPs", total.flops, remaining.flops)):
        print(f"  {name:<15} {in_all:.3e}, left {to_do:.3e}")
    if gpu is not None:
        print(f"  {'hours':<15} {remaining.hours:,.1f} on one {gpu} at {mfu:.0%} of its peak, for what is left")
    elif unfinished:
        speed = later.plan.measure_speed([run.config for run in unfinished])
        hours = f"{remaining.flops / speed / later.plan.HOUR:,.1f}"
        print(f"  {'hours':<15} {hours} on this machine, a run at a time ({speed / 1e9:,.1f} GFLOP/s measured)")


def _work(folder: Path, jobs: int, trust: bool) -> int:
    known = {run.name: run for run in _plan(folder, trust)}

    def plan() -> "list[later.grid.PlannedRun]":
        """The runs now in the folder: some may be added while others train."""
        if {path.absolute().name for path in configured(folder)} != known.keys():
            known.update({run.name: run for run in _plan(folder, trust)})
        return list(known.values())

    summary = later.queue.work(folder, plan, jobs=jobs, on_event=functools.partial(print, flush=True))
    say(f"all {summary.total} runs are settled: {len(summary.finished)} finished here, {len(summary.failed)} failed")
    for name, message in summary.failed.items():
        say(f"canonlm: {name} failed: {message}", file=sys.stderr)
    return 1 if summary.failed else 0


def _status(folder: Path, trust: bool) -> int:
    rows = later.queue.state(folder, lambda: _plan(folder, trust))
    for row in rows:
        say(_line(row))
    counts = Counter(row.state for row in rows)
    say(", ".join(f"{counts[state]} {state}" for state in ("waiting", "running", "done", "failed") if counts[state]))
    return 0


def _line(row: "later.queue.Row") -> str:
    text = f"{row.name}: {row.state}, step {row.step}/{row.steps}"
    if row.state == "running":
        text += f", on {row.host} (process {row.pid}), last heartbeat {row.silent:.0f} s ago"
    return text + (f" ({row.message})" if row.message else "")


def _slurm(folder: Path, pairs: list[str], jobs: int, dry_run: bool, trust: bool) -> int:
    _plan(folder, trust)  # a mistake is reported before anything is queued
    arguments = ["work", str(folder.absolute()), "--jobs", str(jobs), *["--trust"] * trust]
    return submit(folder, arguments, pairs, dry_run)


def submit(folder: Path, arguments: list[str], pairs: list[str], dry_run: bool) -> int:
    """Start workers as a SLURM job array: each runs `canonlm` with these arguments. pairs: the job's settings."""
    array = [pair for pair in pairs if pair.startswith("array=")]
    settings = later.slurm.parse([pair for pair in pairs if pair not in array])
    jobs = later.slurm.workers(folder, arguments, _count(array), settings, main)
    if dry_run:
        print(jobs.script)
        return 0
    queued = jobs.submit()
    (first, log), (last, _) = queued[0], queued[-1]
    say(f"{len(queued)} jobs are in the queue, {first} to {last}; the log of the first: {log}")
    return 0


def _count(pairs: list[str]) -> int:
    text = pairs[0].removeprefix("array=") if pairs else "1"
    if len(pairs) > 1 or not text.isdecimal() or int(text) < 1:
        raise expected("array", "one integer >= 1, the number of jobs", ", ".join(pairs))
    return int(text)
