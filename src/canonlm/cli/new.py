"""`canonlm new`: write a file to start from, and print the commands that run it."""

import shlex
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from canonlm.core.errors import expected, unknown, writing
from canonlm.core.files import create

TEMPLATES = Path(__file__).parent / "templates"


class Template(NamedTuple):
    file: str
    commands: tuple[str, ...]  # FILE is where the new file is


KINDS = {
    "task": Template("task.py", ("canonlm data show FILE:parity", "canonlm play FILE:parity --arch llama,gdn2")),
    "mixer": Template("mixer.py", ("canonlm check FILE:Fading", "canonlm play depo --arch llama,FILE:Fading")),
    "experiment": Template("experiment.yaml", ("canonlm replicate FILE --dry-run", "canonlm replicate FILE")),
}
KIND = typer.Argument(help="task, mixer or experiment.", metavar="KIND", autocompletion=lambda: list(KINDS))
FILE = typer.Argument(help="The file to write: NAME.py, or NAME.yaml for an experiment.", metavar="FILE")


def new(kind: Annotated[str, KIND], file: Annotated[Path, FILE]) -> int:
    """Write a small, complete file of your own to change: a task, a mixer, or an experiment.

    It runs as it is; the commands for that are printed.
    """
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    template = KINDS[kind]
    if file.suffix != (suffix := Path(template.file).suffix):
        raise expected("FILE", f"a name that ends in {suffix}", str(file))
    if kind == "mixer" and set(",+{") & set(str(file)):
        raise expected("FILE", "a path without , + {: they end a file's name in --arch", str(file))
    text = (TEMPLATES / template.file).read_text(encoding="utf-8")
    with writing("FILE", file, "file"):
        try:
            with create(file) as stream:  # never overwrites a file
                stream.write(text.encode())
        except FileExistsError:
            raise expected("FILE", "a file that does not exist yet", str(file)) from None
    print(f"{file} runs as it is; its comments say what to change:")
    for command in template.commands:
        print(f"  {shlex.join(word.replace('FILE', str(file)) for word in command.split())}")
    return 0
