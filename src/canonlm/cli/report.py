"""`canonlm report`: tables and a page from run folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import later
from canonlm.cli.live import follow_folders
from canonlm.cli.options import Figures
from canonlm.cli.status import doing, say, wide_console
from canonlm.core.errors import expected, writing
from canonlm.report import figures as figures_of_page
from canonlm.report import load_play
from canonlm.report.table import tables

FOLDERS = typer.Argument(
    help="Runs, folders of runs, play folders, or folders of results of `canonlm eval`.", metavar="RUN"
)
OUT = typer.Option(
    help="Where the page goes. Default: report.html in the folder; for several folders, in the current one."
)
TABLE = typer.Option("--table", help="Print the tables only; no page is written.")
WATCH = typer.Option("--watch", help="Follow runs until all have ended, then report.")


def report(
    folders: Annotated[list[Path], FOLDERS],
    out: Annotated[Path | None, OUT] = None,
    table: Annotated[bool, TABLE] = False,
    watch: Annotated[bool, WATCH] = False,
    figures: Figures = None,
) -> int:
    """Report runs: tables on the terminal, and one HTML page that needs no network.

    Runs from several folders stand side by side; those on one task with the same settings are compared. `--watch`
    shows a live table on a terminal, and a line for every evaluation in a log. Ctrl-C ends it with the report so far.
    """
    if table and out is not None:
        raise ValueError("--out cannot be used with --table, which writes no page")
    if figures is not None:
        if table:
            raise ValueError("--figures cannot be used with --table, which writes no page")
        figures_of_page.check()
    if out is not None and not out.parent.is_dir():
        raise expected("--out", "a file in a folder that exists", str(out))
    finished = True
    if watch:
        finished = follow_folders(folders, wide_console(120))
    show(folders, out, page=not table, figures=figures)
    return 0 if finished else 130


def show(
    folders: Path | Sequence[Path], out: Path | None = None, page: bool = True, figures: Path | None = None
) -> None:
    with doing("reading the runs"):
        play = load_play(folders)
    if page:  # before anything is printed: the reader of the tables may close the pipe
        place = later.page.place_of(folders, out)
        with doing("writing the page"), writing("--out", place, "file"):
            later.page.write_page(play, place)
            drawn = [] if figures is None else figures_of_page.write_figures(place.read_text("utf-8"), figures)
    console = wide_console(120)
    for table in tables(play):
        console.print(table)
        console.print()
    if page:
        say(f"report: {place}")
        if drawn:
            say(f"{len(drawn)} figures, SVG and PDF: {figures}")
