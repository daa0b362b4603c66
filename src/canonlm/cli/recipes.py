"""`canonlm recipes`: list, show and compare the recipes that come with the package."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from canonlm.cli.options import OVERRIDES, RECIPE
from canonlm.cli.status import doing, load_torch, say

app = typer.Typer(help="The recipes that come with the package.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List all recipes with their architectures and sizes."""
    load_torch()
    from canonlm.experiments.tidy import short_size
    from canonlm.launch.recipes import recipes
    from canonlm.train.build import build_model
    from canonlm.train.load_config import load

    columns = ("recipe", "architecture", "parameters", "tokens", "context", "batch", "lr")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for column in table.columns[2:]:
        column.justify = "right"
    parameters: dict[str, str] = {}
    with doing("counting parameters"):
        runs = {name: load(path) for name, path in recipes().items()}
        for run in runs.values():
            model = f"{run.arch} {run.model}"
            if run.model.vocab_size is None:
                parameters[model] = "by its data"  # its tokenizer sets the size of the vocabulary
            elif model not in parameters:
                parameters[model] = short_size(build_model(run, "meta").num_parameters) or "0"
    for name, run in runs.items():
        model, windows, seq_len = f"{run.arch} {run.model}", run.train.batch_size, run.data.seq_len
        tokens = short_size(run.train.steps * windows * seq_len)
        table.add_row(name, run.arch, parameters[model], tokens, str(seq_len), str(windows), f"{run.train.optim.lr:g}")
    # As wide as the terminal; elsewhere every recipe on one line.
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table, highlight=False)


@app.command()
def show(recipe: Annotated[str, RECIPE], overrides: Annotated[list[str] | None, OVERRIDES] = None) -> None:
    """Print the whole configuration of a recipe, as YAML that `canonlm train` takes."""
    from canonlm.launch.recipes import find
    from canonlm.train.load_config import load

    say(load(find(recipe), overrides or []).to_yaml(), end="")


@app.command()
def diff(left: Annotated[str, RECIPE], right: Annotated[str, RECIPE]) -> None:
    """Print the settings in which two recipes differ."""
    from canonlm.launch.recipes import find
    from canonlm.train.config import differences
    from canonlm.train.load_config import load

    changed = differences(*(load(find(name)) for name in (left, right)))
    if not changed:
        say("no difference")
        return
    width = max(len(key) for key, _, _ in changed)
    for key, a, b in changed:
        say(f"{key:<{width}}  {_value(a)} -> {_value(b)}")


def _value(value: Any) -> str:
    return "(not set)" if value is None else str(value)
