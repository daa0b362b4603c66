"""Results for the terminal: a row per model and a column per question; the differences that Canon layers make."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
from rich.table import Table
from rich.text import Text

from canonlm.core.errors import plain, unknown
from canonlm.experiments.published.benchmarks import BENCHMARKS, GROUPS, LOWER_IS_BETTER, PERCENT
from canonlm.experiments.published.confounders import mark, notes
from canonlm.report.format import number, signed
from canonlm.runs.table import MODEL, QUESTION, short_tokens

GAP = 2  # spaces between columns
LONG = 16  # letters; a longer setting is a title instead of a part of every column


class Question(NamedTuple):
    """The question behind a number. The setting is None if the task has only one."""

    task: str
    setting: str | None
    slice: str
    metric: str
    unit: str


@dataclass(frozen=True)
class Column:
    label: str
    question: Question


_COLUMNS = {name: Column(name, Question(b.task, None, b.slice, b.metric, b.unit)) for name, b in BENCHMARKS.items()}
_KNOWN = {column.question for column in _COLUMNS.values()}
_GROUP_OF_TASK = {b.task: b.group for b in BENCHMARKS.values() if b.group != "perplexity"}


def groups_of(numbers: pl.DataFrame) -> dict[str, list[Column]]:
    """The columns that are shown together: the groups of the published benchmarks, and each other task by its name
    (`depo`; `depo: N=8, …` if its setting has no short name).

    Finer slices than the published ones, such as those by position, are only in the frame.
    """
    questions = [Question(*row) for row in numbers.select(QUESTION).unique(maintain_order=True).iter_rows()]
    present = set(questions)
    groups = {
        group: [_COLUMNS[name] for name in names if _COLUMNS[name].question in present]
        for group, names in GROUPS.items()
    }
    for question in questions:
        known = _GROUP_OF_TASK.get(question.task)
        if question in _KNOWN or (known and ", " in question.slice) or question.slice.startswith("all, "):
            continue
        long = len(question.setting or "") > LONG
        group = known or (f"{question.task}: {question.setting}" if long else question.task)
        groups.setdefault(group, []).append(Column(_label(question, bool(known) or not long), question))
    return {group: columns for group, columns in groups.items() if columns}


def named(numbers: pl.DataFrame, group: str) -> dict[str, list[Column]]:
    """The groups with this name; none if a known group has no numbers. ValueError: no such group."""
    groups = groups_of(numbers)
    matches = {title: columns for title, columns in groups.items() if title.partition(":")[0] == group}
    if not matches and group not in GROUPS:
        tasks = dict.fromkeys(title.partition(":")[0] for title in groups)
        raise unknown("group", group, [*GROUPS, *(task for task in tasks if task not in GROUPS)])
    return matches


def only(numbers: pl.DataFrame, columns: Sequence[Column]) -> pl.DataFrame:
    """The rows that answer one of the questions."""
    schema = dict.fromkeys(QUESTION, pl.String)
    questions = pl.DataFrame([column.question for column in columns], schema, orient="row")
    return numbers.join(questions, on=QUESTION, nulls_equal=True, how="semi", maintain_order="left")


def score_tables(numbers: pl.DataFrame, columns: Sequence[Column], width: int, title: str) -> Iterator[Table | Text]:
    """The models that have a number in one of the columns, the user's last; as many tables as the width requires."""
    models: dict[tuple[Any, ...], dict[Question, str]] = {}
    for row in only(numbers, columns).iter_rows(named=True):
        cells = models.setdefault(tuple(row[key] for key in MODEL), {})
        cells[Question(*(row[key] for key in QUESTION))] = _score(row)
    ordered = sorted(models, key=lambda model: model[0] == "yours")
    sized = any(model[0] in ("paper", "yours") for model in models)
    heads = ["model", "size"] if sized else ["model"]
    name, size = MODEL.index("model"), MODEL.index("size")
    rows = [([model[name], model[size] or "–"][: len(heads)], models[model]) for model in ordered]
    num_published = sum(model[0] != "yours" for model in ordered)
    yield from _tables(heads, rows, columns, width, title, line_before=num_published)


def delta_tables(pairs: pl.DataFrame, columns: Sequence[Column], width: int) -> Iterator[Table | Text]:
    """A row per pair, then the means over pairs and how many are better or worse with Canon; then notes.
    pairs: from `canonlm.runs.table.paired`, all of one source."""
    same = ("source", "arch", "size", "tokens", "lr", "canon_model", "base_canon", "canon")
    pairs_shown: dict[tuple[Any, ...], dict[Question, str]] = {}
    deltas: dict[Question, list[float]] = {}
    for row in only(pairs, columns).iter_rows(named=True):
        question = Question(*(row[key] for key in QUESTION))
        pair = (*(row[key] for key in same), row["base_model"])
        pairs_shown.setdefault(pair, {})[question] = _delta(row["delta"], question)
        deltas.setdefault(question, []).append(row["delta"])
    rows: list[tuple[list[str], Mapping[Question, str]]] = []
    for pair, cells in pairs_shown.items():
        source, arch, size, tokens, lr, model, before, after, _ = pair
        sign = mark(model) if source in ("published", "best") else ""
        length = "–" if tokens is None else short_tokens(tokens)
        rate = "best" if source == "best" else "–" if lr is None else f"{lr:g}"
        rows.append(([arch + sign, size or "–", length, rate, f"{before} → {after}"], cells))
    count = len(rows)
    gains = {q: [-x for x in d] if q.metric in LOWER_IS_BETTER else d for q, d in deltas.items()}
    rows += [
        (["mean", *[""] * 4], {q: _delta(sum(d) / len(d), q) for q, d in deltas.items()}),
        (["better", *[""] * 4], {q: f"{sum(x > 0 for x in d)}/{len(d)}" for q, d in gains.items()}),
        (["worse", *[""] * 4], {q: f"{sum(x < 0 for x in d)}/{len(d)}" for q, d in gains.items()}),
    ]
    units = "percentage points unless the heading names a measure; ppl: lower is better"
    title = f"{source}: with Canon layers, minus without ({units})"
    yield from _tables(["arch", "size", "tokens", "lr", "canon"], rows, columns, width, title, line_before=count)
    if source in ("published", "best"):
        marks, archs = {mark(pair[5]) for pair in pairs_shown}, {pair[1] for pair in pairs_shown}
        yield from map(Text, notes(marks, several=len(archs) > 1))
    if source == "yours":
        yield Text("Your pairs are equal in architecture, size, tokens, learning rate and seed; `canonlm report` "
                   "shows what else differs.")  # fmt: skip


def _tables(
    heads: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Mapping[Question, str]]],
    columns: Sequence[Column],
    width: int,
    title: str,
    line_before: int,
) -> Iterator[Table | Text]:
    """The title, then as many tables as the width requires. `line_before`: the row with an empty line before it."""
    starts = [max(len(text) for text in [head, *(plain(row[0][i]) for row in rows)]) for i, head in enumerate(heads)]
    room = width - sum(start + GAP for start in starts)
    wide = {c: max(len(text) for text in [plain(c.label), *(row[1].get(c.question, "–") for row in rows)]) + GAP
            for c in columns}  # fmt: skip
    part: list[Column] = []
    parts = [part]
    for column in columns:
        if part and sum(wide[c] for c in part) + wide[column] > room:
            parts.append(part := [])
        part.append(column)
    yield Text(plain(title), style="bold")
    for shown in parts:
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        for head in heads:
            table.add_column(head, no_wrap=True)
        for column in shown:
            table.add_column(Text(plain(column.label)), justify="right", no_wrap=True)
        for place, (start, cells) in enumerate(rows):
            if place and place == line_before:
                table.add_row()
            table.add_row(*(Text(plain(text)) for text in start), *(cells.get(c.question, "–") for c in shown))
        yield table


def _label(question: Question, with_setting: bool) -> str:
    parts = [question.task] if question.task in _GROUP_OF_TASK and question.slice == "all" else []
    parts += [question.setting] if with_setting and question.setting else []
    parts += [question.slice] if question.slice != "all" else []
    parts += [question.metric] if question.metric not in ("accuracy", "exact") else []
    return " ".join(parts) or "all"


def _score(row: Mapping[str, Any]) -> str:
    """Perplexities with two decimals, as they were published."""
    say = "{:.1f}".format if row["unit"] == PERCENT else "{:.2f}".format if "perplexity" in row["metric"] else number
    return say(row["value"]) if row["stderr"] is None else f"{say(row['value'])} ±{say(row['stderr'])}"


def _delta(delta: float, question: Question) -> str:
    if question.unit != PERCENT and "perplexity" not in question.metric:
        return signed(delta)
    text = f"{delta:+.1f}" if question.unit == PERCENT else f"{delta:+.2f}"
    return text.replace("-", "−") if float(text) else text.lstrip("+-")
