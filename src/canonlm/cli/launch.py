"""`canonlm launch`: one run on several devices, here or on a SLURM cluster."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli.options import RECIPE, RUN, TRUST_RECIPE
from canonlm.cli.status import doing, keep_going, load_torch, say

SETTINGS = typer.Argument(
    help="Settings to change, such as train.steps=100; with --slurm also the job's, such as nodes=2 gpus=8.",
    show_default=False,
    metavar="KEY=VALUE",
)
LOCAL = typer.Option(
    help="The number of processes on this machine: one per GPU, or sharing the cores.", show_default=False
)
SLURM = typer.Option("--slurm", help="Submit a SLURM job, which is requeued until the run is finished.")
DRY_RUN = typer.Option("--dry-run", help="Show what --slurm would submit.")


def launch(
    recipe: Annotated[str, RECIPE],
    settings: Annotated[list[str] | None, SETTINGS] = None,
    local: Annotated[int | None, LOCAL] = None,
    slurm: Annotated[bool, SLURM] = False,
    out: Annotated[Path | None, RUN] = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
    trust: Annotated[bool, TRUST_RECIPE] = False,
) -> int:
    """Train one model on several devices: on this machine, or on a SLURM cluster.

    Stop it at any time (Ctrl-C, or `scancel`): it saves first, and the same command continues where it stopped.
    """
    from canonlm.core.errors import expected
    from canonlm.launch.recipes import find

    if local is None and not slurm:
        raise ValueError("canonlm launch needs --local N or --slurm")
    if local is not None and slurm:
        raise ValueError("--local cannot be used with --slurm")
    keep_going()
    path = find(recipe)
    folder = out or Path("runs") / path.stem
    if local is not None:
        if local < 1:
            raise expected("--local", "an integer >= 1", local)
        if dry_run:
            raise ValueError("--dry-run only works with --slurm")
        return _local(path, folder, settings or [], local, trust)
    return _slurm(path, folder, settings or [], dry_run, trust)


def _local(path: Path, folder: Path, overrides: list[str], count: int, trust: bool) -> int:
    from canonlm.core.errors import expected
    from canonlm.train.load_config import check_folder, check_trust, load

    check_trust(path, overrides, trust)
    load(path, overrides, trust=trust)  # a mistake in the file is reported before torch is loaded
    load_torch()
    from canonlm.launch import processes
    from canonlm.launch.local import gpus
    from canonlm.train import data
    from canonlm.train.build import check, pick_device
    from canonlm.train.mesh import check_layout

    def check_all(run):
        check(data.complete(run))
        check_layout(run, count)

    with doing("reading the text and building the model"):
        run = load(path, overrides, check_all, trust=trust)
    if pick_device(run.train.device) == "cuda" and count > len(gpus()):
        raise expected("--local", f"at most {len(gpus())}, the GPUs of this machine", count)
    check_folder(folder, data.complete(run))
    data.check_unchanged(run, folder)
    command = [sys.executable, "-m", "canonlm", "train", str(path), *overrides, "--out", str(folder)]
    command += ["--trust"] * trust
    outcome = processes.run(command, count, folder / "logs")
    if outcome.message:
        say(f"canonlm: {outcome.message}", file=sys.stderr)
    return outcome.code


def _slurm(path: Path, folder: Path, pairs: list[str], dry_run: bool, trust: bool) -> int:
    from canonlm.cli import main
    from canonlm.core.errors import InvalidSetting
    from canonlm.launch.slurm import Job, parse, split
    from canonlm.train.load_config import check_folder, check_trust, load

    job_pairs, overrides = split(pairs)
    settings = parse(job_pairs)
    check_trust(path, overrides, trust)
    load(path, overrides, trust=trust)  # a mistake in the file is reported before torch is loaded
    load_torch()
    from canonlm.train import data
    from canonlm.train.build import build_model
    from canonlm.train.mesh import check_layout

    def check_all(run):
        build_model(data.complete(run), "meta")  # the nodes choose their own devices
        if "gpus" in settings and run.train.device == "cpu":
            raise InvalidSetting("train.device", f"train.device: cpu cannot be used with gpus={settings['gpus']}")
        check_layout(run, settings["nodes"] * settings["tasks"])

    with doing("reading the text and building the model"):
        run = load(path, overrides, check_all, trust=trust)
    check_folder(folder, data.complete(run))
    data.check_unchanged(run, folder)
    job = Job(run, folder, settings, main)
    if dry_run:
        print(job.script)
        return 0
    number, log = job.submit()
    say(f"job {number} is in the queue; its log: {log}")
    return 0
