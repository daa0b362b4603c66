"""`canonlm results`: the published results, and yours beside them."""

import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import polars as pl
import typer
from rich.console import Console, RenderableType
from rich.table import Table

from canonlm.cli.options import Figures, write_to
from canonlm.cli.status import say, wide_console
from canonlm.core.errors import writing
from canonlm.experiments import published
from canonlm.experiments.published.benchmarks import DIFFICULTIES
from canonlm.experiments.published.runs import nothing_in, runs_curves, runs_frame
from canonlm.report import figures as figures_of_page
from canonlm.report import results_figures, results_page, results_payload
from canonlm.report import results_tables as tables
from canonlm.runs import table
from canonlm.runs.gather import gather
from canonlm.runs.load import MAX_UNFINISHED, LeftOut, in_short

GIVEN = typer.Argument(
    help="Folders of runs, or of results of `canonlm eval`, to put beside the published ones. Filters: arch=GLA5,GDN2, "
    "size=1B, tokens=1T, lr=0.002, canon=yes, source=reference, model=…, task=…",
    metavar="RUN | KEY=VALUE",
)
GROUP = typer.Option(
    help="Columns: short (default), standard, perplexity, retrieval, multihop, babilong, needle; or a task: depo, …",
    metavar="NAME",
)
PAIRED = typer.Option("--paired", help="What Canon layers change: each model with them, minus the same without.")
CURVES = typer.Option("--curves", help="Scores and losses during training, for --csv and --json.")
HTML = typer.Option(
    "--html", help="Write an interactive page: tables, curves, what Canon layers change.", metavar="FILE"
)
CSV = typer.Option(
    "--csv", help="Write one row per number instead of tables; - writes to the terminal.", metavar="FILE"
)
JSON = typer.Option("--json", help="Write the same as JSON.", metavar="FILE")


def results(
    given: Annotated[list[str] | None, GIVEN] = None,
    group: Annotated[str | None, GROUP] = None,
    paired: Annotated[bool, PAIRED] = False,
    curves: Annotated[bool, CURVES] = False,
    html: Annotated[Path | None, HTML] = None,
    csv: Annotated[str | None, CSV] = None,
    json: Annotated[str | None, JSON] = None,
    figures: Figures = None,
) -> int:
    """Show the published results of the 64 models, and your own beside them: as tables, as files, as a page.

    `canonlm results --html results.html` writes a page that opens in a browser, without a network. Tables show the
    models of the release and yours; others with `source=reference`, `source=best` (of the learning rates) or
    `source=paper`. Files have all sources.
    """
    folders, filters = _split(given or [])
    if curves and not (csv or json):
        raise ValueError("--curves only works with --csv or --json")
    if curves and paired:
        raise ValueError("--paired cannot be used with --curves")
    if csv == "-" and json == "-":
        raise ValueError("--csv and --json cannot both write to the terminal")
    if (html or figures) and (curves or paired or group):
        option = "--html" if html else "--figures"
        raise ValueError(f"{option} cannot be used with --curves, --paired or --group: the page has all of them")
    if figures is not None:
        figures_of_page.check()
    if html or figures:
        left_out = _page(folders, filters, html, figures)
        if not (csv or json):
            _print_left_out(left_out)
            return 0
    numbers, left_out = _read(folders, curves)
    kept = table.choose(numbers, filters)
    if group is not None:
        requested = [column for columns in tables.named(numbers, group).values() for column in columns]
        kept = tables.only(kept, requested)
    if csv or json:
        rows = table.paired(kept) if paired else kept
        for path, text in ((csv, partial(table.write_csv, rows)), (json, rows.write_json)):
            if path:
                write_to(path, text(), "--csv" if path is csv else "--json")
    else:
        _show(kept, group, paired, usual=not any(text.startswith("source=") for text in filters))
    _print_left_out(left_out)
    return 0


def _split(given: Iterable[str]) -> tuple[list[Path], list[str]]:
    folders, filters = [], []
    for text in given:
        if "=" in text and not os.path.exists(text):  # False for long names, too
            filters.append(text)
        else:
            folders.append(Path(text))
    return folders, filters


def _read(folders: list[Path], curves: bool) -> tuple[pl.DataFrame, list[LeftOut]]:
    published_rows = published.curves() if curves else published.everything()
    if not folders:
        return published_rows, []
    user_rows, left_out = (runs_curves if curves else runs_frame)(folders)
    if not len(user_rows):
        raise nothing_in(folders[0], left_out)
    return pl.concat([published_rows, user_rows]), left_out


def _page(folders: list[Path], filters: list[str], out: Path | None, figures: Path | None) -> Sequence[LeftOut]:
    shown = results_payload.beside_the_published(gather(folders), filters)
    if out is not None:
        with writing("--html", out, "file"):
            say(f"written: {results_page.write_results(shown, out)}")
    if figures is not None:
        figures_of_page.write_figures(results_figures.html(shown), figures)
        say(f"wrote figures, SVG and PDF: {figures}")
    return shown.left_out


def _show(numbers: pl.DataFrame, group: str | None, paired: bool, usual: bool) -> None:
    """Print the tables of a group. Without one: of all groups with numbers of the user, or else of the short group."""
    if paired:
        numbers = table.paired(numbers)
    user_numbers = numbers.filter(pl.col("source") == "yours")
    groups = tables.groups_of(user_numbers if len(user_numbers) else numbers)
    if group is not None:
        groups = tables.named(numbers, group) if len(numbers) else {}
    elif len(user_numbers):
        groups.pop("short", None)
    else:
        groups = {title: columns for title, columns in groups.items() if title == "short"}
    console = wide_console(highlight=False)
    for title, columns in groups.items():
        rows = tables.only(numbers, columns)
        rows = _default_rows(rows) if usual else rows
        if paired:
            for source in rows["source"].unique(maintain_order=True):  # means are over pairs of one source
                _print(console, tables.delta_tables(rows.filter(pl.col("source") == source), columns, console.width))
        else:
            heading = f"{title} (percent, except losses, bits and perplexities; ± one standard error)"
            _print(console, tables.score_tables(rows, columns, console.width, heading))
    if not groups:
        console.print("nothing: no results are left" + (", or no two that differ in Canon alone" if paired else ""))


def _default_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows of the release's models, the user's, and the paper's for synthetic tasks; all rows if there are none."""
    kept = rows.filter(pl.col("source").is_in(["published", "yours"]) | pl.col("task").is_in(list(DIFFICULTIES)))
    return kept if len(kept) else rows


def _print(console: Console, parts: Iterable[RenderableType]) -> None:
    part = None
    for part in parts:
        console.print(part)
        if isinstance(part, Table):
            console.print()
    if part is not None and not isinstance(part, Table):
        console.print()


def _print_left_out(left_out: Iterable[LeftOut]) -> None:
    """On standard error, so that --csv - stays a table."""
    for entry in in_short(left_out, MAX_UNFINISHED):
        say(f"{entry.name}: left out, {entry.reason}", file=sys.stderr)
