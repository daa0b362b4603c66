"""`canonlm plan`: what a run will take, before it is started."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from canonlm.cli.options import RECIPE, TRUST_RECIPE

if TYPE_CHECKING:
    from canonlm.train.config import RunConfig

OVERRIDES = typer.Argument(
    help="Settings to change, such as parallel.tp=2.", show_default=False, metavar="[KEY=VALUE]..."
)
GPUS = typer.Option(help="How many.")
GPU = typer.Option(help="Of what kind: a100-80, h100, h200, …")
MFU = typer.Option(help="The share of their peak that training will reach.")


def plan(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    gpus: Annotated[int, GPUS] = 8,
    gpu: Annotated[str, GPU] = "h100",
    mfu: Annotated[float, MFU] = 0.4,
    trust: Annotated[bool, TRUST_RECIPE] = False,
) -> None:
    """Tokens, FLOPs, memory per GPU, the largest micro-batch and the days that a run will take.

    Nothing is started, and no GPU has to be here; nor has the text, if the recipe says `model.vocab_size`. A run that
    cannot fit, or be divided so, is refused.
    """
    from canonlm.recipes import find
    from canonlm.train.recipe import load

    path = find(recipe)
    load(path, overrides or [], trust=trust)  # a mistake in the file is told before torch is loaded
    from canonlm.launch.plan import make_plan, readable, with_vocabulary
    from canonlm.train.build import build_model

    def check(run: "RunConfig") -> None:
        build_model(with_vocabulary(run), "meta")

    run = with_vocabulary(load(path, overrides or [], check, trust=trust))
    made = make_plan(run, gpus, gpu, mfu)
    train, parallel = run.train, run.parallel
    layout = [f"weights and optimizer over {made.shards}"]
    layout += [f"in {parallel.dp_replicate} copies"] * (parallel.dp_replicate > 1)
    layout += [f"layers over {parallel.tp}"] * (parallel.tp > 1)
    layout += [f"{parallel.activation_checkpointing} recomputation"] * (parallel.activation_checkpointing != "none")
    times = f", {made.accumulation:,} times" if made.accumulation > 1 else ""
    rows = {
        "parameters": f"{made.parameters:,}",
        "tokens": f"{made.tokens:,}  ({train.steps:,} steps of {train.batch_size:,} windows of {run.data.seq_len:,})",
        "FLOPs": f"{made.flops:.3e}  ({made.flops_per_token:.3e} per token, forward and backward)",
        "layout": ", ".join(layout),
        "windows": f"{made.windows:,} per GPU, {made.micro_batch:,} at a time" + times,
        "memory": f"{readable(made.memory.total)} of {readable(made.usable)} per GPU",
        **{f"  {part}": readable(size) for part, size in asdict(made.memory).items()},
        "time": f"{_duration(made.days)} at {mfu:.0%} of {made.peak / 1e12:,.0f} TFLOP/s",
    }
    print(f"{path.stem} on {gpus:,} x {gpu}")
    for name, text in rows.items():
        print(f"  {name:<15} {text}")


def _duration(days: float) -> str:
    for unit, much in (("days", 1), ("hours", 24), ("minutes", 24 * 60)):
        if days * much >= 1:
            return f"{days * much:,.1f} {unit}"
    return f"{days * 24 * 60 * 60:,.1f} seconds"
