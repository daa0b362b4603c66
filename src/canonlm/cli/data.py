"""`canonlm data`: show samples of a task, write them to a file, grade answers to them; prepare text."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from canonlm.cli import completion, later
from canonlm.cli.status import Count, doing, say
from canonlm.core.errors import unknown
from canonlm.report.format import percent, slice_label
from canonlm.runs.rows import slice_key
from canonlm.runs.task_info import TaskInfo

TASK = typer.Argument(
    help="A task; `canonlm tasks` lists them. FILE.py:NAME: one of yours.",
    autocompletion=completion.tasks,
    metavar="TASK",
)
SETTINGS = typer.Argument(help="Settings of the task, such as task.N=8 task.K=2.", metavar="KEY=VALUE")
N = typer.Option("--n", help="How many samples.", min=1)
DIFFICULTY = typer.Option(help="A named difficulty, such as depo1-225.")
SPLIT = typer.Option(help="train, valid (the same distribution), test (the hardest cases) or validation (like test).")
SEED = typer.Option(help="Samples are a function of seed, split and index.", min=0)
OUT = typer.Option(help="The Parquet file to write, such as depo.parquet.")
LOSS_ON = typer.Option(help="Which tokens get a label: answer or all. Default: as in the paper.")
VERIFY = typer.Option(
    help="Grade a file of answers to the samples instead: Parquet or JSON lines, with index and answers."
)

STYLES = {"marker": "dim", "context": "", "question": "bold cyan", "answer": "bold green"}
WIDTH = 60  # of a question or an answer in a list


def show(
    task: Annotated[str, TASK],
    settings: Annotated[list[str] | None, SETTINGS] = None,
    n: Annotated[int, N] = 2,
    difficulty: Annotated[str | None, DIFFICULTY] = None,
    split: Annotated[str, SPLIT] = "train",
    seed: Annotated[int, SEED] = 0,
) -> int:
    """Print samples in colour: context, questions and answers; then each question with its answer and the reason.

    Without a difficulty or settings, those of the tiny preset are used.
    """
    chosen = _task(task, difficulty, settings)
    with doing("drawing samples (the first time, the task is compiled)"):
        first = chosen.sample(split, seed, 0)
    console = Console(highlight=False)
    console.print(
        f"{chosen!r}, {split} split; {len(chosen.vocab)} tokens in the vocabulary", style="dim", soft_wrap=True
    )
    for index in range(n):  # one at a time: nobody waits for the last one
        sample = chosen.sample(split, seed, index) if index else first
        console.print(f"\nsample {index}, {len(sample.tokens)} tokens", style="dim")
        console.print(_coloured(chosen, sample))
        for line in _explained(chosen, sample):
            console.print(line, soft_wrap=True)
    if console.is_terminal:
        console.print(Text("\n").append_text(Text(" ").join(Text(role, style) for role, style in STYLES.items())))
    return 0


def dump(
    task: Annotated[str, TASK],
    settings: Annotated[list[str] | None, SETTINGS] = None,
    n: Annotated[int, N] = 1000,
    out: Annotated[Path | None, OUT] = None,
    difficulty: Annotated[str | None, DIFFICULTY] = None,
    split: Annotated[str, SPLIT] = "train",
    seed: Annotated[int, SEED] = 0,
    loss_on: Annotated[str | None, LOSS_ON] = None,
    verify: Annotated[Path | None, VERIFY] = None,
) -> int:
    """Write samples to a Parquet file; with --verify, grade answers to them.

    The file has index, tokens, labels and answers (start and stop of each answer; the tokens before are its prompt).
    It is complete or absent. If a dump was stopped, the same command continues it.
    """
    chosen = _task(task, difficulty, settings)
    if out is None and verify is None:
        raise ValueError("--out is missing: the file to write (or --verify with a file of answers)")
    if out is not None and verify is not None:
        raise ValueError("--out cannot be used with --verify")
    if verify is not None:
        with Count(n, "graded") as count:
            result = later.answers.grade_file(
                chosen, verify, n=n, split=split, seed=seed, on_progress=lambda done: count("graded", done)
            )
        _print_grades(chosen, result, n, split, seed)
        return 0

    assert out is not None
    try:
        with Count(n, "drawn", "joined") as count:
            is_new = later.dump.dump(chosen, out, n=n, split=split, seed=seed, loss_on=loss_on, on_progress=count)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues") from None
    say(f"{out}: {n:,} samples of {chosen!r}, {split} split, seed {seed}{'' if is_new else ' (was there already)'}")
    return 0


def _task(name: str, difficulty: str | None, settings: list[str] | None) -> "later.tasks.Task":
    keys = later.config.task_keys({"name": name})
    given: dict = {"task": {}}
    for key in later.load_config.override(given, settings or []):
        if key not in keys:
            dotted = f"task.{key}"
            raise unknown("setting", key, keys, meant=[dotted] if dotted in keys else [])
    tiny = {} if difficulty else later.recipes.load_preset(name, "tiny").run["task"]
    chosen = tiny or {"name": name, "difficulty": difficulty}
    return later.config.build_task({**chosen, **given["task"]})


def _coloured(task: "later.tasks.Task", sample: "later.tasks.Sample") -> Text:
    """The sample's text, coloured by role. The vocabulary joins the tokens of one role, as it places the spaces."""
    text, stop = Text(), 0
    for role, run in groupby(role for _, role in task.show(sample)):
        stop += len(list(run))
        text.append(task.vocab.text(sample.tokens[:stop].tolist())[len(text) :], STYLES[role])
    return text


def _explained(task: "later.tasks.Task", sample: "later.tasks.Sample") -> Iterator[Text]:
    """`4 hops  q4 w3. ans → w9.  (w3. → w1. → w5. → w7. → w9.: 4 steps)`, a line for each question."""

    def words(start: int, stop: int, of: Any = sample.tokens) -> str:
        return _clip(task.vocab.text(of[start:stop].tolist()))

    labels = [_label(task, query.slice) for query in sample.queries]
    for label, query in zip(labels, sample.queries, strict=True):
        line = Text(f"  {label:{max(map(len, labels))}}  ", "dim")
        line.append(words(query.question_start, query.start), STYLES["question"]).append(" → ")
        line.append(words(query.start, query.stop, sample.labels), STYLES["answer"])
        why = task.explain(sample, query)
        yield line.append(f"  ({why})", "dim") if why else line


def _label(task: "later.tasks.Task", where: "later.tasks.Slice") -> str:
    return ", ".join(slice_label(TaskInfo.of(task), slice_key({key: value})) for key, value in where.items())


def _clip(text: str) -> str:
    """The beginning and end of a long text, cut between words."""
    if len(text) <= WIDTH:
        return text
    half = WIDTH // 2
    return f"{text[:half].rpartition(' ')[0]} … {text[-half:].partition(' ')[2]}"


def _print_grades(task: "later.tasks.Task", result: "later.answers.Graded", n: int, split: str, seed: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{result.samples:,} of {n:,} samples of {task!r} answered ({split} split, seed {seed})")
    for reason, lines in result.refused.items():
        console.print(f"not graded, {reason}: {len(lines):,} (at {_clip(later.answers.numbers(lines))})", markup=False)
    table = Table("", "right", "of", "", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.slices:
        right, total = row["correct"], row["total"]
        table.add_row(_label(task, row["slice"]), f"{right:,}", f"{total:,}", percent(right / total))
    console.print(table)
    for wrong in result.wrong:
        console.print(f"sample {wrong.index}, {_label(task, wrong.verdict.slice)}: {wrong.verdict.why}", markup=False)
