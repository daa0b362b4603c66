"""The numbers alone: everything that was evaluated, as CSV and as the data inside the page."""

import csv
import io
from collections.abc import Iterator
from typing import Any

from .play import Play
from .runs import Evaluation, Run

CSV_COLUMNS = ("section", "run", "arch", "lr", "seed", "state", "row", "step", "slice", "correct", "total", "accuracy",
               "measure", "value", "parameters")  # fmt: skip


def numbers_csv(play: Play) -> str:
    """Every evaluation of every run, one line per slice and one per measure (`slice` to `accuracy` are empty there,
    `measure` and `value` elsewhere); `row` is `eval` during training or `final`."""
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for section in play.sections:
        for run in section.runs:
            size = run.result.num_parameters if run.result else None
            for kind, row in _rows(run):
                start = [section.heading, run.name, run.arch, run.lr, run.seed, run.state, kind, row.step]
                for key, count in row.slices.items():
                    writer.writerow([*start, key, count.correct, count.total, count.accuracy, "", "", size])
                for name, value in row.measures.items():
                    writer.writerow([*start, "", "", "", "", name, value, size])
    return sheet.getvalue()


def numbers_data(play: Play) -> dict[str, Any]:
    """The same for JSON."""
    sections = [
        {"heading": section.heading, "task": section.task, "runs": [_run(run) for run in section.runs]}
        for section in play.sections
    ]
    return {"title": play.title, "sections": sections}


def _rows(run: Run) -> Iterator[tuple[str, Evaluation]]:
    yield from (("eval", row) for row in run.evals)
    if run.result:
        yield "final", run.result.final


def _run(run: Run) -> dict[str, Any]:
    return {"name": run.name, "arch": run.arch, "lr": run.lr, "seed": run.seed, "state": run.state,
            "parameters": run.result.num_parameters if run.result else None,
            "evals": [_evaluation(row) for row in run.evals],
            "final": _evaluation(run.result.final) if run.result else None}  # fmt: skip


def _evaluation(row: Evaluation) -> dict[str, Any]:
    """`measures` only where there are any, so that the rows of other tasks read as they always did."""
    slices = {key: [count.correct, count.total] for key, count in row.slices.items()}
    return {"step": row.step, "slices": slices} | ({"measures": dict(row.measures)} if row.measures else {})
