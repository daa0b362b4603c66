"""Runs on one text, on the page and in the terminal: a table of losses, and losses over tokens.

There is no accuracy, because a text has no questions with one right answer.
"""

from collections.abc import Iterator, Sequence

from ..runs.text import TextRun, set_names, shape_of, tokens_of
from .blocks import Block, Cell, caveat, cell, chart, fold, table
from .charts import series_of
from .groups import families
from .play import TextSection
from .section import not_planned, settings_blocks
from .text_scores import answer, loss_columns, scores_blocks
from .words import count_of, short

MAX_POINTS = 20_000  # of training loss in a chart, shared among its runs
MIN_POINTS = 20
NO_BREAK = "\u00a0"  # a space at which `32.8 M` does not break
ABOUT = (
    "Each run reads text, token by token, and is measured on text that was held out: the loss is its mean "
    "cross-entropy in nats per token, and bits per byte is the same per byte of the text, which does not depend on the "
    "tokenizer. Lower is better."
)


def columns(runs: Sequence[TextRun]) -> list[str]:
    """`architecture, size, …, loss (hops), bits per byte (hops), …, state`"""
    return ["architecture", "size", "learning rate", "seed", "tokens", *loss_columns(runs), "training loss", "state"]


def rows(runs: Sequence[TextRun]) -> Iterator[list[tuple[str, str]]]:
    """The last numbers of each run, as cells of (text, remark); of an unfinished run the remark has the step."""
    names = set_names(runs)
    for run, arch in zip(runs, families(runs), strict=True):
        last = run.last
        early = f"at step {last.step:,}" if last and not run.finished else ""
        sets = [last.sets.get(name) if last else None for name in names]
        values = [value for one in sets for value in ((one.loss, one.bits_per_byte) if one else (None, None))]
        training = f"{run.train[-1].loss:.3f}" if run.train else "–"
        about = [arch, _size(run), f"{run.lr:g}", str(run.seed), short(run.tokens)]
        yield [
            *((text, "") for text in about),
            *(("–", "") if value is None else (f"{value:.3f}", early) for value in values),
            (training, ""),
            (run.state, ""),
        ]


def text_blocks(section: TextSection, number: int) -> list[Block]:
    """For the page. number: of the section, which the names of its charts end with."""
    runs = section.runs
    charts = [
        _chart(f"text-{number}-{place}", f"Loss on held-out text: {name}. A line per run.", "validation loss", runs,
               [_validation(run, name) for run in runs])
        for place, name in enumerate(set_names(runs))
    ]  # fmt: skip
    body: list[list[Cell]] = [
        [run.name, *(cell(text.replace(" ", NO_BREAK), remark) for text, remark in row[:-1]), row[-1][0]]
        for run, row in zip(runs, rows(runs), strict=True)
    ]
    max_points = max(MIN_POINTS, MAX_POINTS // len(runs))
    caption = "Loss on training batches, a line per run."
    training = [_training(run, max_points) for run in runs]
    losses = [_chart(f"text-loss-{number}", caption, "training loss", runs, training)] if any(training) else []
    every, ranking = table(["run", *columns(runs)], body), scores_blocks(section)
    return [
        {"answer": answer(section)},
        *(ranking[:1] or [every]),
        *charts[:1],
        *caveat(not_planned(runs)),
        *fold("Other charts", charts[1:]),
        *fold(f"Every run ({count_of(len(runs), 'run')})", [every] if ranking else []),
        *fold("Training loss", losses),
        *fold("Settings: what was equal, what differed", settings_blocks(runs)),
        *fold("How to read the numbers", [{"text": ABOUT}, *ranking[1:]]),
    ]


def _size(run: TextRun) -> str:
    """Parameters, which are known once a run has finished; before, the shape."""
    if run.result and run.result.num_parameters:
        return short(run.result.num_parameters)
    return shape_of(run.config) or "–"


Curve = list[tuple[int, float]]


def _validation(run: TextRun, name: str) -> Curve:
    points = [(tokens_of(run.config, row.step), row.sets[name].loss) for row in run.evals if name in row.sets]
    return [(tokens, loss) for tokens, loss in points if tokens is not None and loss is not None]


def _training(run: TextRun, max_points: int) -> Curve:
    thinned = run.train[:: max(1, -(-len(run.train) // max_points))]
    points = [(tokens_of(run.config, row.step), row.loss) for row in thinned if abs(row.loss) < float("inf")]
    return [(tokens, loss) for tokens, loss in points if tokens is not None]


def _chart(name: str, caption: str, title: str, runs: Sequence[TextRun], curves: Sequence[Curve]) -> Block:
    """Loss against tokens, a line per run. The axis is logarithmic: there, a loss that falls by the same share is a
    straight line."""
    series = [
        series_of("line", arch, curve, run=run.name, tip="%{x:,} tokens: loss %{y:.4g}",
                  hover=f"seed {run.seed}, learning rate {run.lr:g}\n{run.name}")
        for run, arch, curve in zip(runs, families(runs), curves, strict=True)
    ]  # fmt: skip
    panel = {"title": "", "x": {"title": "tokens", "format": "~s"}, "y": {"title": title, "log": True}}
    return chart(name, caption, {"height": 280, "panels": [panel], "series": series})
