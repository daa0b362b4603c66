"""`canonlm train`: one run, from its recipe."""

from pathlib import Path
from typing import Any

from canonlm.cli import later
from canonlm.cli.options import Overrides, Recipe, RunFolder, TrustRecipe, started
from canonlm.cli.status import doing, keep_going, load_torch, say
from canonlm.core.ranks import prints
from canonlm.train.signals import follow_parent


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    out: RunFolder = None,
    trust: TrustRecipe = False,
) -> int:
    """Train one model, on a playground task or on text.

    For example: `canonlm train debug arch=gdn2+canon train.steps=100`

    Stop it at any time (Ctrl-C saves first); the same command continues where it stopped. For several devices start it
    with `canonlm launch` or torchrun.
    """
    follow_parent()
    keep_going()
    run, folder = lay_out(recipe, overrides or [], out, trust)
    try:
        result = run_it(run, folder)
        code, message = 0, f"finished: {result['steps']} steps, {result['tokens']} tokens"
    except later.loop.Interrupted as error:
        code, message = 130, f"canonlm: {error}"
    if prints():
        say(message, flush=True)
    return code


def lay_out(recipe: str, overrides: list[str], out: Path | None, trust: bool) -> "tuple[later.config.RunConfig, Path]":
    """The run and its folder. InvalidSetting: it cannot be started."""
    path = later.recipes.find(recipe)
    # Mistakes are reported before torch is loaded.
    loaded = later.load_config.Recipe(path, overrides, trust=trust, trains=True, complete=started)
    load_torch()
    later.machine.keep_freed_memory()
    with doing("reading the data and checking the model"):
        run = loaded.checked(lambda run: later.build.check(later.train_data.complete(run)))
    return run, out or Path("runs") / path.stem


def run_it(run: "later.config.RunConfig", folder: Path) -> dict[str, Any]:
    """Train, and show progress; the contents of result.json."""
    with later.live.follow_run(run, folder) as on_row:
        return later.loop.train(run, folder, on_row)
