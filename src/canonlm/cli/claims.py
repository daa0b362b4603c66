"""`canonlm claims`: the paper's claims and the verdicts on them."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from canonlm.cli import completion, later
from canonlm.cli.options import Figures
from canonlm.cli.status import doing, load_torch, say
from canonlm.core.errors import expected, unknown, writing
from canonlm.core.files import write_text

CLAIM = typer.Argument(help="One claim in full, such as C06.", metavar="ID")
SCALE = typer.Option(help="Which runs judge the claims: micro, small or paper.", autocompletion=completion.scales)
RUNS = typer.Option(help="Folder of CSV files that `canonlm replicate --export` wrote. Default: our own runs.")
SEED_SET = typer.Option(help="The seeds of the runs, as in `canonlm replicate`.")
CHECK = typer.Option("--check-registration", help="Apply every registered comparison to the paper's own numbers.")
OUT = typer.Option(help="Write a page instead, to a file that ends in .html or .md.")


def claims(
    claim: Annotated[str | None, CLAIM] = None,
    scale: Annotated[str, SCALE] = "micro",
    runs: Annotated[Path | None, RUNS] = None,
    seed_set: Annotated[int, SEED_SET] = 0,
    out: Annotated[Path | None, OUT] = None,
    check_registration: Annotated[bool, CHECK] = False,
    figures: Figures = None,
) -> int:
    """Show the paper's claims and C51: supported (in part), contradicted, undecided or untested, and their runs.

    `canonlm replicate` trains the missing runs.
    """
    if figures is not None:
        later.figures.check()
    if out is not None and out.suffix not in (".html", ".md"):
        raise expected("--out", "a file that ends in .html or .md", str(out))
    if runs is not None and not any(runs.glob("*.csv")):
        raise expected("--runs", "a folder with CSV files of canonlm replicate --export", str(runs))
    if claim is not None and os.path.exists(claim):
        raise expected("ID", "a claim, such as C06 (--runs FOLDER shows the claims by your results)", claim)
    if check_registration:
        if any(option is not None for option in (claim, out, runs, figures)):
            raise ValueError("--check-registration checks all claims, and takes no other option")
        return _check_registration()
    load_torch()
    with doing("judging the claims"):
        entries = later.claims.claims(runs or later.ledger.OWN_RESULTS, scale, seed_set)
    if claim is not None:
        by_id = {each.id: each for each in entries}
        if claim.upper() not in by_id:
            raise unknown("claim", claim, by_id)
        entries = [by_id[claim.upper()]]
    if figures is not None:
        later.figures.write_figures(later.claims_page.html(entries), figures)
        say(f"wrote figures, SVG and PDF: {figures}")
    if out is not None:
        with writing("--out", out):
            page = later.claims_page.html if out.suffix == ".html" else later.claims_page.markdown
            write_text(out, page(entries))
        say(f"wrote {out}")
    elif claim is not None:
        say("\n".join(lines_of(entries[0])))
    else:
        _print_table(entries)
        say(later.claims.summary(entries))
        say(later.claims.after_all(entries))
    return 0


def _check_registration() -> int:
    """Print how many of the paper's cells pass each comparison; 1 if at most half pass one."""
    checks = later.registration.all_checks()
    table = Table("", "scale", "comparison", "task", "of the paper's cells", box=None, padding=(0, 2, 0, 0))
    for each in checks:
        if each.cells:
            wanted = f"{each.pair}: {each.pair.expect} by {each.pair.smallest:g}"
            table.add_row(each.claim, each.scale, wanted, each.task, f"{each.passed} of {each.cells}")
    Console().print(table)
    say(f"{sum(not each.cells for each in checks)} other comparisons are about numbers that the paper does not print.")
    failing = [each for each in checks if each.fails]
    for each in failing:
        say(f"refused: {each}")
    return 1 if failing else 0


def _print_table(entries: "list[later.claims.Claim]") -> None:
    table = Table("", "verdict", "claim", "estimate, 95 % interval", box=None, padding=(0, 2, 0, 0))
    for each in entries:
        estimates = [str(estimate) for estimate in each.estimates[:2]]
        more = len(each.estimates) - len(estimates)
        table.add_row(each.id, each.state, each.text, "\n".join([*estimates, *([f"{more} more"] if more else [])]))
    Console().print(table)


def lines_of(claim: "later.claims.Claim") -> list[str]:
    """A claim in full, as `canonlm replicate` prints it, too."""
    lines = [f"{claim.id}  {claim.state}", *filter(None, [claim.text])]
    lines += [f"The paper: {claim.paper}"] if claim.paper else []
    for each in claim.estimates:
        lines.append(f"  {each.what}: {each}" + (f"  ({note})" if (note := later.claims_page.note(each)) else ""))
    lines += [claim.reason] if claim.reason else []
    facts = later.claims_page.facts_of(claim)
    return [*lines, *([f"Evidence: {'; '.join([claim.source, *facts])}"] if claim.source else [])]
