"""`canonlm launch`: one run on several devices, here or on a SLURM cluster."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import later, main
from canonlm.cli.options import Recipe, RunFolder, TrustRecipe, started
from canonlm.cli.status import doing, keep_going, load_torch, say
from canonlm.core.errors import InvalidSetting, expected
from canonlm.launch import processes

SETTINGS = typer.Argument(
    help="Settings to change, such as train.steps=100; with --slurm also the job's, such as nodes=2 gpus=8.",
    metavar="KEY=VALUE",
)
LOCAL = typer.Option(help="The number of processes on this machine: one per GPU, or sharing the cores.")
SLURM = typer.Option("--slurm", help="Submit a SLURM job, which is requeued until the run is finished.")
DRY_RUN = typer.Option("--dry-run", help="Show what --slurm would submit; the text may be missing.")


def launch(
    recipe: Recipe,
    settings: Annotated[list[str] | None, SETTINGS] = None,
    local: Annotated[int | None, LOCAL] = None,
    slurm: Annotated[bool, SLURM] = False,
    out: RunFolder = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
    trust: TrustRecipe = False,
) -> int:
    """Train one model on several devices: on this machine, or on a SLURM cluster.

    Stop it at any time (Ctrl-C, or `scancel`): it saves first, and the same command continues where it stopped.
    """
    if local is None and not slurm:
        raise ValueError("canonlm launch needs --local N or --slurm")
    if local is not None and slurm:
        raise ValueError("--local cannot be used with --slurm")
    keep_going()
    path = later.recipes.find(recipe)
    folder = out or Path("runs") / path.stem
    if local is not None:
        if local < 1:
            raise expected("--local", "an integer >= 1", local)
        if dry_run:
            raise ValueError("--dry-run only works with --slurm")
        return _local(path, folder, settings or [], local, trust)
    return _slurm(path, folder, settings or [], dry_run, trust)


def _local(path: Path, folder: Path, overrides: list[str], count: int, trust: bool) -> int:
    # Mistakes are reported before torch is loaded.
    recipe = later.load_config.Recipe(path, overrides, trust=trust, trains=True, complete=started)
    load_torch()

    def check_all(run):
        later.build.check(later.train_data.complete(run))
        later.mesh.check_layout(run, count)

    with doing("reading the text and building the model"):
        run = recipe.checked(check_all)
    if later.build.pick_device(run.train.device) == "cuda" and count > len(later.local.gpus()):
        raise expected("--local", f"at most {len(later.local.gpus())}, the GPUs of this machine", count)
    later.load_config.check_folder(folder, later.train_data.complete(run))
    later.train_data.check_unchanged(run, folder)
    command = [sys.executable, "-m", "canonlm", "train", str(path), *overrides, "--out", str(folder)]
    command += ["--trust"] * trust
    outcome = processes.run(command, count, folder / "logs")
    if outcome.message:
        say(f"canonlm: {outcome.message}", file=sys.stderr)
    return outcome.code


def _slurm(path: Path, folder: Path, pairs: list[str], dry_run: bool, trust: bool) -> int:
    job_pairs, overrides = later.slurm.split(pairs)
    settings = later.slurm.parse(job_pairs)
    # Mistakes are reported before torch is loaded.
    recipe = later.load_config.Recipe(path, overrides, trust=trust, trains=True, complete=started)
    load_torch()

    def check_all(run):
        later.build.build_model(later.train_data.complete(run), "meta")  # the nodes choose their own devices
        if "gpus" in settings and run.train.device == "cpu":
            raise InvalidSetting("train.device", f"train.device: cpu cannot be used with gpus={settings['gpus']}")
        later.mesh.check_layout(run, settings["nodes"] * settings["tasks"])

    try:
        with doing("reading the text and building the model"):
            run = recipe.checked(check_all)
        later.load_config.check_folder(folder, later.train_data.complete(run))
        later.train_data.check_unchanged(run, folder)
    except InvalidSetting as error:  # the script does not depend on the text, which may be elsewhere
        if not dry_run or not error.key.startswith("text."):
            raise
        run = recipe.run
        say(f"canonlm: the text was not read, and the model not checked: {error}", file=sys.stderr)
    job = later.slurm.training(run, folder, settings, main)
    if dry_run:
        print(job.script)
        return 0
    [(number, log)] = job.submit()
    say(f"job {number} is in the queue; its log: {log}")
    return 0
