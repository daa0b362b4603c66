"""Options shared by several commands: those that open a saved model, and those that train one."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from canonlm.cli import completion
from canonlm.cli.status import doing, load_torch, say

if TYPE_CHECKING:
    from canonlm.suites.load_model import Subject

RECIPE = typer.Argument(
    help="A YAML file, or the name of a recipe (`canonlm recipes list`).",
    show_default=False,
    autocompletion=completion.recipes,
    metavar="RECIPE",
)
OVERRIDES = typer.Argument(help="Settings to change, such as train.steps=100.", show_default=False, metavar="KEY=VALUE")
RUN = typer.Option("--out", help="The run's folder. Default: runs/RECIPE.", show_default=False)
TRUST_RECIPE = typer.Option(
    "--trust", help="Run the on_checkpoint command and the Python files that somebody else's recipe names."
)
MODEL = typer.Argument(
    help="A run's folder, a folder of `canonlm export` or of transformers, a published checkpoint, or a name on the "
    "Hugging Face Hub.",
    show_default=False,
    metavar="MODEL",
)
STEP = typer.Option(
    help="Which checkpoint of a run, by its step. Default: the newest complete one.", show_default=False
)
VARIANT = typer.Option(help="Which sub-folder, if a published checkpoint has several.", show_default=False)
TOKENIZER = typer.Option(
    help="A file, a folder, a name on the Hub, or bytes. Default: the model's own.", show_default=False
)
DTYPE = typer.Option(help="fp32, bf16 or fp16. Default: as stored.", show_default=False)
DEVICE = typer.Option(help="auto, cpu, cuda, …")
TRUST_TASKS = typer.Option(
    "--trust", help="Run the functions and templates in somebody else's task files for the harness."
)
TRUST = typer.Option("--trust-remote-code", help="Run code that comes with the model.")
JSON = typer.Option(
    "--json", help="Write the same as JSON; - writes to the terminal instead.", metavar="FILE", show_default=False
)


def check_place(path: str | None, option: str) -> None:
    """Report a missing folder before the work, not after it."""
    from canonlm.core.errors import expected

    if path is not None and path != "-" and not Path(path).parent.is_dir():
        raise expected(option, "a file in a folder that exists", path)


def write_to(path: str, text: str, option: str) -> None:
    """Write a text to the file that an option names; - is the terminal."""
    from canonlm.core.errors import writing
    from canonlm.core.files import write_text

    if path == "-":
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        return
    with writing(option, path, "file"):
        write_text(Path(path), text)
    say(f"written: {path}")


@contextmanager
def writing_model(out: Path) -> Iterator[None]:
    """As `canonlm.core.errors.writing`, for OUT. safetensors raises its own error for a full disk."""
    from safetensors import SafetensorError

    from canonlm.core.errors import writing

    with writing("OUT", out):
        try:
            yield
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from None


def opened(model: str, **options: Any) -> "Subject":
    """Open the saved model of a command, from the options above, without the library's progress bars."""
    load_torch()
    from transformers.utils.logging import disable_progress_bar

    from canonlm.suites.load_model import open_model

    disable_progress_bar()
    with doing("loading the model"):
        return open_model(model, **options)
