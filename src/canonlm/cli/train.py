"""`canonlm train`: one run, from its YAML file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from canonlm.cli.progress import scores

CONFIG = typer.Argument(help="The run's YAML file.", show_default=False)
OVERRIDES = typer.Argument(
    help="Settings to change, such as train.steps=100.", show_default=False, metavar="[KEY=VALUE]..."
)
OUT = typer.Option(help="The run's folder. Default: runs/ and the file's name.", show_default=False)


def train(
    config: Annotated[Path, CONFIG],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    out: Annotated[Path | None, OUT] = None,
) -> int:
    """Train one model from a YAML file.

    Stop it whenever you like (Ctrl-C saves first); the same command goes on where it stopped.
    """
    from canonlm.train.config import load

    load(config, overrides or [])  # a mistake in the file is told before torch is loaded
    from transformers.utils.logging import disable_progress_bar

    from canonlm.train.build import check
    from canonlm.train.loop import Interrupted
    from canonlm.train.loop import train as run_to_the_end

    disable_progress_bar()  # of transformers, which otherwise draws one for every checkpoint
    run = load(config, overrides or [], check)
    folder, task = out or Path("runs") / config.stem, run.task["name"]
    try:
        result = run_to_the_end(run, folder, on_row=lambda row: print(line(task, row), flush=True))
    except Interrupted as error:
        print(f"canonlm: {error}", flush=True)
        return 130
    print(f"finished: {result['steps']} steps, {result['tokens']} tokens", flush=True)
    return 0


def line(task: str, row: dict[str, Any]) -> str:
    """A row of `metrics.jsonl` for people."""
    if row["kind"] == "train":
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else ""
        return f"step {row['step']}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  {speed}".rstrip()
    return f"step {row['step']}  test loss {row['loss']:.4f}  {scores(task, row)}"
