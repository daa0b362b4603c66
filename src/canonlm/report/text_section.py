"""Runs on one text, on the page and in the terminal: a table of losses, and losses over tokens.

There is no accuracy, because a text has no questions with one right answer.
"""

import math
from collections.abc import Sequence

from canonlm.report.blocks import Block, Cell, caveat, cell, chart, fold, table
from canonlm.report.charts import series_of
from canonlm.report.format import count_of
from canonlm.report.play import TextSection
from canonlm.report.section import not_planned, settings_blocks
from canonlm.report.text_scores import answer, best_rates, loss_columns, scores_blocks
from canonlm.runs.groups import by_run
from canonlm.runs.identity import short
from canonlm.runs.load import TextRun, set_names, shape_of, tokens_of

MAX_POINTS = 20_000  # of training loss in a chart, shared among its runs
MIN_POINTS = 20
Losses = Sequence[tuple[int, float | None]]
NO_BREAK = "\u00a0"  # a space at which `32.8 M` cannot break
ABOUT = (
    "Each run reads text, token by token, and is evaluated on held-out text: the loss is its mean "
    "cross-entropy in nats per token, and bits per byte is the same per byte of the text, which does not depend on the "
    "tokenizer. Lower is better."
)


def every_run(section: TextSection, *, named: bool = True) -> Block:
    """The last numbers of each run; for an unfinished run, with their step. named: with the names of the runs."""
    runs, group_of, names = section.runs, by_run(section.groups), set_names(section.runs)
    rows: list[list[Cell]] = []
    for run in runs:
        last = run.last
        early = f"at step {last.step:,}" if last and not run.finished else ""
        sets = [last.sets.get(name) if last else None for name in names]
        values = [value for one in sets for value in ((one.loss, one.bits_per_byte) if one else (None, None))]
        about = [group_of[run.name].family, _size(run), f"{run.lr:g}", str(run.seed), short(run.tokens)]
        rows.append([
            *([run.name] if named else []),
            *(text.replace(" ", NO_BREAK) if named else text for text in about),
            *("–" if value is None else cell(f"{value:.3f}", early) for value in values),
            f"{run.train[-1].loss:.3f}" if run.train else "–",
            run.state,
        ])  # fmt: skip
    about = ["architecture", "size", "learning rate", "seed", "tokens"]
    return table([*(["run"] if named else []), *about, *loss_columns(runs), "training loss", "state"], rows)


def text_blocks(section: TextSection, number: int) -> list[Block]:
    """For the page. number: of the section; the names of its charts end with it."""
    runs = section.runs
    charts = []
    for place, name in enumerate(set_names(runs)):
        caption = f"Loss on held-out text: {name}. A line per run."
        losses = [[(row.step, row.sets[name].loss) for row in run.evals if name in row.sets] for run in runs]
        charts.append(_chart(f"text-{number}-{place}", caption, "validation loss", section, losses))
    max_points = max(MIN_POINTS, MAX_POINTS // len(runs))
    caption = "Loss on training batches, a line per run."
    thinned = [run.train[:: max(1, -(-len(run.train) // max_points))] for run in runs]
    training = [[(row.step, row.loss) for row in few] for few in thinned]
    trained = _chart(f"text-loss-{number}", caption, "training loss", section, training)
    drawn = any(one["x"] for one in trained["chart"]["series"])
    rates = best_rates(section)
    every, ranking = every_run(section), scores_blocks(section, rates)
    return [
        {"answer": answer(section, rates)},
        *(ranking[:1] or [every]),
        *charts[:1],
        *caveat(not_planned(section.groups)),
        *fold("Other charts", charts[1:]),
        *fold(f"Every run ({count_of(len(runs), 'run')})", [every] if ranking else []),
        *fold("Training loss", [trained] if drawn else []),
        *fold("Settings: what was equal, what differed", settings_blocks(section.groups)),
        *fold("How to read the numbers", [{"text": ABOUT}, *ranking[1:]]),
    ]


def _size(run: TextRun) -> str:
    """The number of parameters of a finished run; the shape of an unfinished one."""
    if run.result and run.result.num_parameters:
        return short(run.result.num_parameters)
    return shape_of(run.config) or "–"


def _chart(name: str, caption: str, title: str, section: TextSection, losses: Sequence[Losses]) -> Block:
    """Loss against tokens, a line per run. losses: (step, loss) of each run. The loss axis is logarithmic, so that
    exponential decay is a straight line."""
    series, group_of = [], by_run(section.groups)
    for run, at_steps in zip(section.runs, losses, strict=True):
        curve = [(tokens_of(run.config, step), loss) for step, loss in at_steps]
        known = [(x, loss) for x, loss in curve if x is not None and loss is not None and math.isfinite(loss)]
        hover = f"seed {run.seed}, learning rate {run.lr:g}\n{run.name}"
        tip = "%{x:,} tokens: loss %{y:.4g}"
        series.append(series_of("line", group_of[run.name].family, known, run=run.name, tip=tip, hover=hover))
    panel = {"title": "", "x": {"title": "tokens", "format": "~s"}, "y": {"title": title, "log": True}}
    return chart(name, caption, {"height": 280, "panels": [panel], "series": series})
