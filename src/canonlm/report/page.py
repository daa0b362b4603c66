"""One self-contained HTML page from a play folder: opens from disk, loads nothing, every number from the run folders.

Text from runs (names, settings, headings) goes through `html.escape`; JSON inside script elements has its `<` and `>`
written as escapes, so that no name can end the element.
"""

import base64
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from . import template
from .evals import evals_html
from .markup import bullets, escape, inert
from .numbers import numbers_csv, numbers_data
from .play import LeftOut, Play, load_play
from .runs import Run
from .section import section_html
from .summary import summarise
from .theme import looks
from .words import count_of


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write `out` (by default `folder/report.html`) and return its path. Raises ValueError where there are no runs.

    The file appears in one piece: it is written beside its name first and renamed.
    """
    out = Path(out) if out is not None else Path(folder) / "report.html"
    text = render(load_play(folder))
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}-", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # a temporary file is private to its owner, a report is not
        os.replace(temporary, out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return out


def render(play: Play) -> str:
    """The page as text."""
    figures: list[dict[str, Any]] = []
    runs = [run for section in play.sections for run in section.runs]
    named = [a.arch for section in play.sections for a in summarise(section.runs)]
    styles = looks([*(run.arch for run in runs), *named])  # a family at several sizes has a look for each, and its own
    parts = [_header(play, runs)]
    parts += [section_html(section, number, styles, figures) for number, section in enumerate(play.sections)]
    parts += [evals_html(play.evaluated), _footer(play)]
    figure_text = "[" + ",".join(_figure_json(figure) for figure in figures) + "]"
    return template.page(
        escape(play.title), "\n".join(parts), get_plotlyjs(), inert(figure_text), inert(json.dumps(numbers_data(play)))
    )


def _header(play: Play, runs: Sequence[Run]) -> str:
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
    remarks = [LeftOut(run.name, "; ".join(_remarks(run))) for s in play.sections for run in s.runs if _remarks(run)]
    left_out = [f"{entry.name}: {entry.reason}" for entry in (*play.left_out, *remarks)]
    href = "data:text/csv;charset=utf-8;base64," + base64.b64encode(numbers_csv(play).encode()).decode()
    command = f"<pre>{escape(play.command)}</pre>" if play.command else (
        "<p>The command was not recorded; the <code>config.yaml</code> of each run holds all its settings.</p>"
    )  # fmt: skip
    return (
        f"<section><h2>Run it again</h2>{command}"
        f'<p class=screen><a download="report.csv" href="{href}">Download the numbers (CSV)</a></p>'
        f"<h3>What was left out</h3>{bullets(left_out) if left_out else '<p>Nothing.</p>'}"
        "<noscript><p>The charts need JavaScript; the tables hold the same numbers.</p></noscript></section>"
    )  # fmt: skip


def _remarks(run: Run) -> list[str]:
    state = [] if run.finished else [f"{run.state}, not in the averages"]
    damaged = [f"{count_of(run.damaged_rows, 'damaged row')} of metrics.jsonl skipped"] if run.damaged_rows else []
    return [*state, *damaged, *run.notes]


def _figure_json(figure: dict[str, Any]) -> str:
    wide, narrow = (json.loads(figure[size].to_json()) for size in ("wide", "narrow"))
    return json.dumps({"id": figure["id"], "data": wide["data"], "wide": wide["layout"], "narrow": narrow["layout"]})
