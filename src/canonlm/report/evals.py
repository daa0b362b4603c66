"""What `canonlm eval` found: `results.json` files in, tables out (shares in percent, with their standard errors)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape as escape_rich
from rich.table import Table

from .markup import escape
from .runs import DAMAGE, LeftOut
from .words import count_of, number, percent

SUITES = {
    "multihop": (
        "Birth years in a text",
        "Share of questions whose birth year was written exactly; <code>1hop-2k</code>: stated directly, behind 2,000 "
        "tokens of other text.",
    ),
    "babilong": (
        "Stories in a longer text",
        "Share of right answers; <code>babilong-qa1-2k</code>: the first kind of question, in 2,000 tokens.",
    ),
    "harness": ("Benchmarks", "Tasks of the lm-evaluation-harness, as it counts them."),
    "playground": ("Synthetic tasks", "Accuracy of the saved model; x1.5: beyond the length it was trained at."),
}


@dataclass(frozen=True)
class Evaluated:
    """One `results.json`: a model and its entries, the last of each suite and name."""

    label: str
    model: Mapping[str, Any]
    entries: Mapping[tuple[str, str], Mapping[str, Any]]


def load_evaluated(folder: str | Path) -> tuple[list[Evaluated], list[LeftOut]]:
    """All of a folder, its own and those of the runs in it, and what cannot be read."""
    found, left_out = [], []
    for path in sorted(Path(folder).rglob("results.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            entries = {(e["suite"], e["name"]): e for e in raw["results"] if _whole(e)}
            found.append(Evaluated(_label(path, Path(folder), raw["model"]), raw["model"], entries))
        except (*DAMAGE, OSError) as error:
            left_out.append(LeftOut(str(path.relative_to(folder)), f"not readable: {type(error).__name__}: {error}"))
    return found, left_out


def _whole(entry: Mapping[str, Any]) -> list[float]:
    """Its main numbers; an entry without them raises."""
    return [float(score["value"]) for score in entry["scores"] if not score["slice"]]


def _label(path: Path, folder: Path, model: Mapping[str, Any]) -> str:
    """The folder that the file is in, without what all have: `depo-llama+canon`, `step 300 of debug`."""
    parts = [part for part in path.parent.relative_to(folder).parts if part not in ("runs", "evals")]
    return "/".join(parts) or Path(str(model["source"])).name


def value(score: Mapping[str, Any]) -> str:
    """`93.0% ± 1.1`"""
    if not score["share"]:
        return number(score["value"])
    error = "" if score["stderr"] is None else f" ± {100 * score['stderr']:.1f}"
    return percent(score["value"]) + error


def rows(evaluated: Sequence[Evaluated], suite: str) -> list[tuple[str, str, list[str]]]:
    """(name, measure, value of each model or "–"): the first measure of a share, every other number too."""
    names = dict.fromkeys(name for one in evaluated for s, name in one.entries if s == suite)
    found = []
    for name in names:
        entries = [one.entries.get((suite, name)) for one in evaluated]
        measures = dict.fromkeys(s["measure"] for entry in entries if entry for s in entry["scores"] if not s["slice"])
        for measure in measures:
            cells = [next((value(s) for s in entry["scores"] if not s["slice"] and s["measure"] == measure), "–")
                     if entry else "–" for entry in entries]  # fmt: skip
            found.append((name, measure, cells))
    return found


def evals_tables(evaluated: Sequence[Evaluated]) -> Iterator[Table]:
    """For the terminal: a table per suite, a column per model."""
    for suite in dict.fromkeys(suite for one in evaluated for suite, _ in one.entries):
        here = [one for one in evaluated if any(s == suite for s, _ in one.entries)]
        table = Table(title=f"\n{SUITES.get(suite, (suite, ''))[0]}", title_justify="left", title_style="bold")
        table.add_column("asked")
        table.add_column("measure")
        for one in here:
            table.add_column(escape_rich(one.label), justify="right")
        for name, measure, cells in rows(here, suite):
            table.add_row(escape_rich(name), escape_rich(measure), *cells)
        yield table


def evals_html(evaluated: Sequence[Evaluated]) -> str:
    """For the page: a section per suite."""
    sections = []
    for suite in dict.fromkeys(suite for one in evaluated for suite, _ in one.entries):
        here = [one for one in evaluated if any(s == suite for s, _ in one.entries)]
        title, about = SUITES.get(suite, (escape(suite), ""))
        head = "".join(f"<th>{escape(one.label)}</th>" for one in here)
        body = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(measure)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
            for name, measure, cells in rows(here, suite)
        )
        sections.append(
            f"<section><h2>{title}</h2><p class=sub>{count_of(len(here), 'model')} · {about} ± is one standard error."
            f"</p><div class=scroll><table><thead><tr><th>asked</th><th>measure</th>{head}</tr></thead><tbody>{body}"
            "</tbody></table></div></section>"
        )
    return "\n".join(sections)
