"""`canonlm data multihop`: birth-year questions with their answers, as texts to train on."""

from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import later
from canonlm.cli.status import Count

OUT = typer.Argument(help="The file to write, such as hops.jsonl.", metavar="OUT")
SETTINGS = typer.Argument(help="Settings of the suite, such as k=2 people=3 background=200.", metavar="KEY=VALUE")
N = typer.Option("--n", help="How many texts.", min=1)
SPLIT = typer.Option(help="train, valid or test (the questions of `canonlm eval`).")
SEED = typer.Option(help="Texts are a function of settings, seed, split and index.", min=0)


def multihop(
    out: Annotated[Path, OUT],
    settings: Annotated[list[str] | None, SETTINGS] = None,
    n: Annotated[int, N] = 100_000,
    split: Annotated[str, SPLIT] = "train",
    seed: Annotated[int, SEED] = 0,
) -> int:
    """Write birth-year questions with their answers as lines {"text": …}, for `canonlm data prepare`.

    The questions are of the same kind as those of the evaluation suite multihop, from another split. Without a
    tokenizer, `background` counts words.
    """
    given: dict = {}
    for key in later.load_config.override(given, settings or []):
        if key in ("n", "seed"):
            raise ValueError(f"{key} is an option of this command: --{key} {given[key]}")
    chosen = later.multihop.MultiHopSettings(**given, n=n, seed=seed)
    questions = later.multihop.MultiHop(chosen, lambda text: len(text.split()), split)
    with Count(n, "written") as count:
        later.multihop.write_texts(questions, out, lambda done: count("written", done))
    print(f"{out}: {n:,} texts of {questions.name}, split {split}, seed {seed}")
    return 0
