"""One self-contained HTML page from a play folder: opens from disk, loads nothing, every number from the run folders.

Text from runs (names, settings, headings) goes through `html.escape`; JSON inside script elements has its `<` and `>`
written as escapes, so that no name can end the element.
"""

import base64
import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from . import template
from .charts import final_bars, learning_curves, looks, loss_curves
from .markup import bullets, cell, count_cell, escape, inert, row_head, share_cell, table
from .play import LeftOut, Play, Section, load_play
from .runs import Evaluation, Run
from .settings import Setting, settings, unplanned
from .summary import Architecture, differences, fairness, slices_of, summarise
from .words import TASKS, count_of, listed, percent, points, results_sentences, short, slice_label, verdict

CSV_COLUMNS = ("section", "run", "arch", "lr", "seed", "state", "row", "step", "slice", "correct", "total", "accuracy")
BEST = (
    "The learning rate of each architecture is the one with the highest final accuracy, averaged over question types "
    "and seeds, among the rates with the most finished runs. It is chosen on the evaluation shown here, for all alike."
)


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
    styles = looks([run.arch for run in runs])
    parts = [_header(play, runs)]
    parts += [_section(section, number, styles, figures) for number, section in enumerate(play.sections)]
    parts.append(_footer(play))
    data = {"title": play.title, "sections": [_section_data(section) for section in play.sections]}
    figure_text = "[" + ",".join(_figure_json(figure) for figure in figures) + "]"
    return template.page(
        escape(play.title), "\n".join(parts), get_plotlyjs(), inert(figure_text), inert(json.dumps(data))
    )


def numbers_csv(play: Play) -> str:
    """Every evaluation of every run, one line per slice; `row` is `eval` during training or `final`."""
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for section in play.sections:
        for run in section.runs:
            rows = [("eval", row) for row in run.evals] + ([("final", run.result.final)] if run.result else [])
            for kind, row in rows:
                for key, count in row.slices.items():
                    writer.writerow([section.heading, run.name, run.arch, run.lr, run.seed, run.state, kind, row.step,
                                     key, count.correct, count.total, count.accuracy])  # fmt: skip
    return sheet.getvalue()


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
    empty = "" if runs else "<p class=verdict>There is nothing to show yet: no run has recorded anything.</p>"
    return f"<header><h1>{escape(play.title)}</h1><p class=sub>{' · '.join(facts)}</p>{empty}</header>"


def _section(section: Section, number: int, styles: Any, figures: list[dict[str, Any]]) -> str:
    archs = summarise(section.runs)
    lead = section.text or TASKS.get(section.task, "")
    parts = [f"<h2>{escape(section.heading)}</h2>", f"<p>{escape(lead)}</p>" if lead else ""]
    saying = verdict(archs)
    if saying:
        parts.append(f"<p class=verdict>{escape(saying)}</p>")
    sentences = results_sentences(archs, section.chance)
    if any(a.best for a in archs):
        curves = [learning_curves(archs, section.chance, columns=columns, styles=styles) for columns in (4, 2)]
        caption = (
            "Share of evaluation questions answered correctly while training, each architecture at its best learning "
            "rate. Thin lines are single runs, bold lines their mean."
            + (" The dotted line is what guessing scores." if section.chance else "")
            + " Click a name to hide or show it in all panels."
        )
        parts.append(_chart(figures, f"curves-{number}", curves, caption, " ".join(["Learning curves.", *sentences])))
    parts.append((f"<p>{escape(sentences[0])}</p>" if sentences else "") + bullets(sentences[1:]))
    parts.append("<h3>Each architecture at its best learning rate</h3>" + _best_table(archs))
    parts.append(_differences(archs))
    if len(slices_of(archs)) > 1:  # a single bar per architecture says no more than the table
        bars = [final_bars(archs, section.chance, narrow=narrow, styles=styles) for narrow in (False, True)]
        caption = (
            "Accuracy at the end of training. Whiskers: smallest and largest run, or the 95% interval of a single run."
        )
        parts.append("<h3>Final accuracy</h3>" + _chart(figures, f"final-{number}", bars, caption, "Final accuracy."))
    notes = fairness(archs)
    if other := unplanned(section.runs):
        notes.append(f"The runs also differ in {listed(other)}: see the settings below.")
    if notes:
        parts.append("<h3>Before you conclude</h3>" + bullets(notes))
    if any(run.train for a in archs if a.best for run in a.best.runs):
        loss = [loss_curves(archs, narrow=narrow, styles=styles) for narrow in (False, True)]
        chart = _chart(figures, f"loss-{number}", loss, "Loss on training batches, best rates.", "Training loss.")
        parts.append(f"<details><summary>Training loss</summary>{chart}</details>")
    total = count_of(len(section.runs), "run")
    parts.append(
        f"<details><summary>Every learning rate, every run ({total})</summary>{_all_tables(archs, section)}</details>"
    )
    parts.append(
        f"<details><summary>Settings: what was equal, what differed</summary>{_settings(section.runs)}</details>"
    )
    return f"<section>{''.join(parts)}</section>"


def _best_table(archs: Sequence[Architecture]) -> str:
    keys = slices_of(archs)
    head = [
        "architecture",
        *(slice_label(archs[0].task, key) for key in keys),
        "learning rate",
        "runs",
        "parameters",
        "tokens/s",
    ]
    rows = []
    for a in archs:
        size = [cell(short(a.parameters)), cell(short(a.tokens_per_s))]
        if a.best is None:
            rows.append([row_head(a.arch), *[cell("–")] * (len(keys) + 1), cell("none finished"), *size])
        else:
            rows.append(
                [
                    row_head(a.arch),
                    *(share_cell(a.best.slices.get(key)) for key in keys),
                    cell(f"{a.best.lr:g}"),
                    cell(a.best.finished_of),
                    *size,
                ]
            )
    note = f"<p class=note>Small: smallest to largest run, or the 95% interval of a single run. {BEST}</p>"
    return table(head, rows) + note


def _differences(archs: Sequence[Architecture]) -> str:
    shown = [a for a in archs if a.best]
    if len(shown) < 2:
        return ""
    keys = slices_of(archs)
    found = [(a, {d.slice: d for d in differences(shown[0], a)}) for a in shown[1:]]
    if not any(gaps for _, gaps in found):
        return ""
    rows = []
    for a, gaps in found:
        cells = []
        for key in keys:
            gap = gaps.get(key)
            spread = f"{points(gap.low)} to {points(gap.high)}" if gap and gap.pairs > 1 else ""
            cells.append(cell(points(gap.mean), spread) if gap else cell("–"))
        pairs = max((gap.pairs for gap in gaps.values()), default=0)
        rows.append([row_head(f"{a.arch} − {shown[0].arch}"), *cells, cell(str(pairs))])
    head = ["difference in percentage points", *(slice_label(archs[0].task, key) for key in keys), "pairs"]
    note = "<p class=note>Runs with the same seed, each at its best rate. Small: smallest to largest pair.</p>"
    return "<h3>Paired by seed</h3>" + table(head, rows) + note


def _all_tables(archs: Sequence[Architecture], section: Section) -> str:
    keys = slices_of(archs)
    labels = [slice_label(section.task, key) for key in keys]
    rates = [
        [row_head(rate.arch), cell(f"{rate.lr:g}"), cell(rate.finished_of),
         *(share_cell(rate.slices.get(key)) for key in keys),
         cell("–" if rate.mean is None else percent(rate.mean) + (" (best)" if rate is a.best else ""))]
        for a in archs for rate in a.rates
    ]  # fmt: skip
    best = [rate is a.best for a in archs for rate in a.rates]
    runs = []
    for run in section.runs:
        row = run.result.final if run.result else run.evals[-1] if run.evals else None
        shares = [count_cell(row.slices.get(key) if row else None) for key in keys]
        runs.append([row_head(run.name), cell(run.arch), cell(f"{run.lr:g}"), cell(str(run.seed)), *shares,
                     cell(run.state)])  # fmt: skip
    return (
        "<h3>By learning rate</h3>" + table(["architecture", "learning rate", "runs", *labels, "mean"], rates, best)
        + "<h3>By run</h3>" + table(["run", "architecture", "learning rate", "seed", *labels, "state"], runs)
    )  # fmt: skip


def _settings(runs: Sequence[Run]) -> str:
    archs, equal, differing = settings(runs)
    rows = [[row_head(setting.label), *map(cell, setting.values)] for setting in differing]
    text = "<h3>Differed</h3>" + (table(["setting", *archs], rows, text=True) if rows else "<p>Nothing differed.</p>")
    main, rest = [s for s in equal if s.main], [s for s in equal if not s.main]
    return text + "<h3>Equal in all runs</h3>" + _pairs(main) + (f"<h3>Also equal</h3>{_pairs(rest)}" if rest else "")


def _pairs(found: Iterable[Setting]) -> str:
    return table(["setting", "value"], [[row_head(s.label), cell(s.values[0])] for s in found], text=True)


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


def _section_data(section: Section) -> dict[str, Any]:
    runs = [
        {"name": run.name, "arch": run.arch, "lr": run.lr, "seed": run.seed, "state": run.state,
         "evals": [_evaluation_data(row) for row in run.evals],
         "final": _evaluation_data(run.result.final) if run.result else None}
        for run in section.runs
    ]  # fmt: skip
    return {"heading": section.heading, "task": section.task, "runs": runs}


def _evaluation_data(row: Evaluation) -> dict[str, Any]:
    return {"step": row.step, "slices": {key: [count.correct, count.total] for key, count in row.slices.items()}}


def _chart(figures: list[dict[str, Any]], name: str, shapes: Sequence[go.Figure], caption: str, label: str) -> str:
    """`shapes`: the same traces laid out for a wide page and for a narrow one."""
    wide, narrow = shapes
    figures.append({"id": name, "wide": wide, "narrow": narrow})
    box = f'<div class=chart id="{name}" role="img" aria-label="{escape(label)}"></div>'
    return f"<figure>{box}<figcaption>{escape(caption)}</figcaption></figure>"


def _figure_json(figure: dict[str, Any]) -> str:
    wide, narrow = (json.loads(figure[size].to_json()) for size in ("wide", "narrow"))
    return json.dumps({"id": figure["id"], "data": wide["data"], "wide": wide["layout"], "narrow": narrow["layout"]})
