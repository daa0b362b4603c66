"""`canonlm train`: one run, from its recipe."""

from pathlib import Path
from typing import Annotated

from canonlm.cli.options import OVERRIDES, RECIPE, RUN, TRUST_RECIPE
from canonlm.cli.status import doing, keep_going, load_torch, say
from canonlm.core.ranks import prints


def train(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    out: Annotated[Path | None, RUN] = None,
    trust: Annotated[bool, TRUST_RECIPE] = False,
) -> int:
    """Train one model, on a playground task or on text.

    For example: `canonlm train debug arch=gdn2+canon train.steps=100`

    Stop it at any time (Ctrl-C saves first); the same command continues where it stopped. For several devices start it
    with `canonlm launch` or torchrun.
    """
    from canonlm.launch.recipes import find
    from canonlm.train.load_config import check_trust, load
    from canonlm.train.signals import follow_parent

    follow_parent()
    keep_going()
    path = find(recipe)
    check_trust(path, overrides or [], trust)
    load(path, overrides or [], trust=trust)  # a mistake in the file is reported before torch is loaded
    load_torch()
    from canonlm.cli.live import follow
    from canonlm.train import data
    from canonlm.train.build import check
    from canonlm.train.loop import Interrupted
    from canonlm.train.loop import train as run_to_the_end
    from canonlm.train.machine import keep_freed_memory

    keep_freed_memory()
    with doing("reading the data and checking the model"):
        run = load(path, overrides or [], lambda run: check(data.complete(run)), trust=trust)
    folder = out or Path("runs") / path.stem
    try:
        with follow(run, folder) as on_row:
            result = run_to_the_end(run, folder, on_row)
        code, message = 0, f"finished: {result['steps']} steps, {result['tokens']} tokens"
    except Interrupted as error:
        code, message = 130, f"canonlm: {error}"
    if prints():
        say(message, flush=True)
    return code
