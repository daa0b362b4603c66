"""`canonlm data`: look at what models are trained on."""

from typing import Annotated

import typer

app = typer.Typer(help="Look at samples of a task.", no_args_is_help=True)

TASK = typer.Argument(help="A task; `canonlm tasks` lists them.", show_default=False)
SETTINGS = typer.Argument(help="Settings of the task, such as N=8 K=2.", show_default=False, metavar="[KEY=VALUE]...")
N = typer.Option("--n", help="How many samples.", min=1)
DIFFICULTY = typer.Option(help="A named difficulty, such as depo1-225.", show_default=False)
SPLIT = typer.Option(help="train (the training law) or test (the hardest cases).")
SEED = typer.Option(help="Samples are a function of seed, split and number.", min=0)

STYLES = {"marker": "dim", "context": "", "question": "bold cyan", "answer": "bold green"}


@app.command()
def show(
    task: Annotated[str, TASK],
    settings: Annotated[list[str] | None, SETTINGS] = None,
    n: Annotated[int, N] = 2,
    difficulty: Annotated[str | None, DIFFICULTY] = None,
    split: Annotated[str, SPLIT] = "train",
    seed: Annotated[int, SEED] = 0,
) -> int:
    """Print samples for people: context, questions and answers in colour.

    Without a difficulty or settings, the tiny preset's.
    """
    from rich.console import Console
    from rich.text import Text

    from canonlm import tasks
    from canonlm.recipes import load_preset
    from canonlm.train.config import override

    spec: dict = {}
    override(spec, settings or [])
    if difficulty is None and task in tasks.names():
        preset = {key: value for key, value in load_preset(task, "tiny").run["task"].items() if key != "name"}
        spec = {**preset, **spec}
    chosen = tasks.get(task, difficulty=difficulty, **spec)
    shown = [chosen.show(chosen.sample(split, seed, index)) for index in range(n)]
    console = Console()
    console.print(
        f"{chosen!r}, {split} law; {len(chosen.vocab)} tokens in the vocabulary", style="dim", highlight=False
    )
    for tokens in shown:
        text = Text()
        for name, role in tokens:
            text.append(name, STYLES[role]).append(" ")
        console.print(text, end="\n\n")
    console.print(
        Text("marker ", "dim").append("context ", "").append("question ", "bold cyan").append("answer", "bold green")
    )
    return 0
