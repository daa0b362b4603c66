"""One comparison on the page: runs of one task. First the answer, a ranking, a chart and a caveat; the rest is folded.

No task has code here. Its columns are the slices of its primary scale and its measures; every further scale of slices
has a chart and a table.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from canonlm.report.blocks import (
    Block,
    Cell,
    caveat,
    chart,
    difference_cell,
    fold,
    spread_cell,
    state_cell,
    table,
    value_cell,
)
from canonlm.report.charts import final_chart, learning_curves, loss_curves, size_curves, unfinished_curves
from canonlm.report.format import count_of, listed, percent, quantity, scale_words, score_label, sentence
from canonlm.report.play import Section
from canonlm.report.sentences import FEW, choice, selection, unfinished, verdict
from canonlm.report.settings import Setting, settings, unplanned
from canonlm.runs import summary
from canonlm.runs.groups import Group, by_run
from canonlm.runs.identity import short, short_bytes
from canonlm.runs.rows import is_slice, primary
from canonlm.runs.seed_statistics import SEEDS_OF_INTERVAL
from canonlm.runs.summary import Architecture, Difference, Rate
from canonlm.runs.task_info import TaskInfo

Gap = tuple[str, int, Mapping[str, Difference]]
"""(what minus what, pairs of runs, differences by slice and measure)"""

INTERVALS = (
    "Small numbers and whiskers: 95% intervals of the mean over runs with different seeds, for three runs or more; for "
    "two runs, their values. The intervals of accuracies assume no distribution (Gaffke's bound), those of other "
    "measures that further runs differ as these do (Student's t)."
)
VERDICTS = (
    "The verdict is at 5% for all pairs of architectures here together. Each section of a page is judged by itself: "
    "of twenty sections without any difference, one may seem to have one."
)
NOTE = (
    "The learning rate of each architecture is the one with the highest {score}, averaged over {averaged}, among the "
    "rates at which the most seeds have one.{choice}"
)
LENGTHS = (
    "Accuracy by size at the end of training, each architecture at its best learning rate. Sizes to the right of the "
    "upright line did not occur in training."
)
CURVES = "Thin lines: single runs. Bold lines: their mean. A click on a name hides it or shows it again."
GAPS = (
    "The mean of the differences between runs with the same seed, each architecture at its best rate; accuracies in "
    "percentage points. Small: the 95% interval of the difference of means, for three seeds or more. Each interval "
    "is for one column: of twenty columns without any difference, about one would seem to have one."
)
GAPS_OF_VERDICT = " The verdict takes that into account."


def section_blocks(section: Section, number: int) -> list[Block]:
    """The blocks of a section. number: of the section on its page; the names of its charts end with it."""
    archs = summary.compared_of(section.architectures)
    finished = any(a.best for a in archs)
    charts = _charts(archs, section, number) if finished else _so_far(section, number)
    caveats = limits(archs)
    drawn = loss_curves(archs)
    any_loss = any(one["x"] for one in drawn["series"])
    losses = [chart(f"loss-{number}", "Loss on training batches, best rates.", drawn)] if any_loss else []
    return [
        {"answer": answer(archs)},
        *ranking(archs, _columns(archs), section.chance),
        *charts[:1],
        *caveat(caveats),
        *fold("Other charts", charts[1:]),
        *fold("Differences, paired by seed", _differences(archs)),
        *_scales(archs, section, number),
        *fold("What else limits this comparison", [{"list": caveats[1:]}] if caveats[1:] else []),
        *fold(f"Every learning rate, every run ({count_of(len(section.runs), 'run')})",
              _all_tables(section.architectures, section), opened=not finished),
        *fold("Training loss", losses),
        *fold("Settings: what was equal, what differed", settings_blocks(section.groups)),
        *fold("What was asked, and how to read the numbers", _reading(archs, section)),
    ]  # fmt: skip


def answer(archs: Sequence[Architecture]) -> str:
    """The verdict, or the highest score where there is none."""
    finished = [a for a in archs if a.best]
    if not finished:
        return "No run has finished yet."
    if text := verdict(archs):
        return text + unfinished(archs)
    best, task, score = finished[0].best, finished[0].task, finished[0].score
    assert best is not None
    reached = "–" if best.mean is None else quantity(task, score).say(best.mean)
    more = f" {missing}." if (missing := selection([best])) else ""
    text = f"{best.arch} reaches {reached}: {score_label(task, score)}, {count_of(best.repeats, 'run')}."
    return text + more + unfinished(archs)


def limits(archs: Sequence[Architecture]) -> list[str]:
    """The limits of the comparison, a sentence each."""
    finished = any(a.best for a in archs)
    return [*not_planned([a.group for a in archs]), *summary.fairness(archs)] if finished else []


def not_planned(groups: Sequence[Group]) -> list[str]:
    """A sentence on settings that differ by accident, if any do."""
    other = unplanned(groups)
    return [f"The runs also differ in {listed(other)}: see the settings."] if other else []


def _columns(archs: Sequence[Architecture]) -> list[str]:
    score, keys = archs[0].score, summary.columns_of(archs)
    return list(dict.fromkeys([score, *keys] if score or len(primary(keys)) > 1 else keys))


def ranking(archs: Sequence[Architecture], keys: Sequence[str], chance: Mapping[str, float]) -> list[Block]:
    """A row per architecture at its best learning rate, the best first, and the scores of guessing. keys: slices and
    measures, a column each; "" is the mean accuracy."""
    task, guesses = archs[0].task, summary.guesses_of(archs, keys, chance)
    rows: list[list[Cell]] = []
    counted = any(a.state_bytes is not None for a in archs)
    ordered = sorted(archs, key=lambda a: -a.best.mean if a.best and a.best.mean is not None else float("inf"))
    for a in ordered:
        cells: list[Cell] = [*["–"] * (len(keys) + 1), f"0 of {sum(rate.unfinished for rate in a.rates)}"]
        if (best := a.best) is not None:
            cells = [*_scores(task, best, keys, guesses), f"{best.lr:g}", best.finished_of]
        rows.append(
            [a.arch, *cells, short(a.parameters), *[short_bytes(a.state_bytes)] * counted, short(a.tokens_per_s)]
        )
    say = quantity(task, archs[0].score).say
    shown = ["" if a.best is None or a.best.mean is None else say(a.best.mean) for a in ordered]
    scores = list(filter(None, shown))
    marks = ["best" if scores and each == scores[0] != scores[-1] else "" for each in shown]
    if guesses:
        rows.append(
            ["chance", *(percent(guesses[key]) if key in guesses else "" for key in keys), *[""] * (4 + counted)]
        )
        marks.append("aside")
    labels = [quantity(task, key).label for key in keys]
    head = ["architecture", *labels, "learning rate", "runs", "parameters", *["bytes of state"] * counted, "tokens/s"]
    seeds = {a.best.repeats for a in archs if a.best}
    both = "the values of both runs" + (" where there are two" if max(seeds, default=0) > 2 else "")
    parts = ["95% intervals over seeds"] * (max(seeds, default=0) > 2) + [both] * (2 in seeds)
    small = f" Small: {'; '.join(parts)}." if parts else ""
    steps = {run.result.steps for a in archs if a.best for run in a.best.runs if run.result}
    when = f"After {count_of(steps.pop(), 'training step')}" if len(steps) == 1 else "At the end of training"
    note = f"{when}, each architecture at its best learning rate.{small}"
    note += " Bytes of state: what the model keeps of one window to continue it." if counted else ""
    return [table(head, rows, marks), *([{"note": note}] if scores else [])]


def _scores(task: TaskInfo, rate: Rate, keys: Sequence[str], guesses: Mapping[str, float]) -> list[Cell]:
    return [
        spread_cell(rate.spread(key), quantity(task, key), rate.repeats,
                    "below chance" if rate.is_below(key, guesses.get(key)) else "")
        for key in keys
    ]  # fmt: skip


def _charts(archs: Sequence[Architecture], section: Section, number: int) -> list[Block]:
    """The chart that answers best, then the others: scores over model sizes, measures, and slices while training."""
    charts = []
    measures = summary.measures_of(archs)
    if slices := primary(summary.slices_of(archs)):
        caption = f"{sentence(section.task.score.share)} during training. {CURVES}"
        caption += " The dotted line is what guessing scores." if section.chance else ""
        charts.append(chart(f"curves-{number}", caption, learning_curves(archs, slices, section.chance)))
        if largest := largest_trained(section, slices):
            beyond = any(_size(key) > largest for key in slices)
            drawn = chart(f"lengths-{number}", LENGTHS, final_chart(archs, slices, section.chance, largest))
            charts.insert(0 if beyond else 1, drawn)
    if measures:
        described = (quantity(section.task, key) for key in measures)
        about = ["Measures during training.", *(f"{sentence(q.label)}: {q.about}" for q in described if q.about)]
        finished = [run for a in archs if a.best for run in a.best.runs]
        if any(summary.at_most(run, key) is not None for key in measures for run in finished):
            about.append("The dashed line is the maximum: everything stored. Far above the curves, it is left out.")
        drawn = chart(f"measures-{number}", " ".join(about), learning_curves(archs, measures, {}))
        charts.insert(0 if any(a.score in measures for a in archs) else len(charts), drawn)
    if any(a.arch != a.family for a in archs) and any(a.best and a.best.score and a.parameters for a in archs):
        caption = f"{sentence(score_label(section.task, archs[0].score))} at the end of training, by model size. "
        caption += "Where whiskers leave the chart, hover to see their ends."
        charts.insert(0, chart(f"sizes-{number}", caption, size_curves(archs)))
    states = [a.state_bytes for a in archs if a.best and a.best.score and a.state_bytes]
    if states and max(states) >= 2 * min(states):  # closer ones say nothing, and an axis has no mark between them
        caption = f"{sentence(score_label(section.task, archs[0].score))} at the end of training, by the bytes of "
        caption += "state that the model keeps of one window to continue it."
        charts.append(chart(f"state-{number}", caption, size_curves(archs, "state_bytes")))
    return charts


def largest_trained(section: Section, keys: Sequence[str]) -> float | None:
    """The largest size of training on the scale of these slices. None if it is another kind of scale, or the test has
    one size."""
    task = section.runs[0].config.get("task")
    value = scale_words(section.task, keys[0]).largest(task if isinstance(task, Mapping) else {})
    sizes = [size for size in map(_size, keys) if math.isfinite(size)]
    return float(value) if isinstance(value, int) and len(sizes) == len(keys) > 1 else None


def _size(key: str) -> float:
    text = key.partition("=")[2]
    return float(text) if text.isdecimal() else math.nan


def _so_far(section: Section, number: int) -> list[Block]:
    """The curves of runs before any has finished."""
    keys = primary(dict.fromkeys(key for run in section.runs for row in run.evals for key in row.slices))
    caption = f"{sentence(section.task.score.share)} so far, a line per run."
    return [chart(f"curves-{number}", caption, unfinished_curves(section.runs, section.groups, keys))] if keys else []


def _gaps(archs: Sequence[Architecture]) -> list[Gap]:
    """The differences of the other families from the first, at the nearest size."""
    shown = [a for a in archs if a.best]
    first = [a for a in shown if a.family == shown[0].family]
    gaps: list[Gap] = []
    for a in (a for a in shown if a.family != shown[0].family):
        reference = summary.counterpart(first, a)
        by_key = summary.differences(reference, a)
        pairs = max((gap.pairs for gap in by_key.values()), default=0)
        gaps.append((f"{a.arch} − {reference.arch}", pairs, by_key))
    return gaps if any(pairs for _, pairs, _ in gaps) else []


def _differences(archs: Sequence[Architecture]) -> list[Block]:
    columns = {key: quantity(archs[0].task, key) for key in summary.columns_of(archs)}
    rows = [
        [title, *(difference_cell(gaps.get(key), column, pairs) for key, column in columns.items()), str(pairs)]
        for title, pairs, gaps in _gaps(archs)
    ]
    head = ["difference", *(column.label for column in columns.values()), "pairs"]
    judged = sum(a.best is not None for a in archs) <= FEW
    return [table(head, rows), {"note": GAPS + GAPS_OF_VERDICT * judged}] if rows else []


def _scales(archs: Sequence[Architecture], section: Section, number: int) -> list[Block]:
    """The scales that the ranking has no columns for: a chart, and a table with a row per slice, for each."""
    blocks = []
    for place, keys in enumerate(summary.scales_of(archs)[1:], 1):
        words = scale_words(section.task, keys[0])
        lead: list[Block] = [{"text": words.about}] if words.about else []
        largest = largest_trained(section, keys)
        caption = LENGTHS if largest else "Accuracy at the end of training."
        drawn = final_chart(archs, keys, section.chance, largest)
        shown = chart(f"final-{number}-{place}", caption, drawn)
        gaps = _gaps(archs)
        note = [{"note": "Differences in percentage points."}] if gaps else []
        rows = by_scale(archs, keys, section.chance, gaps)
        blocks += fold(f"Final accuracy by {words.by}", [*lead, shown, rows, *note])
    return blocks


def by_scale(
    archs: Sequence[Architecture], keys: Sequence[str], chance: Mapping[str, float], gaps: Sequence[Gap] = ()
) -> Block:
    """A row per slice of one scale, and a column per architecture at its best learning rate."""
    task, shown, guesses = archs[0].task, [a.best for a in archs if a.best], summary.guesses_of(archs, keys, chance)
    rows: list[list[Cell]] = [
        [column.label, *(cell for best in shown for cell in _scores(task, best, [key], guesses)),
         *([percent(guesses[key]) if key in guesses else ""] if guesses else []),
         *(difference_cell(by_key.get(key), column, pairs) for _, pairs, by_key in gaps)]
        for key, column in ((key, quantity(task, key)) for key in keys)
    ]  # fmt: skip
    ran = [f"{best.arch}, {count_of(best.repeats, 'run')}" for best in shown]
    paired = [f"{title}, {count_of(pairs, 'pair')}" for title, pairs, _ in gaps]
    return table([scale_words(task, keys[0]).by, *ran, *(["chance"] if guesses else []), *paired], rows)


def by_rate(archs: Sequence[Architecture], keys: Sequence[str]) -> Block:
    """A row per architecture and learning rate, with the score in the last column; the best rates are marked."""
    task, score = archs[0].task, quantity(archs[0].task, archs[0].score)
    rows: list[list[Cell]] = []
    marks = []
    for rate, best in [(rate, rate is a.best) for a in archs for rate in a.rates]:
        reached = "–" if rate.mean is None else score.say(rate.mean)
        last = f"{reached} (best)" if best else reached
        rows.append([rate.arch, f"{rate.lr:g}", rate.finished_of, *_scores(task, rate, keys, {}), last])
        marks.append("best" if best else "")
    labels = [quantity(task, key).label for key in keys]
    return table(["architecture", "learning rate", "runs", *labels, score.label], rows, marks)


def _all_tables(archs: Sequence[Architecture], section: Section) -> list[Block]:
    measures = [key for key in summary.columns_of(archs) if not is_slice(key)]
    keys = [*measures, *summary.slices_of(archs)]
    if not keys:  # nothing has finished: the slices of the evaluations so far
        keys = list(dict.fromkeys(key for run in section.runs for row in run.evals[-1:] for key in row.slices))
    columns = {key: quantity(section.task, key) for key in keys}
    runs: list[list[Cell]] = []
    group_of = by_run(section.groups)
    for run in section.runs:
        row = run.result.final if run.result else run.evals[-1] if run.evals else None
        values = [value_cell(row, key, column) for key, column in columns.items()]
        runs.append([run.name, group_of[run.name].name, f"{run.lr:g}", str(run.seed), *values, state_cell(run)])
    labels = (column.label for column in columns.values())
    of_runs = table(["run", "architecture", "learning rate", "seed", *labels, "state"], runs)
    several = sum(len(a.rates) for a in archs) > len(archs)
    rates = [{"heading": "By learning rate"}, by_rate(archs, keys), {"heading": "By run"}] if several else []
    return [*rates, of_runs]


def _reading(archs: Sequence[Architecture], section: Section) -> list[Block]:
    task, score = section.task, archs[0].score
    label = score_label(task, score) if score else "final accuracy"
    averaged = "seeds" if score else "question types and seeds"
    texts = [
        section.text or task.words.about,
        VERDICTS if 1 < sum(a.best is not None for a in archs) <= FEW else "",
        INTERVALS if max((a.best.repeats for a in archs if a.best), default=0) >= SEEDS_OF_INTERVAL - 1 else "",
        NOTE.format(score=label, averaged=averaged, choice=choice(archs)),
        summary.adjusted(archs),
    ]
    return [{"text": text} for text in texts if text]


def settings_blocks(groups: Sequence[Group]) -> list[Block]:
    archs, equal, differing = settings(groups)
    rows: list[list[Cell]] = [[setting.label, *setting.values] for setting in differing]
    differed = table(["setting", *archs], rows, kind="words") if rows else {"text": "Nothing differed."}
    main, rest = [s for s in equal if s.main], [s for s in equal if not s.main]
    also = [{"heading": "Also equal"}, _pairs(rest)] if rest else []
    return [{"heading": "Differed"}, differed, {"heading": "Equal in all runs"}, _pairs(main), *also]


def _pairs(settings: Iterable[Setting]) -> Block:
    return table(["setting", "value"], [[s.label, s.values[0]] for s in settings], kind="words")
