"""The suites of `canonlm eval`: from settings to entries of results.json."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_origin

from pydantic import BaseModel, ValidationError

from canonlm.core.errors import expected, refused, unknown
from canonlm.core.files import Stamp
from canonlm.core.untrusted import read_text
from canonlm.core.user_folders import expanded
from canonlm.suites.questions import Score
from canonlm.suites.results import Results
from canonlm.suites.settings import RETRIEVAL, PromptOptions, published_settings, settings_class
from canonlm.train.load_config import override

if TYPE_CHECKING:  # it loads torch, and mistakes in settings are reported before
    from canonlm.suites.load_model import Subject

SUITES = {
    "multihop": "birth years in a text, stated directly or through a chain of k people",
    "babilong": "bAbI's stories (qa1 to qa5), hidden in a longer text",
    "harness": "tasks of EleutherAI's lm-evaluation-harness",
    "text": "bits per byte and perplexity of documents, compared by document with other models",
    "playground": "the task that a playground run was trained on, at any difficulty and length",
}


class ProgressReporter(Protocol):
    """Called while a suite runs."""

    def begin(self, name: str, questions: int | None) -> None: ...

    def advance(self, answered: int) -> None: ...

    def end(self, entry: Mapping[str, Any], again: bool) -> None:
        """again: the entry existed already."""
        ...


def plan(suite: str, pairs: Iterable[str], published: bool = False, **options: Any) -> list[BaseModel]:
    """The settings of a suite's evaluations: one for every combination of values, for settings that are lists.

    pairs: `key=value`. published: the settings of the published results, changed by `pairs`. options: more settings, as
    values instead of text.

    ValueError for an unknown suite, setting or value.
    """
    if suite not in SUITES:
        raise unknown("suite", suite, SUITES)
    raw: dict[str, Any] = dict(options)
    pairs = list(pairs)
    for pair in pairs:
        if "=" not in pair:
            raise expected("setting", "key=value, such as n=100", pair)
    override(raw, pairs)
    model, defaults = _settings(suite, published)
    lists = {name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}
    fixed = {key: value for key, value in raw.items() if key in lists or not isinstance(value, list)}
    swept = {key: value for key, value in raw.items() if key not in fixed}
    for key, value in swept.items():
        if not value:
            raise expected(key, "at least one value", value)
    combinations = []
    for default in defaults:
        for values in product(*swept.values()):
            settings = {**default, **fixed, **dict(zip(swept, values, strict=True))}
            if settings not in combinations:
                combinations.append(settings)
    return [_checked(model, options) for options in combinations]


def _settings(suite: str, published: bool) -> tuple[type[BaseModel], list[dict[str, Any]]]:
    if not published:
        defaults: list[dict[str, Any]] = [{}]
    elif suite == "harness":
        from canonlm.suites.harness.run import PUBLISHED

        defaults = [{"tasks": PUBLISHED}]
    elif suite in RETRIEVAL:
        defaults = [each.model_dump() for each in published_settings(suite)]
    else:
        raise expected("--suite", "multihop, babilong or harness with --published", suite)
    return settings_class(suite), defaults


def _checked(model: type[BaseModel], settings: dict[str, Any]) -> BaseModel:
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise refused(error, model) from None


def run(
    suite: str,
    settings: Sequence[BaseModel],
    subject: "Subject",
    options: PromptOptions,
    out: Path,
    progress: ProgressReporter,
) -> list[dict[str, Any]]:
    """Evaluate every setting, entry by entry, and return the entries. Entries already in OUT are not repeated.

    Entries that were finished before a ValueError (a prompt longer than the context, a missing dataset) stay in OUT.
    """
    exam = _Exam(suite, subject, options, Results(out, subject.about), progress)
    ask = {"harness": exam.harness, "playground": exam.playground, "text": exam.text}.get(suite, exam.retrieval)
    return [entry for each in settings for entry in ask(each)]


@dataclass(frozen=True)
class _Exam:
    """A suite and the model that it examines. The methods yield the entries of one evaluation, by the kind of suite."""

    suite: str
    subject: "Subject"
    options: PromptOptions
    results: Results
    progress: ProgressReporter

    def retrieval(self, settings: Any) -> Iterator[dict[str, Any]]:
        from canonlm.suites.generation import Writer

        suite, subject, options = self.suite, self.subject, self.options
        if subject.tokenizer is None:
            what = (
                f"a model with a tokenizer (--tokenizer names one: a folder, a file or bytes), as {suite} asks in words"
            )
            if subject.about["kind"] == "run":
                what = f"a model of text, as {suite} asks in words; "
                what += "a run on a task only has its task's (--suite playground)"
            raise expected("MODEL", what, subject.about["source"])
        noted = {**settings.model_dump(mode="json"), **_contents(settings, ("text", "facts")), "bos": options.bos}

        def ask(rows: list[dict[str, Any]]) -> list[Score]:
            writer = Writer(
                subject.model, subject.tokenizer, batch_size=options.batch_size, bos=options.bos, beyond=options.beyond,
                as_text=True,
            )  # fmt: skip
            questions = getattr(import_module(f"canonlm.suites.{suite}"), RETRIEVAL[suite])(settings, writer.tokens)
            self.progress.begin(questions.name, len(questions))
            more = (noted, writer.write, self.progress.advance, writer.not_finite)
            return self.results.ask(suite, questions, *more)

        yield self._entry(settings.name, noted, ask)

    def playground(self, settings: Any) -> Iterator[dict[str, Any]]:
        from canonlm.suites.playground import evaluations

        for name, noted, scores in evaluations(self.subject, settings, self.options.batch_size):
            self.progress.begin(name, None)
            yield self._entry(name, noted, scores)

    def text(self, settings: Any) -> Iterator[dict[str, Any]]:
        from canonlm.suites import text

        subject = self.subject
        if subject.tokenizer is None:
            what = "a model with a tokenizer (--tokenizer names one: a folder, a file or bytes)"
            raise expected("MODEL", what, subject.about["source"])
        documents, context = text.documents(settings), text.context_of(subject, settings)
        noted = {**settings.model_dump(mode="json"), **_contents(settings, ("file",)), "context": context}

        def answers(done: Collection[int]) -> Iterator[dict[str, Any]]:
            return text.rows(subject, documents, context, self.options.batch_size, self.progress.advance, done)

        name = settings.name
        self.progress.begin(name, len(documents))
        yield self._entry(name, noted, lambda _: self.results.collect(self.suite, name, noted, answers, text.scores))

    def harness(self, settings: Any) -> Iterator[dict[str, Any]]:
        """One entry per task. The harness resolves groups and patterns into tasks only while it runs."""
        from canonlm.suites.harness.run import run_harness

        suite, options, results = self.suite, self.options, self.results
        noted = {**settings.model_dump(mode="json", exclude={"tasks"}), **_contents(settings, ("include",))}
        noted |= {"bos": options.bos, "beyond": options.beyond}
        of_files = {**noted, **_contents(settings, ("tasks",))}
        own = _tasks_in(settings.tasks)
        finished = {entry["name"]: entry for entry in results.entries(suite, noted) if entry["name"] not in own}
        finished |= {entry["name"]: entry for entry in results.entries(suite, of_files) if entry["name"] in own}
        entries, begun = [], time.perf_counter()

        def on_task(name: str, scores: list[Score]) -> None:
            nonlocal begun
            where = of_files if name in own else noted
            entry = finished.get(name) or results.add(suite, name, where, scores, time.perf_counter() - begun)
            begun = time.perf_counter()
            entries.append(entry)
            self.progress.end(entry, again=name in finished)

        run_harness(self.subject, settings, on_task, done=finished, **options._asdict())
        yield from entries

    def _entry(
        self, name: str, noted: dict[str, Any], ask: Callable[[list[dict[str, Any]]], list[Score]]
    ) -> dict[str, Any]:
        """The finished entry, or a new one. ask: appends the answers that are to be kept to its argument."""
        if (entry := self.results.find(self.suite, name, noted)) is not None:
            self.progress.end(entry, again=True)
            return entry
        start, rows = time.perf_counter(), list[dict[str, Any]]()
        scores = ask(rows)
        if rows:
            self.results.keep(self.suite, name, noted, rows)
        entry = self.results.add(self.suite, name, noted, scores, time.perf_counter() - start)
        self.progress.end(entry, again=False)
        return entry


def _contents(settings: BaseModel, keys: Iterable[str]) -> dict[str, str]:
    """`{"text_sha256": …}` for settings that name local files or a folder, as results depend on their contents."""
    digests = {}
    for key in keys:
        value = getattr(settings, key, None) or []
        names = [each for each in value if os.path.isfile(expanded(each))] if isinstance(value, list) else [value]
        stamps = [f"{name} {Stamp.of(file).sha256}" for each in names for name, file in _files_of(expanded(str(each)))]
        if stamps:
            digests[f"{key}_sha256"] = hashlib.sha256("\n".join(stamps).encode()).hexdigest()
    return digests


def _tasks_in(names: Iterable[str]) -> set[str]:
    """The names of tasks and groups in those that are files."""
    texts = (read_text(path) for each in names if os.path.isfile(path := expanded(each)))
    return {name for text in texts for name in re.findall(r"""\b(?:task|group)["']?\s*:\s*["']?([\w.-]+)""", text)}


def _files_of(path: Path) -> Iterator[tuple[Path, Path]]:
    """A file, or the files in a folder, by their names in it; then the others that its YAML files name: data, code
    (`!function code.of`), and files to include."""
    files = [path] if os.path.isfile(path) else sorted(path.rglob("*")) if path.name and os.path.isdir(path) else []
    yield from ((file.relative_to(path), file) for file in files if file.is_file())
    for file in (file for file in files if file.suffix in (".yaml", ".yml") and file.is_file()):
        for word in sorted(set(re.findall(r"[\w./~-]+", read_text(file)))):
            named = (Path(word), file.parent / word, file.parent / f"{word.partition('.')[0]}.py")
            yield from ((Path(word), other) for other in named if os.path.isfile(other) and other not in files)
