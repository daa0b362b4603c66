"""The numbers alone: every evaluation, as CSV."""

from collections.abc import Iterator, Sequence
from typing import Any

from canonlm.report.play import Play
from canonlm.report.sheet import write_rows
from canonlm.runs.load import Run, TextRun
from canonlm.runs.rows import TextEvaluation

CSV_COLUMNS = ("section", "run", "arch", "lr", "seed", "state", "row", "step", "slice", "correct", "total", "accuracy",
               "measure", "value", "parameters")  # fmt: skip


def numbers_csv(play: Play) -> str:
    """Every evaluation of every run, one line per slice (`measure` and `value` are empty) and one per measure
    (`slice` to `accuracy` are empty); `row` is `eval` during training or `final`. For a run on text, `slice` is the
    validation set."""
    rows: list[Sequence[Any]] = [CSV_COLUMNS]
    for section in play.parts:
        for run in section.runs:
            size = run.result.num_parameters if run.result else None
            about = (section.heading, run.name, run.arch, run.lr, run.seed, run.state)
            rows += [(*about, *cells, size) for cells in _cells(run)]
    return write_rows(rows)


def _cells(run: Run | TextRun) -> Iterator[tuple[Any, ...]]:
    """The columns `row` to `value`."""
    final = [("final", run.result.final)] if run.result else []
    for kind, row in [*(("eval", row) for row in run.evals), *final]:
        if isinstance(row, TextEvaluation):
            for name, of_set in row.sets.items():
                for measure, value in (("loss", of_set.loss), ("bits_per_byte", of_set.bits_per_byte)):
                    if value is not None:
                        yield kind, row.step, name, "", of_set.tokens, "", measure, value
        else:
            for key, count in row.slices.items():
                yield kind, row.step, key, count.correct, count.total, count.accuracy, "", ""
            for name, value in row.measures.items():
                yield kind, row.step, "", "", "", "", name, value
