"""The numbers of the page as tables in the terminal: the same cells, drawn with rich."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import OverflowMethod
from rich.markup import escape as escape_rich
from rich.table import Table
from rich.text import Text

from ..runs.intervals import wilson_interval
from ..runs.rows import is_slice, plain, primary
from ..runs.spread import Spread
from . import text_section
from .blocks import Cell, spread_cell
from .evals import suite_tables
from .play import Play
from .summary import Architecture, Rate, adjusted, columns_of, guesses_of, scales_of, summarise
from .text_scores import columns, score_cells, scores
from .words import count_of, percent, quantity, scale_words, score_label, short

MAX_SLICES = 4  # that have a column each; more have a table of their own, with a row each
Chance = Mapping[str, float]
"""The scores of guessing, by slice."""


def best_table(architectures: Sequence[Architecture], title: str = "", chance: Chance | None = None) -> Table:
    """One row per architecture at its best learning rate: accuracy per slice of the primary scale (of many slices,
    their mean) and every measure with its spread, size and speed. With `chance` a last row says what guessing scores,
    and what is significantly lower is marked."""
    keys = _columns(architectures)
    guesses = guesses_of(architectures, keys, chance or {})
    table = _table(title, [*_head(architectures, keys), "parameters", "tokens/s"])
    for a in architectures:
        size = (short(a.parameters), short(a.tokens_per_s))
        if a.best is None:
            unfinished = sum(rate.unfinished for rate in a.rates)
            table.add_row(escape(a.arch), "–", f"0 of {unfinished}", *("–" for _ in keys), *size)
        else:
            table.add_row(*_row(a.task, a.best, keys, guesses), *size)
    if guesses:
        cells = (percent(guesses[key]) if key in guesses else "" for key in keys)
        table.add_section()
        table.add_row("chance", "", "", *cells, "", "", style="dim")
    seeds = max((a.best.repeats for a in architectures if a.best), default=0)
    small = {0: "", 1: "", 2: "small: the values of both runs"}.get(seeds, "small: 95% interval over seeds")
    table.caption = "\n".join(filter(None, (small, escape(adjusted(architectures)))))
    return table


def rate_table(architectures: Sequence[Architecture], title: str = "") -> Table:
    """One row per architecture and learning rate; the best of each is marked."""
    keys = [key for key in _columns(architectures) if key != architectures[0].score]
    task, score = architectures[0].task, quantity(architectures[0].task, architectures[0].score)
    table = _table(title, [*_head(architectures, keys), score.label])
    for a in architectures:
        for rate in a.rates:
            mean = "–" if rate.mean is None else score.say(rate.mean)
            best = rate is a.best
            table.add_row(*_row(task, rate, keys), f"{mean} *" if best else mean, style="bold" if best else None)
        table.add_section()
    label = score_label(task, architectures[0].score)
    table.caption = f"* best rate: highest {label}, averaged over seeds"
    return table


def scale_table(
    architectures: Sequence[Architecture], keys: Sequence[str], title: str = "", chance: Chance | None = None
) -> Table:
    """Final accuracy on the slices of one scale, a row each, a column per architecture at its best rate, and one for
    what guessing scores."""
    guesses = guesses_of(architectures, keys, chance or {})
    task, bests = architectures[0].task, [a.best for a in architectures if a.best]
    counted = [f"{best.arch}\n{count_of(best.repeats, 'run')}" for best in bests]
    table = _table(title, [scale_words(task, keys[0]).by, *counted], wrap=True)
    if guesses:
        table.add_column("chance", justify="right", style="dim")
    for key in keys:
        cells = [_cell(task, best, key, guesses.get(key)) for best in bests]
        cells += [percent(guesses[key]) if key in guesses else ""] if guesses else []
        table.add_row(escape(quantity(task, key).label), *cells)
    return table


def tables(play: Play) -> Iterator[Table | Text]:
    """Everything to print: per section the best rates, then all rates, then what was left out."""
    for section in play.sections:
        architectures = summarise(section.runs)
        yield best_table(architectures, f"\n{section.heading}", section.chance)
        scales = scales_of(architectures)
        for keys in scales[1 if scales and len(scales[0]) <= MAX_SLICES else 0 :]:
            heading = f"\n{section.heading}: by {scale_words(section.task, keys[0]).by}"
            yield scale_table(architectures, keys, heading, section.chance)
        if any(len(a.rates) > 1 for a in architectures):
            yield rate_table(architectures, f"\n{section.heading}: every learning rate")
    for text in play.texts:
        if ranking := scores(text):
            of_columns = columns(text)
            cells = [score_cells(row, of_columns) for row in ranking]
            yield _filled(_table(f"\n{text.heading}", ["architecture", "lr", "runs", *of_columns]), cells)
        cells = [[f"{value} {remark}".strip() for value, remark in row] for row in text_section.rows(text.runs)]
        yield _filled(_table(f"\n{text.heading}", text_section.columns(text.runs)), cells)
    for title, _, head, rows in suite_tables(play.evaluated):
        yield _filled(_table(f"\n{title}", head, texts=2, wrap=True, overflow="fold"), rows)
    for run in play.runs:
        remarks = [run.state] if not run.finished else []
        remarks += [f"{count_of(run.damaged_rows, 'damaged row')} in metrics.jsonl"] if run.damaged_rows else []
        if remarks or run.notes:
            yield Text(plain(f"{run.name}: {'; '.join([*remarks, *run.notes])}"), style="yellow")
    for entry in play.left_out:
        yield Text(plain(f"{entry.name}: left out, {entry.reason}"), style="yellow")


def escape(text: str) -> str:
    """Text from a run, without its effect as markup, and without control characters for the terminal."""
    return escape_rich("\n".join(map(plain, text.split("\n"))))


def _columns(architectures: Sequence[Architecture]) -> list[str]:
    keys = columns_of(architectures)
    if sum(map(is_slice, keys)) <= MAX_SLICES:
        return keys
    measures = [key for key in keys if not is_slice(key)]
    return list(dict.fromkeys([architectures[0].score, *measures]))


def _head(architectures: Sequence[Architecture], keys: Sequence[str]) -> list[str]:
    return ["architecture", "lr", "runs", *(quantity(architectures[0].task, key).label for key in keys)]


def _table(
    title: str, head: Sequence[str], *, texts: int = 1, wrap: bool = False, overflow: OverflowMethod = "ellipsis"
) -> Table:
    """texts: that many columns from the left hold no numbers. wrap: whether they may break lines. overflow: what
    happens to a number that is wider than its column."""
    table = Table(title=escape(title) or None, title_justify="left", title_style="bold", caption_justify="left")
    for name in head[:texts]:
        table.add_column(escape(name), no_wrap=not wrap)
    for name in head[texts:]:
        table.add_column(escape(name), justify="right", overflow=overflow)
    return table


def _filled(table: Table, rows: Sequence[Sequence[Cell]]) -> Table:
    for row in rows:
        table.add_row(*map(_shown, row))
    return table


def _shown(cell: Cell) -> str:
    """A cell of the page, with its small print below."""
    text, small = (cell, "") if isinstance(cell, str) else (cell["text"], cell.get("small"))
    return escape(text) + (f"\n[dim]{escape(small)}[/dim]" if small else "")


def _row(task: str, rate: Rate, keys: Sequence[str], guesses: Chance | None = None) -> list[str]:
    cells = (_cell(task, rate, key, (guesses or {}).get(key)) for key in keys)
    return [escape(rate.arch), f"{rate.lr:g}", rate.finished_of, *cells]


def _cell(task: str, rate: Rate, key: str, guess: float | None = None) -> str:
    spread = rate.spread(key)
    below = spread and guess is not None and _is_below(spread, rate, [key] if key else primary(rate.slices), guess)
    shown = _shown(spread_cell(spread, quantity(task, key), rate.repeats))
    return f"{shown}\n[yellow]below chance[/yellow]" if below else shown


def _is_below(spread: Spread, rate: Rate, slices: Sequence[str], guess: float) -> bool:
    """Whether accuracy is significantly below that of guessing: by chance alone, half of all guessers are below it."""
    answers = len(rate.runs) * sum(map(rate.questions, slices))
    return wilson_interval(spread.mean, answers)[1] < guess
