"""`canonlm report`: tables and a page from run folders."""

from pathlib import Path
from typing import Annotated

import typer

FOLDER = typer.Argument(help="A play folder, or a folder of runs.", show_default=False)
OUT = typer.Option(help="Where the page goes. Default: report.html in the folder.", show_default=False)


def report(folder: Annotated[Path, FOLDER], out: Annotated[Path | None, OUT] = None) -> int:
    """Write the report of a play folder again: the tables here, and one HTML page that needs no network."""
    show(folder, out)
    return 0


def show(folder: Path, out: Path | None = None) -> None:
    from rich.console import Console

    from canonlm.errors import expected
    from canonlm.report import tables, write_report

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has no width of its own, and 80 columns would cut the table
    for table in tables(folder):
        console.print(table)
        console.print()
    try:
        written = write_report(folder, out)
    except OSError as error:
        raise expected("--out", f"a file that can be written ({error.strerror})", str(out or folder)) from None
    console.print(f"report: {written}", highlight=False, soft_wrap=True)
