"""Runs on one text, on the page and in the terminal: losses and birth-year questions, in a table and over tokens.

There is no accuracy, because a text has no questions with one right answer.
"""

import math
from collections.abc import Sequence

from canonlm.report.blocks import Block, Cell, caveat, cell, chart, fold, spread_cell, state_cell, table
from canonlm.report.charts import series_of, steps_axis
from canonlm.report.format import Quantity, count_of, listed, percent, points
from canonlm.report.play import Section
from canonlm.report.section import not_planned, settings_blocks
from canonlm.report.sentences import of_choosing, selection, unfinished
from canonlm.runs.groups import by_run
from canonlm.runs.identity import short
from canonlm.runs.load import Run, shape_of, tokens_of
from canonlm.runs.rows import OF_A_SET, Evaluation, of_set
from canonlm.runs.seed_statistics import Spread, by_seed, spread_of
from canonlm.runs.summary import Rate, fairness

MAX_POINTS = 20_000  # of training loss in a chart, shared among its runs
MIN_POINTS = 20
MAX_NAMED = 4
Losses = Sequence[tuple[int, float | None]]
NO_BREAK = "\u00a0"  # a space at which `32.8 M` cannot break
ABOUT = (
    "Each run reads text, token by token, and is evaluated on held-out text: the loss is its mean "
    "cross-entropy in nats per token, and bits per byte is the same per byte of the text, which does not depend on the "
    "tokenizer. Lower is better."
)
NOTE = (
    "Mean over seeds of the finished runs, each architecture at the learning rate with the lowest loss on all held-out "
    "text, among those at which the most seeds have one; it is chosen on the numbers shown here.{bias} 1hop-0k and "
    "similar: the share of birth years that a model finds in a short text. Small: 95% intervals, for three seeds or "
    "more; those of losses assume that further runs differ as these do."
)


def text_blocks(section: Section, number: int) -> list[Block]:
    """For the page. number: of the section; the names of its charts end with it."""
    runs = section.runs
    charts = []
    for place, name in enumerate(_set_names(runs)):
        caption = f"Loss on held-out text: {name}. A line per run."
        losses = [[(row.step, row.measures.get(of_set("loss", name))) for row in run.evals] for run in runs]
        charts.append(_chart(f"text-{number}-{place}", caption, "validation loss", section, losses))
    max_points = max(MIN_POINTS, MAX_POINTS // len(runs))
    caption = "Loss on training batches, a line per run."
    thinned = [run.train[:: max(1, -(-len(run.train) // max_points))] for run in runs]
    training = [[(row.step, row.loss) for row in few] for few in thinned]
    trained = _chart(f"text-loss-{number}", caption, "training loss", section, training)
    drawn = any(one["x"] for one in trained["chart"]["series"])
    every, ranking = every_run(section), scores_blocks(section)
    caveats = limits(section)
    return [
        {"answer": answer(section)},
        *(ranking[:1] or [every]),
        *charts[:1],
        *caveat(caveats),
        *fold("Other charts", charts[1:]),
        *fold("What else limits this comparison", [{"list": caveats[1:]}] if caveats[1:] else []),
        *fold(f"Every run ({count_of(len(runs), 'run')})", [every] if ranking else []),
        *fold("Training loss", [trained] if drawn else []),
        *fold("Settings: what was equal, what differed", settings_blocks(section.groups)),
        *fold("How to read the numbers", [{"text": ABOUT}, *ranking[1:]]),
    ]


def limits(section: Section) -> list[str]:
    """The limits of the comparison, a sentence each."""
    return [*not_planned(section.groups), *(fairness(section.architectures) if _ranked(section) else [])]


def answer(section: Section) -> str:
    """A sentence on the architecture with the lowest loss."""
    ranked = _ranked(section)
    if not ranked:
        has = "finished yet" if not any(run.finished for run in section.runs) else "a loss on held-out text"
        return f"No run has {has}."
    shown = [f"{rate.arch} {loss.mean:.3f} ({count_of(loss.runs, 'run')})" for rate, loss in ranked[:MAX_NAMED]]
    losses = listed(shown)
    missing = selection([a.best for a in section.architectures if a.best])
    more = (f" {missing}." if missing else "") + unfinished(section.architectures)
    if len(ranked) == 1:
        return f"Loss on held-out text: {losses}.{more}"
    certainty = "the intervals show how sure that is" if _adds_to_runs(section) else "single runs prove nothing"
    lowest = [rate.arch for rate, _ in ranked[: _number_of_lowest(ranked)]]
    verb = "has" if len(lowest) == 1 else "have"
    return f"{listed(lowest[:MAX_NAMED])} {verb} the lowest loss on held-out text: {losses}; {certainty}.{more}"


def scores_blocks(section: Section) -> list[Block]:
    """A table with a row per architecture at its best learning rate, then how to read it; nothing if no run has
    finished, or the table of runs shows the same."""
    ranked = _ranked(section)
    if not ranked or not _adds_to_runs(section):
        return []
    losses = {name: Quantity(name, say="{:.3f}".format) for name in _loss_columns(section.runs)}
    mean = [Quantity("loss (all sets)", say="{:.3f}".format)] if len(_set_names(section.runs)) > 1 else []
    years = {name: Quantity(name, percent, points) for run in section.runs for name in section.years.get(run.name, {})}
    rows: list[list[Cell]] = [
        [rate.arch, f"{rate.lr:g}", str(loss.runs), *(spread_cell(loss, quantity, loss.runs) for quantity in mean),
         *(spread_cell(rate.spread(name), quantity, loss.runs) for name, quantity in losses.items()),
         *(spread_cell(_years(section, rate, name), quantity, loss.runs) for name, quantity in years.items())]
        for rate, loss in ranked
    ]  # fmt: skip
    tried = max(sum(rate.score is not None for rate in a.rates) for a in section.architectures)
    best = _number_of_lowest(ranked)
    marks = ["best"] * best if best < len(ranked) else []
    head = ["architecture", "learning rate", "runs", *(quantity.label for quantity in mean), *losses, *years]
    return [table(head, rows, marks), {"text": NOTE.format(bias=of_choosing(tried))}]


def every_run(section: Section, *, named: bool = True) -> Block:
    """The last numbers of each run; for an unfinished run, with their step. named: with the names of the runs."""
    runs, group_of, columns = section.runs, by_run(section.groups), _loss_columns(section.runs)
    rows: list[list[Cell]] = []
    for run in runs:
        last = next((row for row in reversed(run.evals) if row.sets), Evaluation(0, {}))
        early = "" if run.finished else f"at step {last.step:,}"
        values = [last.measures.get(name) for name in columns]
        about = [group_of[run.name].family, _size(run), f"{run.lr:g}", str(run.seed), short(run.tokens)]
        rows.append([
            *([run.name] if named else []),
            *(text.replace(" ", NO_BREAK) if named else text for text in about),
            *("–" if value is None else cell(f"{value:.3f}", early) for value in values),
            f"{run.train[-1].loss:.3f}" if run.train else "–",
            state_cell(run),
        ])  # fmt: skip
    about = ["architecture", "size", "learning rate", "seed", "tokens"]
    return table([*(["run"] if named else []), *about, *columns, "training loss", "state"], rows)


def _ranked(section: Section) -> list[tuple[Rate, Spread]]:
    """The best rate of each architecture with its loss on all held-out text, the lowest loss first."""
    rates = [(a.best, a.best.score) for a in section.architectures if a.best and a.best.score]
    return sorted(rates, key=lambda rate: rate[1].mean)


def _number_of_lowest(ranked: Sequence[tuple[Rate, Spread]]) -> int:
    """How many have the lowest loss, in the digits that are shown."""
    shown = [f"{loss.mean:.3f}" for _, loss in ranked]
    return shown.count(shown[0])


def _adds_to_runs(section: Section) -> bool:
    """Whether the table of runs does not show the same: some architecture has several, or there are birth-year
    questions."""
    return sum(run.finished for run in section.runs) > len(_ranked(section)) or any(section.years.values())


def _years(section: Section, rate: Rate, name: str) -> Spread | None:
    """The share right of a birth-year question."""
    of_runs = [(run.seed, section.years.get(run.name, {}).get(name)) for run in rate.runs]
    shares = [(seed, *answers) for seed, answers in of_runs if answers]
    values = by_seed((seed, share) for seed, share, _ in shares)
    return spread_of([*values.values()], min(count for *_, count in shares)) if shares else None


def _set_names(runs: Sequence[Run]) -> list[str]:
    """The validation sets of any run, in their order."""
    return list(dict.fromkeys(name for run in runs for row in run.evals for name in row.sets))


def _loss_columns(runs: Sequence[Run]) -> list[str]:
    return [of_set(measure, name) for name in _set_names(runs) for measure in OF_A_SET]


def _size(run: Run) -> str:
    """The number of parameters of a finished run; the shape of an unfinished one."""
    if run.result and run.result.num_parameters:
        return short(run.result.num_parameters)
    return shape_of(run.config) or "–"


def _chart(name: str, caption: str, title: str, section: Section, losses: Sequence[Losses]) -> Block:
    """Loss against tokens, a line per run. losses: (step, loss) of each run. The loss axis is logarithmic, so that
    exponential decay is a straight line."""
    series, group_of = [], by_run(section.groups)
    for run, at_steps in zip(section.runs, losses, strict=True):
        curve = [(tokens_of(run.config, step), loss) for step, loss in at_steps]
        known = [(x, loss) for x, loss in curve if x is not None and loss is not None and math.isfinite(loss)]
        hover = f"seed {run.seed}, learning rate {run.lr:g}\n{run.name}"
        tip = "%{x:,} tokens: loss %{y:.4g}"
        series.append(series_of("line", group_of[run.name].family, known, run=run.name, tip=tip, hover=hover))
    last = max((x for one in series for x in one["x"]), default=1)
    x = steps_axis(last, "tokens") | {"format": "~s"}
    panel = {"title": "", "x": x, "y": {"title": title, "log": True}}
    return chart(name, caption, {"height": 280, "panels": [panel], "series": series})
