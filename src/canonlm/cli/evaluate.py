"""`canonlm eval`: evaluate a saved model on a suite of questions, and write results.json."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from canonlm.cli import later
from canonlm.cli.options import Device, Dtype, Model, Step, Tokenizer, TrustModel, Variant, opened
from canonlm.cli.status import keep_going, load_torch, say, wide_console
from canonlm.core.errors import expected, plain
from canonlm.core.untrusted import path_inside
from canonlm.core.user_folders import expanded
from canonlm.report.evals import value
from canonlm.runs.evaluated import checked_entry
from canonlm.runs.rows import one_line
from canonlm.suites.questions import NOT_FINITE, not_finite_of

SETTINGS = typer.Argument(
    help='Settings of the suite, such as k=2 background=1000. A list (in quotes: "k=[1,2]") evaluates each value. '
    "For text: more models, and a file of documents.",
    metavar="KEY=VALUE",
)
SUITE = typer.Option(help="multihop, babilong, harness, text or playground.")
TASKS = typer.Option(
    help="For the harness: names of tasks or groups, separated by commas. `canonlm lm-eval ls tasks` lists them."
)
OUT = typer.Option(help="Folder for results.json and the answers. Default: evals/ in a run's folder, or evals/MODEL.")
PUBLISHED = typer.Option("--published", help="Use the settings of the published results.")
BATCH_SIZE = typer.Option(help="Questions at a time. Default: found automatically.", min=1)
TRUST = typer.Option("--trust", help="Run the functions and templates in somebody else's task files for the harness.")
BOS = typer.Option("--bos", help="Begin every prompt with the tokenizer's BOS token.")
BEYOND = typer.Option("--beyond-context", help="Also read prompts that are longer than the model's context.")


_DOCUMENTS = (".jsonl", ".json", ".txt")  # the usual endings of a file of documents


def evaluate(
    model: Model,
    settings: Annotated[list[str] | None, SETTINGS] = None,
    suite: Annotated[str, SUITE] = ...,  # type: ignore[assignment]
    tasks: Annotated[str | None, TASKS] = None,
    published: Annotated[bool, PUBLISHED] = False,
    out: Annotated[Path | None, OUT] = None,
    step: Step = None,
    variant: Variant = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = "auto",
    batch_size: Annotated[int | None, BATCH_SIZE] = None,
    bos: Annotated[bool, BOS] = False,
    beyond_context: Annotated[bool, BEYOND] = False,
    trust_remote_code: TrustModel = False,
    trust: Annotated[bool, TRUST] = False,
) -> int:
    """Ask a saved model the questions of a suite, and keep its answers and scores.

    * **multihop**: who was born when, in a text: directly, or by way of people who share a birth year
    * **babilong**: where people and things are, in a story hidden in a longer text
    * **harness**: any task of the lm-evaluation-harness (`pip install 'canonlm[eval]'`)
    * **playground**: the synthetic task that a run of `canonlm play` was trained on
    * **text**: bits per byte of documents, and how models differ: `canonlm eval A B --suite text my.jsonl`

    For example: `canonlm eval runs/debug --suite multihop k=1 people=3`

    Stop it at any time: the same command continues where it stopped. `canonlm report` shows the results.
    """
    named: dict[str, Any] = {}
    models = [model]
    if suite == "text":
        models, named["file"], settings = _models_and_file([model, *(settings or [])])
    if tasks is not None:
        if suite != "harness":
            raise ValueError("--tasks only works with --suite harness")
        named["tasks"] = [name.strip() for name in tasks.split(",") if name.strip()]
    elif suite == "harness" and not published and not any(pair.startswith("tasks=") for pair in settings or []):
        raise ValueError("--suite harness needs --tasks, such as piqa,arc_easy, or --published")
    planned = later.suites.plan(suite, settings or [], published, **named)
    if suite == "harness" and not trust:
        later.harness.refuse_code(planned)
    keep_going()
    load_torch()
    options = later.suites.PromptOptions(batch_size, bos, beyond_context or published)
    read: list[_Read] = []
    code = 0
    for number, each in enumerate(models, 1):
        subject = opened(
            each, step=step, variant=variant, tokenizer=tokenizer, dtype=dtype, device=device,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        folder = _folder(each, subject.about) if out is None else out
        if out is not None and len(models) > 1:
            folder = out / f"{number}-{expanded(each).resolve().name}"
        try:
            with _progress() as bar:
                entries = later.suites.run(suite, planned, subject, options, folder, _Bar(bar))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the answers so far are in {folder}. The same command continues.") from None
        say(f"results: {folder / 'results.json'}")
        code = max(code, _warn(entries))
        read.append(_Read(each, subject.about["tokenizer"], folder, entries))
    for place in range(len(planned)) if len(read) > 1 else ():
        _compare(read, place)
    return code


class _Read(NamedTuple):
    """The results of a model: its tokenizer, their folder, their entries."""

    model: str
    tokenizer: str
    folder: Path
    entries: Sequence[Mapping[str, Any]]

    def answers(self, place: int) -> "list[later.run_answers.Row]":
        return later.run_answers.read_answers(self.folder, self.entries[place])


def _models_and_file(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """`A B my.jsonl n=100`: the models, the file of documents, the settings."""
    files = [word for word in words if os.path.isfile(expanded(word))]
    settings = [word for word in words if "=" in word and not os.path.exists(expanded(word))]
    models = [word for word in words if word not in (*files, *settings)]
    if not files and (missing := [word for word in models if Path(word).suffix.lower() in _DOCUMENTS]):
        raise expected("MODEL", "a file of documents that exists", missing[0])
    if len(files) != 1 or not models:
        what = "models and one file of documents, as in `canonlm eval A B --suite text my.jsonl`"
        raise expected("MODEL", what, " ".join(words))
    return models, files[0], settings


def _compare(read: Sequence[_Read], place: int) -> None:
    """Print the differences of each model from the first, paired by document."""
    first, theirs = read[0], read[0].answers(place)
    table = Table("minus the first", "", "difference", "95% interval", "documents", box=None, padding=(0, 2, 0, 0))
    for other in read[1:]:
        alike = other.entries[place]["settings"] == first.entries[place]["settings"]  # also the context
        same_tokens = alike and other.tokenizer == first.tokenizer
        for each in later.documents.differences(theirs, other.answers(place), same_tokens):
            where = "" if each.position is None else f", after {each.position:,} tokens or more"
            between = "" if each.interval is None else f"{each.interval.low:+.4f} to {each.interval.high:+.4f}"
            table.add_row(
                plain(other.model), f"{each.measure}{where}", f"{each.mean:+.4f}", between, f"{each.documents:,}"
            )
    context = first.entries[place]["settings"]["context"]
    say(f"Differences from {first.model}, paired by document, with {context:,} tokens at once; negative is better.")
    wide_console().print(table)


def _warn(entries: Sequence[Mapping[str, Any]]) -> int:
    """Print which scores mean nothing. 1 if the logits were not finite in all questions of an entry, else 0."""
    code = 0
    for entry in entries:
        if (counted := not_finite_of(entry)) is not None:
            not_finite, questions = counted
            where = f"{not_finite:,} of {questions:,} {'question' if questions == 1 else 'questions'}"
            say(
                f"canonlm: {one_line(entry['name'])}: the model's logits are not finite (NaN) in {where}",
                file=sys.stderr,
            )
            code = max(code, int(not_finite >= questions))
    return code


def _folder(model: str, about: Mapping[str, Any]) -> Path:
    """The default of --out: in a run's folder, by step; else by the model's name."""
    place = expanded(model)
    if about.get("step") is not None:
        return path_inside(place, f"evals/step-{about['step']:08d}")
    return Path("evals") / (place.resolve().name if os.path.exists(place) else model.replace("/", "--"))


def _progress() -> Progress:
    """A bar on a terminal; in a log, a line for every entry."""
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class _Bar:
    def __init__(self, bar: Any) -> None:
        self.bar, self.current = bar, None

    def begin(self, name: str, questions: int | None) -> None:
        self.current = self.bar.add_task(name, total=questions)

    def advance(self, answered: int) -> None:
        self.bar.update(self.current, completed=answered)

    def end(self, entry: Mapping[str, Any], again: bool) -> None:
        if self.current is not None:
            self.bar.remove_task(self.current)
            self.current = None
        self.bar.console.print(
            plain(_line(entry)) + ("  (as before)" if again else ""), highlight=False, markup=False, soft_wrap=True
        )


def _line(entry: Mapping[str, Any]) -> str:
    """`1hop-2k  exact 93.0% ± 1.1  year 94.2% ± 1.0  (n = 500)`"""
    scores = [
        score for score in checked_entry(entry)["scores"] if not score["slice"] and score["measure"] != NOT_FINITE
    ]
    measures = [f"{score['measure']} {value(score)}" for score in scores]
    count = f"  (n = {scores[0]['n']:,})" if scores and scores[0]["n"] else ""
    return f"{one_line(entry['name'])}  {'  '.join(measures)}{count}"
