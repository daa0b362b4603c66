"""Runs on one text, a row per architecture: losses and birth-year questions at its best learning rate, over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from canonlm.report.blocks import Block, Cell, spread_cell, table
from canonlm.report.format import Quantity, count_of, listed, percent, points
from canonlm.report.play import TextSection
from canonlm.report.sentences import of_choosing
from canonlm.runs.load import TextRun, set_names
from canonlm.runs.seed_statistics import Spread, best_rate, by_seed, spread_of

MAX_NAMED = 4
NOTE = (
    "Mean over seeds of the finished runs, each architecture at the learning rate with the lowest loss on all held-out "
    "text, among those with the most finished runs; it is chosen on the numbers shown here.{bias} 1hop-0k and "
    "similar: the share of birth years that a model finds in a short text. Small: 95% intervals, for three seeds or "
    "more."
)


@dataclass(frozen=True)
class TextScore:
    """One architecture at its best rate. `loss`: on all held-out text. `rates`: the number of rates with finished runs.
    `spreads`: by the names of `columns`, where there are numbers."""

    arch: str
    lr: float
    loss: float
    rates: int
    runs: int
    spreads: Mapping[str, Spread]


def loss_columns(runs: Sequence[TextRun]) -> list[str]:
    """`loss (hops)`, `bits per byte (hops)`, …"""
    return [f"{what} ({name})" for name in set_names(runs) for what in ("loss", "bits per byte")]


def columns(section: TextSection) -> dict[str, Quantity]:
    """The losses, then the birth-year questions of any run."""
    questions = dict.fromkeys(name for run in section.runs for name in section.years.get(run.name, {}))
    return {name: Quantity(name, say="{:.3f}".format) for name in loss_columns(section.runs)} | {
        name: Quantity(name, percent, points) for name in questions
    }


def best_rates(section: TextSection) -> list[TextScore]:
    """A row per architecture with a finished run, the lowest loss first."""
    rows = []
    for group in section.groups:
        rates: dict[float, list[TextRun]] = {}
        for run in group.runs:
            if run.finished and run.last and run.last.loss is not None:
                rates.setdefault(run.lr, []).append(run)
        if rates:
            best = best_rate({lr: (len(runs), -_loss(runs)) for lr, runs in rates.items()})
            loss, runs = _loss(rates[best]), len(rates[best])
            rows.append(TextScore(group.name, best, loss, len(rates), runs, _spreads(rates[best], section)))
    return sorted(rows, key=lambda row: row.loss)


def _adds_to_runs(section: TextSection, rows: Sequence[TextScore]) -> bool:
    """Whether the table of runs does not show the same: some architecture has several, or there are birth-year
    questions."""
    return sum(run.finished for run in section.runs) > len(rows) or any(section.years.values())


def _loss(runs: Sequence[TextRun]) -> float:
    return mean(run.last.loss for run in runs if run.last and run.last.loss is not None)


def _spreads(runs: Sequence[TextRun], section: TextSection) -> dict[str, Spread]:
    values: dict[str, list[tuple[int, float]]] = {}
    questions: dict[str, int] = {}
    for run in runs:
        for name, one in (run.last.sets if run.last else {}).items():
            for measure, value in (("loss", one.loss), ("bits per byte", one.bits_per_byte)):
                if value is not None:
                    values.setdefault(f"{measure} ({name})", []).append((run.seed, value))
        for name, (share, count) in section.years.get(run.name, {}).items():
            values.setdefault(name, []).append((run.seed, share))
            questions[name] = min(count, questions.get(name, count))
    return {name: spread_of([*by_seed(each).values()], questions.get(name)) for name, each in values.items()}


def score_cells(row: TextScore, columns: Mapping[str, Quantity]) -> list[Cell]:
    """Architecture, learning rate and runs, then the columns."""
    spreads = (spread_cell(row.spreads.get(name), quantity, row.runs) for name, quantity in columns.items())
    return [row.arch, f"{row.lr:g}", str(row.runs), *spreads]


def scores_blocks(section: TextSection, ranked: Sequence[TextScore]) -> list[Block]:
    """For the page: the table, then how to read it; nothing if no run has finished, or the runs show the same."""
    quantities = columns(section)
    if not ranked or not _adds_to_runs(section, ranked):
        return []
    note = NOTE.format(bias=of_choosing(max(row.rates for row in ranked)))
    marks = ["best"] if len({row.loss for row in ranked}) > 1 else []
    rows = [score_cells(row, quantities) for row in ranked]
    return [table(["architecture", "learning rate", "runs", *quantities], rows, marks), {"text": note}]


def answer(section: TextSection, ranked: Sequence[TextScore]) -> str:
    """A sentence on the architecture with the lowest loss."""
    if not ranked:
        return "No run has finished yet."
    losses = listed([f"{row.arch} {row.loss:.3f} ({count_of(row.runs, 'run')})" for row in ranked[:MAX_NAMED]])
    if len(ranked) == 1:
        return f"Loss on held-out text: {losses}."
    certainty = (
        "the intervals below show how sure that is" if _adds_to_runs(section, ranked) else "single runs prove nothing"
    )
    return f"{ranked[0].arch} has the lowest loss on held-out text: {losses}; {certainty}."
