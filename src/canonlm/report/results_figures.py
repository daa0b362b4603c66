"""The charts of `canonlm results` as its page first shows them, for `--figures`.

The page draws them in the browser, from the same data and by its filters (`web/overview.js`, `curves.js`,
`compute.js`); a test in a browser compares the two.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canonlm.report.blocks import chart, page
from canonlm.report.charts import Chart, Series, level, series_of
from canonlm.report.results_page import TITLE
from canonlm.report.results_payload import Shown, model_looks, payload
from canonlm.runs.table import short_tokens

Rows = list[tuple[str, dict[str, Any], list[tuple[int, float]]]]  # label, question; of each pair: Canon model, gain
HIDDEN_AT_FIRST = ("reference", "best", "paper")
KINDS_OF_UNIT = ("percentage points", "more is better", "less is better, sign reversed")
MEAN: dict[str, Any] = {"sizes": 20, "style": {"symbol": "line-ns-open", "color": ["#d55e00"]}}


def html(shown: Shown) -> str:
    """A page of these charts alone, from which `figures.write_figures` takes them."""
    results = payload(shown)
    scores = results["scores"] or {"question": [], "model": [], "value": []}
    places = zip(scores["question"], scores["model"], strict=True)
    answers = dict(zip(places, scores["value"], strict=True))
    charts = [*_overviews(results, answers), *_curves(results), *_compute(results, answers)]
    return page(TITLE, [], [chart(name, "", of) for name, of in charts], model_looks(results["models"]))


def _overviews(results: Mapping[str, Any], answers: Mapping[tuple[int, int], float]) -> Iterator[tuple[str, Chart]]:
    """The changes by Canon layers, for each group of benchmarks: those of the user, or else the published ones."""
    for source in ("yours", "published", "best", "paper"):
        pairs = [pair for pair in results["pairs"] if results["models"][pair["base"]]["source"] == source]
        groups = {
            name: _gains(group, results["questions"], pairs, answers) for name, group in results["groups"].items()
        }
        if any(groups.values()):
            break
    for name, rows in groups.items():
        if rows:
            shown = list(filter(None, ([row for row in rows if _kind(row[1]) == kind] for kind in KINDS_OF_UNIT)))
            series = [one for place, part in enumerate(shown) for one in _points(part, place, results["models"])]
            yield f"overview-{name}", {"columns": 1, "panels": list(map(_panel, shown)), "series": series}


def _gains(
    group: Mapping[str, Any], questions: Sequence[Any], pairs: Sequence[Any], answers: Mapping[tuple[int, int], float]
) -> Rows:
    rows: Rows = []
    for q, label in zip(group["questions"], group["labels"], strict=True):
        sign = -1 if questions[q]["less"] else 1
        both = [pair for pair in pairs if (q, pair["base"]) in answers and (q, pair["canon"]) in answers]
        gains = [
            (pair["canon"], sign * round(answers[q, pair["canon"]] - answers[q, pair["base"]], 9)) for pair in both
        ]
        rows += [(label, questions[q], gains)] if gains else []
    return rows


def _kind(question: Mapping[str, Any]) -> str:
    return KINDS_OF_UNIT[0 if question["unit"] == "%" else 2 if question["less"] else 1]


def _scale(gains: Sequence[tuple[int, float]]) -> float:
    return max(abs(gain) for _, gain in gains) or 1


def _panel(part: Rows) -> dict[str, Any]:
    ends = [_written(_scale(gains), question) for _, question, gains in part]
    texts = [f"{label}\n−{end} to +{end}" for (label, *_), end in zip(part, ends, strict=True)]
    x = {"title": "← worse\u2003\u2003better with Canon layers →", "range": [-1.08, 1.08], "ticks": [[0, "0"]]}
    y = {"ticks": list(enumerate(texts)), "range": [len(part) - 0.5, -0.5], "even": True}
    return {"title": _kind(part[0][1]), "height": 38 * len(part), "x": x, "y": y}


def _points(part: Rows, panel: int, models: Sequence[Mapping[str, Any]]) -> Iterator[Series]:
    """A series for each architecture, and the means; each row on its own scale. Hollow: pairs that differ in more."""
    looks = model_looks(models)
    series: dict[str, Series] = {}
    means = []
    for place, (_, _, gains) in enumerate(part):
        for i, (canon, gain) in enumerate(gains):
            model = models[canon]
            name = f"{model['family']}{', differs in more than Canon' if model['mark'] else ''}"
            style = {"style": {"symbol": f"{looks[model['look']].symbol}-open"}} if model["mark"] else {}
            one = series.setdefault(name, series_of("dots", model["look"], [], panel=panel, **style) | {"name": name})
            one["x"].append(gain / _scale(gains))
            one["y"].append(place + 0.5 * ((i + 0.5) / len(gains) - 0.5))  # apart, so that equal ones are all visible
        means.append((statistics.mean(gain for _, gain in gains) / _scale(gains), place))
    yield from series.values()
    yield series_of("dots", "mean of the pairs", means, panel=panel, **MEAN)
    yield level("no difference", [0, 0], [-0.5, len(part) - 0.5], "", "solid", panel)


def _curves(results: Mapping[str, Any]) -> Iterator[tuple[str, Chart]]:
    """The score that the page shows first: a panel for each size, number of tokens and architecture."""
    models, questions = results["models"], results["questions"]
    places = [curve["question"] for curve in results["curves"]]
    order = sorted(dict.fromkeys(places), key=places.count, reverse=True)
    mine = (q for q in order if any(c["question"] == q and _is_mine(models[c["model"]]) for c in results["curves"]))
    usual = next((q for q in order if questions[q]["task"] == "hellaswag"), order[0] if order else None)
    chosen, hidden = next(mine, usual), _hidden(models)
    curves = [c for c in results["curves"] if c["question"] == chosen and models[c["model"]]["source"] not in hidden]
    panels: dict[str, int] = {}
    series = []
    families = list(dict.fromkeys(models[curve["model"]]["family"] for curve in curves))
    lengths = list(dict.fromkeys(_length(models[curve["model"]]) for curve in curves))
    place_of = {id(curve): (lengths.index(_length(model)), families.index(model["family"]))
                for curve in curves for model in [models[curve["model"]]]}  # fmt: skip
    for curve in sorted(curves, key=lambda curve: place_of[id(curve)]):
        model = models[curve["model"]]
        panel = panels.setdefault(f"{model['family']}, {_length(model)}", len(panels))
        points = list(zip(curve["tokens"], curve["values"], strict=True))
        series.append(series_of("line", model["look"], points, panel=panel) | {"name": _name(model)})
    if series:
        titled = {"x": {"title": "training tokens", "format": "~s"}, "y": {"title": questions[chosen]["full"]}}
        axes = [{"title": title, **titled} for title in panels]
        yield "curves", {"columns": max(3, len(families)), "panels": axes, "series": series}


def _compute(results: Mapping[str, Any], answers: Mapping[tuple[int, int], float]) -> Iterator[tuple[str, Chart]]:
    """Scores on the question with the most numbers against six operations for each parameter and token."""
    models = results["models"]
    sized = {i for i, of in enumerate(models) if of["parameters"] and of["tokens"] and of["source"] != "paper"}
    usable = [(q, i) for q, i in answers if i in sized]
    counts = Counter(q for q, _ in usable)
    grouped = [q for group in results["groups"].values() for q in group["questions"] if counts[q] > 2]
    if not grouped:
        return
    chosen, hidden = max(grouped, key=counts.__getitem__), set(_hidden(models)) - {"reference"}
    by_look: dict[str, list[tuple[float, float]]] = {}
    names = {}
    for q, i in usable:
        model = models[i]
        if q == chosen and model["source"] not in hidden and not model["mean"]:
            operations = 6 * model["parameters"] * model["tokens"]
            by_look.setdefault(model["look"], []).append((operations, answers[q, i]))
            names[model["look"]] = "others" if model["look"] == "other" else _name(model)
    series = [series_of("dots", look, points) | {"name": names[look]} for look, points in by_look.items()]
    x = {"title": "training operations: 6 × parameters × tokens", "log": True}
    panel = {"title": "", "x": x, "y": {"title": results["questions"][chosen]["full"]}}
    yield "compute", {"height": 360, "panels": [panel], "series": series}


def _hidden(models: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    return HIDDEN_AT_FIRST if any(model["source"] not in HIDDEN_AT_FIRST for model in models) else ()


def _is_mine(model: Mapping[str, Any]) -> bool:
    return bool(model["source"] == "yours")


def _length(model: Mapping[str, Any]) -> str:
    trained = "your runs" if _is_mine(model) else f"{short_tokens(model['tokens']) if model['tokens'] else '–'} tokens"
    return f"{model['size'] or 'size unknown'}, {trained}"


def _name(model: Mapping[str, Any]) -> str:
    return f"{model['family']} + Canon" if model["has_canon"] else model["family"]


def _written(value: float, question: Mapping[str, Any]) -> str:
    if question["unit"] == "%":
        return f"{value:.1f}"
    return f"{value:.2f}" if "perplexity" in question["metric"] else f"{value:.4g}"
