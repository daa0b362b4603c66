"""One self-contained HTML page from folders of runs: opens from disk, loads nothing, every number from the run folders.

Text from runs (names, settings, headings) goes through `html.escape`; JSON inside script elements has its `<` and `>`
written as escapes, so that no name can end the element.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_text
from . import template
from .evals import evals_html
from .explorer import explorer, of_runs
from .gather import Folders, as_paths
from .groups import families
from .markup import bullets, escape, inert
from .numbers import numbers_csv, numbers_data
from .play import LeftOut, Play, load_play
from .runs import Run, TextRun
from .section import section_html
from .summary import summarise
from .text_section import text_html
from .theme import looks
from .words import count_of

LOOK_INTO = ("overview", "models", "grids", "settings")
"""Sections of the explorer; what a report draws itself, it leaves out."""


def write_report(folders: Folders, out: str | Path | None = None) -> Path:
    """Write the page of one folder or several and return its path: `out`, by default `report.html` in the folder, or in
    the current one where there are several. Raises ValueError for a folder without runs."""
    return write_page(load_play(folders), place_of(folders, out))


def place_of(folders: Folders, out: str | Path | None) -> Path:
    if out is not None:
        return Path(out)
    paths = as_paths(folders)
    return (paths[0] if len(paths) == 1 else Path()) / "report.html"


def write_page(play: Play, out: Path) -> Path:
    write_text(out, render(play).encode("utf-8", "replace").decode())  # a row may hold half a character
    return out


def render(play: Play) -> str:
    """The page as text."""
    figures: list[dict[str, Any]] = []
    archs = [a for section in play.sections for a in summarise(section.runs)]
    # A family at several sizes has a look for each, and its own.
    of_text = [name for section in play.texts for name in families(section.runs)]
    styles = looks([*(a.family for a in archs), *of_text, *(a.arch for a in archs)])
    parts = [_header(play, play.runs)]
    parts += [section_html(section, number, styles, figures) for number, section in enumerate(play.sections)]
    parts += [text_html(section, number, styles, figures) for number, section in enumerate(play.texts)]
    parts.append(evals_html(play.evaluated))
    figure_text = "[" + ",".join(_figure_json(figure) for figure in figures) + "]"
    data = {"report-data": inert(json.dumps(numbers_data(play))), "report-figures": inert(figure_text)}
    scripts, css = [template.script("figures")], ""
    shown = of_runs(play.gathered)
    if len(shown.numbers):
        looked_into, data["results-data"], script, css = explorer(shown, LOOK_INTO)
        parts.append(f"<div class=explorer><h2>Look into the numbers</h2>{looked_into}</div>")
        scripts.append(script)
    parts.append(_footer(play))
    return template.page(escape(play.title), "<main>\n" + "\n".join(parts) + "\n</main>", data, scripts, css)


def _header(play: Play, runs: Sequence[Run | TextRun]) -> str:
    finished = sum(run.finished for run in runs)
    archs, rates, seeds = (len({getattr(run, name) for run in runs}) for name in ("arch", "lr", "seed"))
    facts = [
        f"{count_of(finished, 'finished run')}",
        count_of(archs, "architecture"),
        count_of(rates, "learning rate"),
        count_of(seeds, "seed"),
    ]
    if len(runs) > finished:
        facts.insert(1, f"{len(runs) - finished} unfinished")
    if play.evaluated:
        facts.append(f"{count_of(len(play.evaluated), 'saved model')} asked")
    empty = (
        ""
        if runs or play.evaluated
        else "<p class=verdict>There is nothing to show yet: no run has recorded anything.</p>"
    )
    return f"<header><h1>{escape(play.title)}</h1><p class=sub>{' · '.join(facts)}</p>{empty}</header>"


def _footer(play: Play) -> str:
    remarks = [LeftOut(run.name, "; ".join(_remarks(run))) for run in play.runs if _remarks(run)]
    left_out = [f"{entry.name}: {entry.reason}" for entry in (*play.left_out, *remarks)]
    sheet = numbers_csv(play).encode("utf-8", "replace")
    href = "data:text/csv;charset=utf-8;base64," + base64.b64encode(sheet).decode()
    command = f"<pre>{escape(play.command)}</pre>" if play.command else (
        "<p>The command was not recorded; the <code>config.yaml</code> of each run holds all its settings.</p>"
    )  # fmt: skip
    return (
        f"<section><h2>Run it again</h2>{command}"
        f'<p class=screen><a download="report.csv" href="{href}">Download the numbers (CSV)</a></p>'
        f"<h3>What was left out</h3>{bullets(left_out) if left_out else '<p>Nothing.</p>'}"
        "<noscript><p>The charts need JavaScript; the tables hold the same numbers.</p></noscript></section>"
    )  # fmt: skip


def _remarks(run: Run | TextRun) -> list[str]:
    averaged = ", not in the averages" if isinstance(run, Run) else ""
    state = [] if run.finished else [f"{run.state}{averaged}"]
    damaged = [f"{count_of(run.damaged_rows, 'damaged row')} of metrics.jsonl skipped"] if run.damaged_rows else []
    return [*state, *damaged, *run.notes]


def _figure_json(figure: dict[str, Any]) -> str:
    wide, narrow = (json.loads(figure[size].to_json()) for size in ("wide", "narrow"))
    return json.dumps({"id": figure["id"], "data": wide["data"], "wide": wide["layout"], "narrow": narrow["layout"]})
