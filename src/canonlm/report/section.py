"""One comparison on the page: runs of one task, in words, charts and tables.

A task has no code of its own here. Its columns are the slices of its primary scale and its measures; every further
scale of slices has a chart and a table below.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go

from ..runs.rows import is_slice, primary
from .charts import final_chart, learning_curves, loss_curves, size_curves
from .groups import grouped, name_of
from .markup import bullets, cell, difference_cell, escape, row_head, spread_cell, table, value_cell
from .play import Section
from .runs import Run, TextRun
from .sentences import results_sentences, verdict
from .settings import Setting, settings, unplanned
from .summary import (
    Architecture,
    Difference,
    adjusted,
    at_most,
    columns_of,
    counterpart,
    differences,
    fairness,
    measures_of,
    scales_of,
    slices_of,
    summarise,
)
from .theme import Look
from .words import about_of, count_of, listed, quantity, scale_words, score_of, sentence, short

Figures = list[dict[str, Any]]
INTERVALS = (
    "95% t-intervals of the mean over runs with different seeds; where there is one run, or all score the same, 95% "
    "intervals by the number of answers (Wilson)"
)
NOTE = (
    "Small: {intervals}. Two runs have wide ones, as they should. The learning rate of each architecture is the one "
    "with the highest {score}, averaged over {averaged}, among the rates with the most finished runs. It is chosen on "
    "the evaluation shown here, for all alike."
)
GAPS = (
    "The mean of the differences between runs with the same seed, each architecture at its best rate; accuracies in "
    "percentage points. Small: its 95% t-interval; one pair has none, and pairs that are all equal have that of their "
    "answers (Newcombe). One architecture is said to beat the other only where the interval leaves out zero. Each "
    "interval is for one column: of twenty columns without any difference, one would seem to have one."
)


def section_html(section: Section, number: int, styles: Mapping[str, Look], figures: Figures) -> str:
    """The section as HTML; what its charts draw is appended to `figures`."""
    archs = summarise(section.runs)
    lead = section.text or about_of(section.task)
    parts = [f"<h2>{escape(section.heading)}</h2>", f"<p>{escape(lead)}</p>" if lead else ""]
    saying = verdict(archs)
    if saying:
        parts.append(f"<p class=verdict>{escape(saying)}</p>")
    parts.append(_pictures(archs, section, number, styles, figures))
    parts.append("<h3>Each architecture at its best learning rate</h3>" + _best_table(archs))
    parts.append(_differences(archs))
    for place, keys in enumerate(scales_of(archs)):
        if place == 0 and len(keys) == 1:
            continue  # a single bar per architecture says no more than the table above
        words = scale_words(section.task, keys[0])
        parts.append(f"<h3>Final accuracy by {escape(words.by)}</h3>")
        parts.append(f"<p>{escape(words.about)}</p>" if words.about else "")
        parts.append(_final(archs, keys, section, f"final-{number}-{place}", styles, figures))
        parts.append(_scale_table(archs, keys) if place else "")
    notes = fairness(archs)
    if other := unplanned(section.runs):
        notes.append(f"The runs also differ in {listed(other)}: see the settings below.")
    if notes:
        parts.append("<h3>Before you conclude</h3>" + bullets(notes))
    if any(run.train for a in archs if a.best for run in a.best.runs):
        loss = [loss_curves(archs, narrow=narrow, styles=styles) for narrow in (False, True)]
        chart = figure_html(figures, f"loss-{number}", loss, "Loss on training batches, best rates.", "Training loss.")
        parts.append(f"<details><summary>Training loss</summary>{chart}</details>")
    total = count_of(len(section.runs), "run")
    parts.append(
        f"<details><summary>Every learning rate, every run ({total})</summary>{_all_tables(archs, section)}</details>"
    )
    parts.append(
        f"<details><summary>Settings: what was equal, what differed</summary>{settings_html(section.runs)}</details>"
    )
    return f"<section>{''.join(parts)}</section>"


def _pictures(
    archs: Sequence[Architecture], section: Section, number: int, styles: Mapping[str, Look], figures: Figures
) -> str:
    """What happened while training and over model sizes, then the results in sentences."""
    sentences = results_sentences(archs, section.chance)
    said = " ".join(["Learning curves.", *sentences])
    parts = []
    measures = measures_of(archs)
    if slices := primary(slices_of(archs)):
        curves = [
            learning_curves(archs, slices, section.chance, narrow=narrow, styles=styles) for narrow in (False, True)
        ]
        alone = any(len(a.best.runs) == 1 for a in archs if a.best)
        caption = (
            f"{sentence(score_of(section.task).share)} while training, each architecture at its best learning "
            "rate. Thin lines are single runs, bold lines their mean."
            + (" Whiskers are the 95% interval of a single run by its number of answers." if alone else "")
            + (" The dotted line is what guessing scores." if section.chance else "")
            + " Click a name to hide or show it in all panels."
        )
        parts.append(figure_html(figures, f"curves-{number}", curves, caption, said))
    if measures:
        curves = [learning_curves(archs, measures, narrow=narrow, styles=styles) for narrow in (False, True)]
        about = [f"{sentence(q.label)}: {q.about}" for q in map(partial(quantity, section.task), measures) if q.about]
        if any(at_most(run, key) is not None for key in measures for a in archs if a.best for run in a.best.runs):
            about.append("The dashed line is the most there is to store; far above the curves it is left out.")
        chart = figure_html(figures, f"measures-{number}", curves, " ".join(about), said)
        parts.insert(0 if any(a.score for a in archs) else len(parts), chart)
    if any(a.arch != a.family for a in archs) and any(a.best and a.parameters for a in archs):
        sizes = [size_curves(archs, narrow=narrow, styles=styles) for narrow in (False, True)]
        label = quantity(section.task, archs[0].score).label
        caption = f"{sentence(label)} at the end of training, by model size, each at its best learning rate. "
        caption += "Whiskers: 95% t-intervals of the mean over runs with different seeds; one run has none. "
        caption += "Where they leave the chart, hovering tells how far they go."
        parts.insert(0, figure_html(figures, f"sizes-{number}", sizes, caption, caption))
    return "".join(parts) + (f"<p>{escape(sentences[0])}</p>" if sentences else "") + bullets(sentences[1:])


def _final(
    archs: Sequence[Architecture], keys: Sequence[str], section: Section, name: str, styles: Mapping[str, Look],
    figures: Figures,
) -> str:  # fmt: skip
    bars = [final_chart(archs, keys, section.chance, narrow=narrow, styles=styles) for narrow in (False, True)]
    caption = f"Accuracy at the end of training. Whiskers: {INTERVALS}."
    return figure_html(figures, name, bars, caption, "Final accuracy.")


def _best_table(archs: Sequence[Architecture]) -> str:
    keys = columns_of(archs)
    columns = [quantity(archs[0].task, key) for key in keys]
    head = ["architecture", *(column.label for column in columns), "learning rate", "runs", "parameters", "tokens/s"]
    rows, pairs = [], list(zip(keys, columns, strict=True))
    for a in archs:
        size = [cell(short(a.parameters)), cell(short(a.tokens_per_s))]
        if a.best is None:
            cells = [*[cell("–")] * (len(keys) + 1), cell("none finished")]
        else:
            cells = [spread_cell(a.best.spread(key), column, a.best.repeats) for key, column in pairs]
            cells += [cell(f"{a.best.lr:g}"), cell(a.best.finished_of)]
        rows.append([row_head(a.arch), *cells, *size])
    score, adjusting = archs[0].score, adjusted(archs)
    label = quantity(archs[0].task, score).label if score else "final accuracy"
    note = NOTE.format(intervals=INTERVALS, score=label, averaged="seeds" if score else "question types and seeds")
    told = f"<p class=note>{escape(adjusting)}</p>" if adjusting else ""
    return table(head, rows) + f"<p class=note>{escape(note)}</p>{told}"


def _gaps(archs: Sequence[Architecture]) -> list[tuple[str, dict[str, Difference]]]:
    """(what minus what, the differences by key): all other families against the first, at the nearest size."""
    shown = [a for a in archs if a.best]
    first = [a for a in shown if a.family == shown[0].family]
    pairs = [(a, counterpart(first, a)) for a in shown if a.family != shown[0].family]
    found = [(f"{a.arch} − {b.arch}", {gap.key: gap for gap in differences(b, a)}) for a, b in pairs]
    return found if any(gaps for _, gaps in found) else []


def _differences(archs: Sequence[Architecture]) -> str:
    found = _gaps(archs)
    if not found:
        return ""
    keys = columns_of(archs)
    columns = [quantity(archs[0].task, key) for key in keys]
    rows = []
    for title, gaps in found:
        pairs = _repeats(gaps)
        cells = [difference_cell(gaps.get(key), column, pairs) for key, column in zip(keys, columns, strict=True)]
        rows.append([row_head(title), *cells, cell(str(pairs))])
    head = ["difference", *(column.label for column in columns), "pairs"]
    return "<h3>Paired by seed</h3>" + table(head, rows) + f"<p class=note>{GAPS}</p>"


def _repeats(gaps: Mapping[str, Difference]) -> int:
    return max((gap.pairs for gap in gaps.values()), default=0)


def _scale_table(archs: Sequence[Architecture], keys: Sequence[str]) -> str:
    """A row per slice: scales count up through many values."""
    shown, gaps = [a.best for a in archs if a.best], _gaps(archs)
    columns = [quantity(archs[0].task, key) for key in keys]
    rows = [
        [row_head(column.label), *(spread_cell(best.spread(key), column, best.repeats) for best in shown),
         *(difference_cell(found.get(key), column, _repeats(found)) for _, found in gaps)]
        for key, column in zip(keys, columns, strict=True)
    ]  # fmt: skip
    ran = [f"{best.arch}, {count_of(best.repeats, 'run')}" for best in shown]
    paired = [f"{title}, {count_of(_repeats(found), 'pair')}" for title, found in gaps]
    head = [scale_words(archs[0].task, keys[0]).by, *ran, *paired]
    note = "<p class=note>Differences in percentage points, with intervals as above.</p>" if gaps else ""
    return table(head, rows) + note


def _all_tables(archs: Sequence[Architecture], section: Section) -> str:
    measures = [key for key in columns_of(archs) if not is_slice(key)]
    keys = [*measures, *slices_of(archs)]
    columns = [quantity(section.task, key) for key in keys]
    labels = [column.label for column in columns]
    score = quantity(section.task, archs[0].score)
    rates, best = [], []
    for a in archs:
        for rate in a.rates:
            best.append(rate is a.best)
            spreads = [
                spread_cell(rate.spread(key), column, rate.repeats) for key, column in zip(keys, columns, strict=True)
            ]
            reached = "–" if rate.mean is None else score.say(rate.mean)
            rates.append([row_head(rate.arch), cell(f"{rate.lr:g}"), cell(rate.finished_of), *spreads,
                          cell(f"{reached} (best)" if best[-1] else reached)])  # fmt: skip
    runs = []
    groups = grouped(section.runs)
    for run in section.runs:
        row = run.result.final if run.result else run.evals[-1] if run.evals else None
        values = [value_cell(row, key, column) for key, column in zip(keys, columns, strict=True)]
        runs.append([row_head(run.name), cell(name_of(groups, run)), cell(f"{run.lr:g}"), cell(str(run.seed)), *values,
                     cell(run.state)])  # fmt: skip
    return (
        "<h3>By learning rate</h3>"
        + table(["architecture", "learning rate", "runs", *labels, score.label], rates, best)
        + "<h3>By run</h3>" + table(["run", "architecture", "learning rate", "seed", *labels, "state"], runs)
    )  # fmt: skip


def settings_html(runs: Sequence[Run] | Sequence[TextRun]) -> str:
    archs, equal, differing = settings(runs)
    rows = [[row_head(setting.label), *map(cell, setting.values)] for setting in differing]
    text = "<h3>Differed</h3>" + (table(["setting", *archs], rows, text=True) if rows else "<p>Nothing differed.</p>")
    main, rest = [s for s in equal if s.main], [s for s in equal if not s.main]
    return text + "<h3>Equal in all runs</h3>" + _pairs(main) + (f"<h3>Also equal</h3>{_pairs(rest)}" if rest else "")


def _pairs(found: Iterable[Setting]) -> str:
    return table(["setting", "value"], [[row_head(s.label), cell(s.values[0])] for s in found], text=True)


def figure_html(figures: Figures, name: str, shapes: Sequence[go.Figure], caption: str, label: str) -> str:
    """A figure of the page. `shapes`: the same traces laid out for a wide page and for a narrow one."""
    wide, narrow = shapes
    figures.append({"id": name, "wide": wide, "narrow": narrow})
    box = f'<div class=chart id="{name}" role="img" aria-label="{escape(label)}"></div>'
    return f"<figure>{box}<figcaption>{escape(caption)}</figcaption></figure>"
