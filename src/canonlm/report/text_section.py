"""Runs on one text, on the page and in the terminal: a table of losses, and losses over tokens.

There is no accuracy, as nothing was asked that has one right answer.
"""

from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go
from rich.markup import escape as escape_rich
from rich.table import Table

from ..runs.rows import plain
from .groups import families
from .markup import bullets, cell, escape, row_head, table
from .play import TextSection
from .section import Figures, figure_html, settings_html
from .settings import unplanned
from .text import TextRun, set_names, shape_of, tokens_of
from .theme import Look, axis, layout, legend_rows, safe
from .words import listed, short

MOST_POINTS = 20_000  # of training loss in a chart, shared among its runs
LEAST_POINTS = 20
FEW_POINTS = 30  # of one curve; each has a marker then
NO_BREAK = "\u00a0"  # a space at which `32.8 M` does not break
ABOUT = (
    "Each run reads text, token by token, and is measured on text that was held out: the loss is its mean "
    "cross-entropy in nats per token, and bits per byte is the same per byte of the text, which does not depend on the "
    "tokenizer. Lower is better."
)


def columns(runs: Sequence[TextRun]) -> list[str]:
    """`architecture, size, …, loss (hops), bits per byte (hops), …, state`"""
    of_sets = [f"{what} ({name})" for name in set_names(runs) for what in ("loss", "bits per byte")]
    return ["architecture", "size", "learning rate", "seed", "tokens", *of_sets, "training loss", "state"]


def rows(runs: Sequence[TextRun]) -> Iterator[list[tuple[str, str]]]:
    """What a run reached last, cells of (text, remark); of one that has not finished, at which step that was."""
    names = set_names(runs)
    for run, arch in zip(runs, families(runs), strict=True):
        last = run.last
        early = f"at step {last.step:,}" if last and not run.finished else ""
        found = [last.sets.get(name) if last else None for name in names]
        values = [value for one in found for value in ((one.loss, one.bits_per_byte) if one else (None, None))]
        training = f"{run.train[-1].loss:.3f}" if run.train else "–"
        about = [arch, _size(run), f"{run.lr:g}", str(run.seed), short(run.tokens)]
        yield [
            *((text, "") for text in about),
            *(("–", "") if value is None else (f"{value:.3f}", early) for value in values),
            (training, ""),
            (run.state, ""),
        ]


def text_table(section: TextSection) -> Table:
    """For the terminal."""
    found = Table(title=f"\n{escape_rich(plain(section.heading))}", title_justify="left", title_style="bold")
    for place, name in enumerate(columns(section.runs)):
        found.add_column(escape_rich(plain(name)), justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in rows(section.runs):
        found.add_row(*(escape_rich(plain(f"{text} {remark}".strip())) for text, remark in row))
    return found


def text_html(section: TextSection, number: int, styles: Mapping[str, Look], figures: Figures) -> str:
    """For the page; what its charts draw is appended to `figures`."""
    runs = section.runs
    parts = [f"<h2>{escape(section.heading)}</h2><p>{escape(ABOUT)}</p>"]
    for place, name in enumerate(set_names(runs)):
        curves = [_validation(run, name) for run in runs]
        label = f"Loss on held-out text: {name}."
        shapes = _losses(runs, curves, "validation loss", styles)
        parts.append(figure_html(figures, f"text-{number}-{place}", shapes, f"{label} A line per run.", label))
    body = [
        [
            row_head(run.name),
            *(cell(text.replace(" ", NO_BREAK), remark) for text, remark in row[:-1]),
            cell(row[-1][0]),
        ]
        for run, row in zip(runs, rows(runs), strict=True)
    ]
    parts.append("<h3>Every run</h3>" + table(["run", *columns(runs)], body))
    if other := unplanned(runs):
        note = f"The runs also differ in {listed(other)}: see the settings below."
        parts.append("<h3>Before you conclude</h3>" + bullets([note]))
    if any(run.train for run in runs):
        most = max(LEAST_POINTS, MOST_POINTS // len(runs))
        curves = [_training(run, most) for run in runs]
        shapes = _losses(runs, curves, "training loss", styles)
        caption = "Loss on training batches, a line per run."
        drawn = figure_html(figures, f"text-loss-{number}", shapes, caption, "Training loss.")
        parts.append(f"<h3>Training loss</h3>{drawn}")
    parts.append(f"<details><summary>Settings: what was equal, what differed</summary>{settings_html(runs)}</details>")
    return f"<section>{''.join(parts)}</section>"


def _size(run: TextRun) -> str:
    """Parameters, which are known once a run has finished; before, the shape."""
    if run.result and run.result.num_parameters:
        return short(run.result.num_parameters)
    return shape_of(run.config) or "–"


Curve = list[tuple[int, float]]


def _validation(run: TextRun, name: str) -> Curve:
    found = [(tokens_of(run.config, row.step), row.sets[name].loss) for row in run.evals if name in row.sets]
    return [(tokens, loss) for tokens, loss in found if tokens is not None and loss is not None]


def _training(run: TextRun, most: int) -> Curve:
    thinned = run.train[:: max(1, -(-len(run.train) // most))]
    found = [(tokens_of(run.config, row.step), row.loss) for row in thinned if abs(row.loss) < float("inf")]
    return [(tokens, loss) for tokens, loss in found if tokens is not None]


def _losses(
    runs: Sequence[TextRun], curves: Sequence[Curve], title: str, styles: Mapping[str, Look]
) -> tuple[go.Figure, go.Figure]:
    """Loss against tokens, a line per run, for a wide page and (the layout alone) for a narrow one. The axis is
    logarithmic: there, a loss that falls by the same share is a straight line."""
    of_run = families(runs)
    archs = list(dict.fromkeys(of_run))
    few = max(map(len, curves), default=0) <= FEW_POINTS
    traces, named = [], set()
    for run, arch, curve in zip(runs, of_run, curves, strict=True):
        look = styles[arch]
        about = f"seed {run.seed}, learning rate {run.lr:g}<br>{safe(run.name)}"
        traces.append(go.Scatter(
            x=[tokens for tokens, _ in curve], y=[loss for _, loss in curve], mode="lines+markers" if few else "lines",
            line={"color": look.color, "width": 2, "dash": look.dash}, marker={"symbol": look.symbol, "size": 6},
            opacity=0.85, name=safe(arch), legendgroup=arch, showlegend=arch not in named, meta=run.name,
            hovertext=about, hovertemplate="<b>%{fullData.name}</b><br>%{x:,} tokens: loss %{y:.4g}<br>%{hovertext}"
            "<extra></extra>",
        ))  # fmt: skip
        named.add(arch)
    axes = {
        "xaxis": axis("tokens") | {"tickformat": "~s", "rangemode": "tozero", "domain": [0.0, 1.0]},
        "yaxis": axis(title) | {"type": "log", "tickformat": "~g", "nticks": 8},
    }
    wide, narrow = (layout(360, legend_rows(archs, small)) | axes for small in (False, True))
    return go.Figure(data=traces, layout=wide), go.Figure(layout=narrow)
