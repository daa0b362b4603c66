"""The numbers alone: every evaluation, as CSV and as the data inside the page."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..runs.folder import Recorded
from ..runs.load import Run
from ..runs.rows import E, Evaluation
from ..runs.text import TextRun, tokens_of
from .play import Play
from .sheet import write_rows

CSV_COLUMNS = ("section", "run", "arch", "lr", "seed", "state", "row", "step", "slice", "correct", "total", "accuracy",
               "measure", "value", "parameters")  # fmt: skip


def numbers_csv(play: Play) -> str:
    """Every evaluation of every run, one line per slice and one per measure (`slice` to `accuracy` are empty there,
    `measure` and `value` elsewhere); `row` is `eval` during training or `final`. Of a run on text `slice` is the
    validation set."""
    rows: list[Sequence[Any]] = [CSV_COLUMNS]
    for section in play.sections:
        for run in section.runs:
            size = run.result.num_parameters if run.result else None
            for kind, row in _rows(run):
                start = [section.heading, run.name, run.arch, run.lr, run.seed, run.state, kind, row.step]
                for key, count in row.slices.items():
                    rows.append([*start, key, count.correct, count.total, count.accuracy, "", "", size])
                for name, value in row.measures.items():
                    rows.append([*start, "", "", "", "", name, value, size])
    for text in play.texts:
        for trained in text.runs:
            size = trained.result.num_parameters if trained.result else None
            about = [text.heading, trained.name, trained.arch, trained.lr, trained.seed, trained.state]
            for kind, evaluation in _rows(trained):
                for name, of_set in evaluation.sets.items():
                    for measure, number in (("loss", of_set.loss), ("bits_per_byte", of_set.bits_per_byte)):
                        if number is not None:
                            cells = [kind, evaluation.step, name, "", of_set.tokens, "", measure, number]
                            rows.append([*about, *cells, size])
    return write_rows(rows)


def numbers_data(play: Play) -> dict[str, Any]:
    """The same for JSON."""
    sections = [
        {"heading": section.heading, "task": section.task, "runs": [_run(run) for run in section.runs]}
        for section in play.sections
    ]
    texts = [
        {"heading": section.heading, "task": "text", "runs": [_text(run) for run in section.runs]}
        for section in play.texts
    ]
    return {"title": play.title, "sections": [*sections, *texts]}


def _rows(run: Recorded[E]) -> Iterator[tuple[str, E]]:
    yield from (("eval", row) for row in run.evals)
    if run.result:
        yield "final", run.result.final


def _text(run: TextRun) -> dict[str, Any]:
    evals = [
        {"step": row.step, "tokens": tokens_of(run.config, row.step), "loss": row.loss,
         "sets": {name: {"loss": one.loss, "bits_per_byte": one.bits_per_byte} for name, one in row.sets.items()}}
        for row in run.evals
    ]  # fmt: skip
    return _about(run) | {"evals": evals}


def _run(run: Run) -> dict[str, Any]:
    final = _evaluation(run.result.final) if run.result else None
    return _about(run) | {"evals": [_evaluation(row) for row in run.evals], "final": final}


def _about(run: Recorded[Any]) -> dict[str, Any]:
    return {"name": run.name, "arch": run.arch, "lr": run.lr, "seed": run.seed, "state": run.state,
            "parameters": run.result.num_parameters if run.result else None}  # fmt: skip


def _evaluation(row: Evaluation) -> dict[str, Any]:
    """`measures` only where there are any, so that rows of other tasks stay as they were."""
    slices = {key: [count.correct, count.total] for key, count in row.slices.items()}
    return {"step": row.step, "slices": slices} | ({"measures": dict(row.measures)} if row.measures else {})
