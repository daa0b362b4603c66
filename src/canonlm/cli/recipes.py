"""`canonlm recipes`: list, show and compare the recipes that come with the package."""

from typing import Any

from rich.table import Table

from canonlm.cli import later
from canonlm.cli.options import Overrides, Recipe
from canonlm.cli.status import doing, load_torch, say, wide_console
from canonlm.runs.identity import short_size


def list_() -> None:
    """List all recipes with their architectures and sizes."""
    load_torch()
    columns = ("recipe", "architecture", "parameters", "tokens", "context", "batch", "lr")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for column in table.columns[2:]:
        column.justify = "right"
    parameters: dict[str, str] = {}
    with doing("counting parameters"):
        runs = {name: later.load_config.load(path) for name, path in later.recipes.recipes().items()}
        for run in runs.values():
            model = f"{run.arch} {run.model}"
            if run.model.vocab_size is None:
                parameters[model] = "by its data"  # its tokenizer sets the size of the vocabulary
            elif model not in parameters:
                parameters[model] = short_size(later.build.build_model(run, "meta").num_parameters) or "0"
    for name, run in runs.items():
        model, windows, seq_len = f"{run.arch} {run.model}", run.train.batch_size, run.data.seq_len
        tokens = short_size(run.train.steps * windows * seq_len)
        table.add_row(name, run.arch, parameters[model], tokens, str(seq_len), str(windows), f"{run.train.optim.lr:g}")
    wide_console().print(table, highlight=False)


def show(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print the whole configuration of a recipe, as YAML that `canonlm train` takes."""
    say(later.load_config.load(later.recipes.find(recipe), overrides or []).to_yaml(), end="")


def diff(left: Recipe, right: Recipe) -> None:
    """Print the settings in which two recipes differ."""
    changed = later.config.differences(*(later.load_config.load(later.recipes.find(name)) for name in (left, right)))
    if not changed:
        say("no difference")
        return
    width = max(len(key) for key, _, _ in changed)
    for key, a, b in changed:
        say(f"{key:<{width}}  {_value(a)} -> {_value(b)}")


def _value(value: Any) -> str:
    return "(not set)" if value is None else str(value)
