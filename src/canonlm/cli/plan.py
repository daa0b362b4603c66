"""`canonlm plan`: what a run will take, before it is started."""

import copy
from dataclasses import asdict
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from canonlm.cli import completion, later
from canonlm.cli.options import TrustRecipe, started
from canonlm.cli.status import doing, load_torch, say
from canonlm.core import user_code
from canonlm.core.errors import closest, expected, shown
from canonlm.report.format import number

OVERRIDES = typer.Argument(help="Settings to change, such as parallel.tp=2.", metavar="KEY=VALUE")
WHAT = typer.Argument(
    help="A recipe (`canonlm recipes list`), a YAML file, or a task.",
    autocompletion=lambda: [*completion.recipes(), *completion.tasks()],
    metavar="WHAT",
)
PRESET = typer.Option(help="For a task: as in `canonlm play`. Default: tiny.", autocompletion=completion.presets)
DIFFICULTY = typer.Option(help="For a task: one of its named difficulties.")
ARCH = typer.Option(
    help="For a task: architectures, separated by commas. Default: llama,llama+canon.",
    autocompletion=completion.architectures,
)
GPUS = typer.Option(
    help="How many GPUs. Default: 8; for a task 1. Several numbers, such as 8,64,512: a table.", metavar="N[,N…]"
)
NETWORK = typer.Option(help="GB/s that a GPU can send to those of other machines (of eight GPUs).")
GPU = typer.Option(help="Which kind: a100-80, h100, h200, …")
MFU = typer.Option(help="The share of the GPUs' peak that training will reach.")


def plan(
    what: Annotated[str, WHAT],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    gpus: Annotated[str | None, GPUS] = None,
    gpu: Annotated[str, GPU] = "h100",
    mfu: Annotated[float, MFU] = 0.4,
    network: Annotated[float, NETWORK] = 50.0,
    preset: Annotated[str | None, PRESET] = None,
    difficulty: Annotated[str | None, DIFFICULTY] = None,
    arch: Annotated[str | None, ARCH] = None,
    trust: TrustRecipe = False,
) -> None:
    """Predict a run's tokens, FLOPs, memory per GPU, largest micro-batch, traffic and time.

    Nothing is started. No GPU is needed and, if the recipe has `model.vocab_size`, no text. A run that does not fit, or
    cannot be divided over the GPUs, is an error. For a task: a run of each architecture, and all runs of
    `canonlm play`.
    """
    of_task = what in later.tasks.names() or user_code.is_reference(what)
    counts = _counts(gpus or ("1" if of_task else "8"))
    machines = Machines(gpu, mfu, network)
    if of_task:
        if len(counts) > 1:
            raise expected("--gpus", "one number for a task", gpus)
        archs = arch or "llama,llama+canon"
        _plan_task(what, overrides or [], counts[0], machines, preset or "tiny", difficulty, archs)
    else:
        of_tasks = {"--preset": preset, "--difficulty": difficulty, "--arch": arch}
        refused = [option for option, value in of_tasks.items() if value is not None]
        _plan_recipe(what, overrides or [], counts, machines, trust, refused)


class Machines(NamedTuple):
    """The arguments of `make_plan` after the number of GPUs."""

    gpu: str
    mfu: float
    network: float


def _counts(text: str) -> list[int]:
    """`8,64` → [8, 64], each once"""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise expected("--gpus", "integers >= 1, separated by commas", text)
    return list(dict.fromkeys(map(int, parts)))


def _plan_task(
    task: str, overrides: list[str], gpus: int, machines: Machines, preset: str, difficulty: str | None, archs: str
) -> None:
    chosen = later.recipes.load_preset(task, preset, difficulty)
    raw = copy.deepcopy(chosen.run)
    later.load_config.override(raw, overrides)
    runs = [
        later.config.resolve(later.load_config.merge(raw, {"arch": name})) for name in later.names.split_names(archs)
    ]
    load_torch()
    for run in runs:
        _show(f"{run.arch} on {chosen.difficulty or chosen.task}, {preset}", run, gpus, machines)
    repeats = len(chosen.lrs) * chosen.seeds
    total = later.plan.cost([run for run in runs for _ in range(repeats)], machines.gpu, machines.mfu)
    rates = f"{len(chosen.lrs)} learning rates x {chosen.seeds} seeds"
    say(f"all {total.runs} runs, {rates} for each architecture")
    say(f"  {'tokens':<15} {total.tokens:,}")
    say(f"  {'FLOPs':<15} {total.flops:.3e}")
    say(f"  {'time':<15} {_duration(total.hours * later.plan.HOUR / later.plan.DAY / gpus)}")


def _plan_recipe(
    recipe: str, overrides: list[str], counts: list[int], machines: Machines, trust: bool, refused: list[str]
) -> None:
    try:
        path = later.recipes.find(recipe)
    except ValueError as error:
        if task := closest(recipe, later.tasks.names()):
            raise ValueError(f"{error} Or did you mean the task {shown(task[0])}?") from None
        raise
    if refused:
        raise ValueError(f"{refused[0]} only works with a task; KEY=VALUE changes a recipe, such as arch=gdn2")
    # Mistakes are reported before torch is loaded.
    loaded = later.load_config.Recipe(path, overrides, trust=trust, complete=started)
    load_torch()

    def check(run: "later.config.RunConfig") -> None:
        later.build.build_model(later.plan.with_vocabulary(run), "meta")

    with doing("reading the text and building the model"):
        run = later.plan.with_vocabulary(loaded.checked(check))
    if len(counts) == 1:
        _show(path.stem, run, counts[0], machines)
    else:
        _show_several(path.stem, run, counts, machines)


def _show_several(name: str, run: "later.config.RunConfig", counts: list[int], machines: Machines) -> None:
    """A row for each number of GPUs, or why it cannot be."""
    head = ("GPUs", "at a time", "memory", "sent a step", "sending", "computing", "days", "GPU hours")
    table = Table(*head, title=f"{name} on {machines.gpu}, {machines.mfu:.0%} of the peak", title_justify="left")
    refused = []
    for gpus in counts:
        many = f"{gpus:,} GPU{'s' * (gpus > 1)}"
        try:
            with doing(f"estimating {many}"):
                planned = later.plan.make_plan(run, gpus, *machines)
        except ValueError as error:
            refused.append(f"{many}: {error}")
            continue
        times = f" x {planned.accumulation:,}" if planned.accumulation > 1 else ""
        table.add_row(
            f"{gpus:,}", f"{planned.micro_batch:,}{times}", later.plan.readable(planned.memory.total),
            f"{planned.traffic.total / 1e9:,.1f} GB", f"{number(planned.sending)} s", f"{number(planned.computing)} s",
            f"{planned.days:,.1f}", f"{planned.days * 24 * gpus:,.0f}",
        )  # fmt: skip
    if table.row_count:
        Console(width=max(100, Console().width)).print(table)
        say("days: of computing or of sending, whichever takes longer: if both happen at the same time")
    for reason in refused:
        say(reason)
    if not table.row_count:
        raise ValueError(f"--gpus: none of {', '.join(map(str, counts))} is possible")


def _show(name: str, run: "later.config.RunConfig", gpus: int, machines: Machines) -> None:
    gpu, mfu = machines.gpu, machines.mfu
    with doing("estimating memory and FLOPs"):
        planned = later.plan.make_plan(run, gpus, *machines)
    train, parallel = run.train, run.parallel
    layout = [f"weights and optimizer over {planned.shards}"]
    layout += [f"in {parallel.dp_replicate} copies"] * (parallel.dp_replicate > 1)
    layout += [f"layers over {parallel.tp}"] * (parallel.tp > 1)
    layout += [f"windows over {parallel.cp}"] * (parallel.cp > 1)
    if isinstance(kept := parallel.activation_checkpointing, float):
        layout += [f"{kept:.0%} of activations kept"]
    layout += [f"{kept} recomputation"] * (kept in ("selective", "full"))
    times = f", {planned.accumulation:,} times" if planned.accumulation > 1 else ""
    steps = f"{train.steps:,} steps of {train.batch_size:,} windows of {run.data.seq_len:,}"
    rows = {
        "parameters": f"{planned.parameters:,}",
        "tokens": f"{planned.tokens:,}  ({steps})",
        "FLOPs": f"{planned.flops:.3e}  ({planned.flops_per_token:.3e} per token, forward and backward)",
        "state": _state(planned.state),
        "layout": ", ".join(layout),
        "windows": f"{planned.windows:,} per GPU, {planned.micro_batch:,} at a time" + times,
        "memory": f"{later.plan.readable(planned.memory.total)} of {later.plan.readable(planned.usable)} per GPU",
        **{f"  {part}": later.plan.readable(size) for part, size in asdict(planned.memory).items()},
        **_sent(planned, gpus),
        "time": f"{_duration(planned.days)} at {mfu:.0%} of {planned.peak / 1e12:,.0f} TFLOP/s",
    }
    if planned.only_projections:
        rows["FLOPs"] += "; of layers other than attention, projections and convolutions only"
    if planned.width:
        rows["slow width"] = planned.width
    say(f"{name} on {gpus:,} x {gpu}")
    for row, text in rows.items():
        say(f"  {row:<15} {text}")


def _sent(planned: "later.plan.Plan", gpus: int) -> dict[str, str]:
    if gpus == 1:
        return {}
    parts = {
        "weights": planned.traffic.gathers, "gradients": planned.traffic.reductions + planned.traffic.copies,
        "activations": planned.traffic.tensor_parallel + planned.traffic.context_parallel,
    }  # fmt: skip
    listed = ", ".join(f"{size / 1e9:,.2f} GB {kind}" for kind, size in parts.items() if size)
    together = f"{number(planned.computing)} s of computing a step, {number(planned.sending)} s of sending"
    return {"traffic": f"each GPU sends {listed} a step", "step": f"{together}: about the larger if they overlap"}


def _state(state: "later.state.State | None") -> str:
    if state is None:
        return "not known: the model returns no cache"
    sizes = {"fixed": state.fixed, "per token": state.per_token}
    parts = [f"{later.errors.readable(size)} {what}" for what, size in sizes.items() if size]
    return f"{later.errors.readable(state.total)} for a sequence of {state.tokens:,} tokens  ({', '.join(parts)})"


def _duration(days: float) -> str:
    for unit, per_day in (("days", 1), ("hours", 24), ("minutes", 24 * 60)):
        if days * per_day >= 1:
            return f"{days * per_day:,.1f} {unit}"
    return f"{days * 24 * 60 * 60:,.1f} seconds"
