"""`canonlm probe`: which nodes of the parse tree linear classifiers can read from a model's hidden states."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from canonlm.cli import later
from canonlm.cli.options import TrustModel
from canonlm.cli.status import doing, load_torch
from canonlm.core import user_code
from canonlm.core.errors import expected, writing
from canonlm.core.files import write_json
from canonlm.runs.folder import checkpoint_steps

RUN = typer.Argument(help="The folder of a Lano run, such as runs/lano-tiny/runs/….", metavar="RUN")
LAYER = typer.Option(help="0: the embeddings; 1, 2, …: after that block; -1: what the output head reads.")
FIT = typer.Option(help="Training sentences that the classifiers are fitted on.", min=2)
TEST = typer.Option(help="Test sentences that they are scored on.", min=2)


def probe(
    run: Annotated[Path, RUN],
    layer: Annotated[int, LAYER] = -1,
    fit: Annotated[int, FIT] = 200,
    test: Annotated[int, TEST] = 100,
    trust_remote_code: TrustModel = False,
) -> int:
    """Test whether a model has learned the rules of its grammar: read symbols and boundaries off its hidden states.

    For every level of the grammar, one linear classifier predicts from a token's hidden state which symbol the token
    belongs to, and another whether that symbol ends with it. Prints a table and writes RUN/probe.json.
    """
    if not (run / "config.yaml").is_file():
        raise expected("RUN", "a run folder (with a config.yaml)", str(run))
    with user_code.of_run(run, trust_remote_code):
        config = later.load_config.load(run / "config.yaml")
    if not isinstance(task := config.built_task, later.tasks.Lano):
        raise expected("RUN", "a run of lano, the task whose sentences have a parse tree", task and task.name)
    if not checkpoint_steps(run / "checkpoints"):
        raise expected("RUN", "a run that has saved a checkpoint", str(run))
    layers = config.model.num_hidden_layers
    if not -layers - 1 <= layer <= layers:
        raise expected("--layer", f"0 to {layers}, or -1 for the last", layer)

    load_torch()
    model = later.checkpoint.load_model(run, config=config, trust_remote_code=trust_remote_code).module
    model.to(later.build.pick_device("auto"))  # type: ignore[arg-type]  # the library's wrapper confuses the checker
    with doing("fitting classifiers"):
        levels = later.probe.probe(model, task, layer=layer, seed=config.train.seed, fit=fit, test=test)
    with writing("RUN", run):
        write_json(
            run / "probe.json", {"layer": layer, "fit": fit, "test": test, "levels": [asdict(x) for x in levels]}
        )
    table = Table("level", "symbols", "symbol", "(guess)", "symbol at its end", "(guess)", "boundary", "(guess)",
                  box=None, padding=(0, 2, 0, 0))  # fmt: skip
    for x in levels:
        shares = (x.symbol, x.symbol_guess, x.symbol_at_end, x.symbol_at_end_guess, x.boundary, x.boundary_guess)
        table.add_row(str(x.level), str(x.symbols), *(f"{share:.1%}" for share in shares))
    console = Console()
    console.print(f"{config.arch}, layer {layer}: share of test tokens that are right. Level 0 is the whole sentence; "
                  "the guess is always the most frequent answer", highlight=False, soft_wrap=True)  # fmt: skip
    console.print(table)
    return 0
