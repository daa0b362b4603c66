"""The predictions of a playground, as lines for a terminal and as a page."""

import math
from collections.abc import Sequence
from typing import Any

from canonlm.experiments.prediction import MIN_OF_INTERVAL, TEXT, Prediction, reliability
from canonlm.report.blocks import Block, Cell, chart, page, table
from canonlm.report.charts import Chart, series_of
from canonlm.report.theme import Look

TITLE = "Does a playground predict anything?"
LEAD = (
    "Spearman correlations over architectures, with 95 % intervals: the ranking in one place against that in another. "
    "Micro: our runs on two cores. Tasks without that word: the paper's cells. All else: the paper's text models, "
    "which have 1.3B parameters and saw 100B tokens. Architectures of a family are alike, so each interval counts more "
    "independent observations than there are."
)
FOREST = "Correlations, one line for each pair of places. Hover to see what is compared."
SCATTER = (
    "Only the {clear} of {all} pairs of places whose interval is above 0: a selection that looks better than all "
    "would. Each dot is an architecture; hover for its name."
)
CLEAR, OPEN = "interval above 0", "interval not above 0"
LOOKS = {CLEAR: Look("#009e73", "solid", "circle", ""), OPEN: Look("#666666", "solid", "circle-open", "")}


def lines_of(predictions: Sequence[Prediction]) -> list[str]:
    return [f"{each.predictor} → {each.outcome}: {said(each)}" for each in predictions]


def said(prediction: Prediction) -> str:
    """`0.94 [0.73, 0.99], 12 architectures; 41 of 46 pairs within families agree`"""
    text = f"{prediction.correlation:.2f}"
    if len(prediction.points) >= MIN_OF_INTERVAL:
        text += f" [{prediction.interval.low:.2f}, {prediction.interval.high:.2f}]"
    pairs = f"{prediction.agreeing} of {prediction.pairs} pairs within families agree"
    return f"{text}, {len(prediction.points)} architectures; {pairs}".replace("-", "−")


def html(predictions: Sequence[Prediction]) -> str:
    rows: list[list[Cell]] = [[each.predictor, each.outcome, said(each)] for each in predictions]
    noise = [f"{group}: {reliability(group):.2f}" for group in TEXT]
    shown = [each for each in predictions if not math.isnan(each.correlation)]
    clear = [each for each in shown if each.interval.low > 0]
    chosen = SCATTER.format(clear=len(clear), all=len(predictions))
    blocks: list[Block] = [
        {"note": LEAD},
        chart("correlations", FOREST, _forest(shown)),
        chart("rankings", chosen, _scatter(clear)),
        table(["from", "to", "correlation"], rows, kind="words"),
        {"note": "The share of the variance between text models that is not noise of seeds (eight seeds of one model): "
                 f"{'; '.join(noise)}."},
    ]  # fmt: skip
    return page(TITLE, [], blocks, LOOKS)


def _forest(predictions: Sequence[Prediction]) -> Chart:
    series = []
    places = {id(each): len(predictions) - place for place, each in enumerate(predictions)}
    for look in LOOKS:
        chosen = [each for each in predictions if (each.interval.low > 0) == (look == CLEAR)]
        points = [(each.correlation, places[id(each)]) for each in chosen]
        ends = {"low": [each.interval.low for each in chosen], "high": [each.interval.high for each in chosen]}
        hover = [f"{each.predictor} → {each.outcome}\n{said(each)}" for each in chosen]
        series.append(series_of("dots", look, points, across=True, hover=hover, **ends))
    zero = {"panel": 0, "kind": "level", "name": "no correlation", "x": [0, 0], "y": [0, len(predictions) + 1]}
    ticks = [(places[id(each)], f"{each.predictor} → {each.outcome}  ") for each in predictions]
    y = {"ticks": ticks, "even": True, "range": [0.2, len(predictions) + 0.8]}
    panel = {"title": "", "x": {"title": "correlation of ranks", "range": [-1, 1.05]}, "y": y}
    return {"height": 22 * len(predictions), "panels": [panel], "series": [zero, *series]}


def _scatter(predictions: Sequence[Prediction]) -> Chart:
    panels, series = [], []
    for place, each in enumerate(predictions):
        points = [(there, here) for _, there, here in each.points]
        texts = f"{each.predictor}: {{:.3g}}\n{each.outcome}: {{:.3g}}"
        hover = [f"{arch}\n{texts.format(there, here)}" for arch, there, here in each.points]
        series.append(series_of("dots", CLEAR, points, unnamed=True, hover=hover) | {"panel": place})
        panels.append(
            {"title": f"{each.predictor} → {each.outcome}", "x": _axis(each.predictor), "y": _axis(each.outcome)}
        )
    return {"columns": 3, "panels": panels, "series": series}


def _axis(place: str) -> dict[str, Any]:
    measure = "−1 × perplexity" if place == "Wikipedia" else "percent" if place in TEXT else "accuracy"
    return {"title": f"{place}: {measure}"} | ({"range": [-0.05, 1.05]} if measure == "accuracy" else {})
