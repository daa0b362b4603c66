"""The tables of the page in the terminal, drawn with rich."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal

from rich.markup import escape as escape_rich
from rich.table import Table
from rich.text import Text

from canonlm.core.errors import plain
from canonlm.report import section as of_task
from canonlm.report import text_section as of_text
from canonlm.report.blocks import Block, Cell, table
from canonlm.report.evals import suite_tables
from canonlm.report.format import scale_words, score_label
from canonlm.report.play import Play
from canonlm.runs.load import MAX_UNFINISHED, LeftOut, in_short
from canonlm.runs.rows import is_slice
from canonlm.runs.summary import Architecture, adjusted, columns_of, compared_of, scales_of

MAX_SLICES = 4  # that have a column each; more have a table of their own, with a row each
MAX_NAME = 24  # letters of a name that stays in one line
STYLES = {"best": "bold", "aside": "dim"}


def best_table(
    architectures: Sequence[Architecture], title: str = "", chance: Mapping[str, float] | None = None
) -> Table:
    """One row per architecture at its best learning rate: accuracy per slice of the primary scale (of many slices,
    their mean) and every measure with its spread, size and speed. With `chance`, a last row has the scores of
    guessing, and significantly lower scores are marked."""
    shown, *notes = of_task.ranking(architectures, _columns(architectures), chance or {})
    return _drawn(title, shown, [*(note["note"] for note in notes), adjusted(architectures)])


def rate_table(architectures: Sequence[Architecture], title: str = "") -> Table:
    """One row per architecture and learning rate; the best of each is marked."""
    keys = [key for key in _columns(architectures) if key != architectures[0].score]
    label = score_label(architectures[0].task, architectures[0].score)
    return _drawn(title, of_task.by_rate(architectures, keys), [f"best: the highest {label}, averaged over seeds"])


def tables(play: Play) -> Iterator[Table | Text]:
    """Everything to print: per section the best rates, the answer and its limits, all rates; then what was left out."""
    for section in play.sections:
        title, architectures = f"\n{section.heading}", compared_of(section.architectures)
        yield best_table(architectures, title, section.chance)
        yield _concluded(of_task.answer(architectures), of_task.limits(architectures))
        scales = scales_of(architectures)
        for keys in scales[1 if scales and len(scales[0]) <= MAX_SLICES else 0 :]:
            shown = of_task.by_scale(architectures, keys, section.chance)
            yield _drawn(f"{title}: by {scale_words(section.task, keys[0]).by}", shown)
        if any(len(a.rates) > 1 for a in section.architectures):
            yield rate_table(section.architectures, f"{title}: every learning rate")
    for text in play.texts:
        for shown in (*of_text.scores_blocks(text)[:1], of_text.every_run(text, named=False)):
            yield _drawn(f"\n{text.heading}", shown)
        yield _concluded(of_text.answer(text), of_text.limits(text))
    for heading, _, head, rows in suite_tables(play.evaluated):
        yield _drawn(f"\n{heading}", table(head, rows, kind="models"))
    remarks = ((run.name, "; ".join([*([] if run.finished else [run.state]), *run.damage])) for run in play.runs)
    for entry in in_short((LeftOut(name, remark) for name, remark in remarks if remark), MAX_UNFINISHED):
        yield Text(plain(f"{entry.name}: {entry.reason}"), style="yellow")
    for entry in in_short(play.left_out):
        yield Text(plain(f"{entry.name}: left out, {entry.reason}"), style="yellow")


def _concluded(answer: str, limits: Sequence[str]) -> Text:
    return Text(plain(answer), "bold").append("".join(f"\n- {plain(limit)}" for limit in limits), "not bold")


def escape(text: str) -> str:
    """Text from a run, with markup escaped and without control characters for the terminal."""
    return escape_rich("\n".join(map(plain, text.split("\n"))))


def _columns(architectures: Sequence[Architecture]) -> list[str]:
    keys = columns_of(architectures)
    if sum(map(is_slice, keys)) <= MAX_SLICES:
        return keys
    return list(dict.fromkeys([architectures[0].score, *(key for key in keys if not is_slice(key))]))


def _drawn(title: str, block: Block, notes: Sequence[str] = ()) -> Table:
    """A table block of a page as a table of rich, with the notes below it."""
    head, rows, marks, kind = (block["table"][key] for key in ("head", "rows", "marks", "kind"))
    shown = Table(title=escape(title) or None, title_justify="left", title_style="bold", caption_justify="left")
    texts = 2 if kind == "models" else 1  # columns from the left without numbers
    short = not kind and all(len(_shown(row[0])) <= MAX_NAME for row in rows)
    for place, name in enumerate(head):  # the widest column is the first to be folded; no number is cut
        justify: Literal["left", "right"] = "left" if place < texts else "right"
        shown.add_column(escape(name), justify=justify, overflow="fold", no_wrap=short and place == 0)
    for row, mark in zip_longest(rows, marks, fillvalue=""):
        if mark == "aside":
            shown.add_section()
        shown.add_row(*map(_shown, row), style=STYLES.get(mark))
    shown.caption = "\n".join(escape(note) for note in notes if note) or None
    return shown


def _shown(cell: Cell) -> str:
    """A cell of the page, with its small print below."""
    text, small = (cell, "") if isinstance(cell, str) else (cell["text"], cell.get("small"))
    return escape(text) + (f"\n[dim]{escape(small)}[/dim]" if small else "")
