"""What many runs will take, for the commands that can say so before they start anything."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canonlm.launch.play import PlannedRun


def show_cost(runs: "Sequence[PlannedRun]", gpu: str | None, mfu: float) -> None:
    """Print the number of runs, tokens, FLOPs and hours, of all and of what is left. Without a GPU's name: hours on
    this machine, whose speed is measured on a model of theirs."""
    from canonlm.launch.plan import HOUR, cost, measure_speed

    left = [run for run in runs if not (run.folder / "result.json").exists()]
    whole = cost([run.config for run in runs], gpu or "h100", mfu)
    rest = cost([run.config for run in left], gpu or "h100", mfu)
    print(f"  {'runs':<15} {whole.runs:,}, of which {whole.runs - rest.runs:,} are finished")
    for name, total, remaining in (("tokens", whole.tokens, rest.tokens), ("FLOPs", whole.flops, rest.flops)):
        print(f"  {name:<15} {total:.3e}, left {remaining:.3e}")
    if gpu is not None:
        print(f"  {'hours':<15} {rest.hours:,.1f} on one {gpu} at {mfu:.0%} of its peak, for what is left")
    elif left:
        speed = measure_speed([run.config for run in left])
        hours = f"{rest.flops / speed / HOUR:,.1f}"
        print(f"  {'hours':<15} {hours} on this machine, a run at a time ({speed / 1e9:,.1f} GFLOP/s measured)")
