"""The cost of many runs, for commands that show it before they start anything."""

from collections.abc import Sequence

from canonlm.cli import later


def show_cost(runs: "Sequence[later.grid.PlannedRun]", gpu: str | None, mfu: float) -> None:
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
