"""The suites of `canonlm eval`: what each asks a saved model, from settings to entries of results.json."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_origin

from pydantic import BaseModel, ValidationError

from canonlm.errors import expected, refused, unknown
from canonlm.files import Stamp
from canonlm.suites.opening import Subject
from canonlm.suites.questions import Score
from canonlm.suites.results import Results
from canonlm.train.recipe import override

SUITES = {
    "multihop": "birth years stated in a text, found directly or over k persons",
    "babilong": "bAbI's stories (qa1 to qa5), hidden in a longer text",
    "harness": "tasks of EleutherAI's lm-evaluation-harness",
    "playground": "the task that a playground run was trained on, at any difficulty and length",
}
_RETRIEVAL = {
    "multihop": ("canonlm.suites.multihop", "MultiHopSettings", "MultiHop"),
    "babilong": ("canonlm.suites.babilong", "BabilongSettings", "Babilong"),
}


class Asking(NamedTuple):
    """How a model is asked, whatever the suite."""

    batch_size: int | None = None  # None: found automatically
    bos: bool = False  # whether a prompt begins with the tokenizer's BOS token
    beyond: bool = False  # whether prompts may be longer than the model's context


class Watch(Protocol):
    """What is told while a suite runs."""

    def begin(self, name: str, questions: int | None) -> None: ...

    def advance(self, answered: int) -> None: ...

    def end(self, entry: Mapping[str, Any], again: bool) -> None:
        """again: the entry was there already."""
        ...


def plan(suite: str, pairs: Iterable[str], published: bool = False, **given: Any) -> list[BaseModel]:
    """The settings that a suite is run with: one, or one for every combination where a setting is given as a list.

    pairs: `key=value`. published: the settings of the published results, changed by `pairs`. given: more settings, no
    longer as text.

    ValueError for an unknown suite, setting or value.
    """
    if suite not in SUITES:
        raise unknown("suite", suite, SUITES)
    raw: dict[str, Any] = dict(given)
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
    chosen = []
    for default in defaults:
        for values in product(*swept.values()):
            settings = {**default, **fixed, **dict(zip(swept, values, strict=True))}
            if settings not in chosen:
                chosen.append(settings)
    return [_checked(model, given) for given in chosen]


def _settings(suite: str, published: bool) -> tuple[type[BaseModel], list[dict[str, Any]]]:
    if suite == "harness":
        from canonlm.suites.harness.run import PUBLISHED, HarnessSettings

        return HarnessSettings, [{"tasks": PUBLISHED}] if published else [{}]
    if suite == "playground":
        from canonlm.suites.playground import PlaygroundSettings

        if published:
            raise expected("--suite", "multihop, babilong or harness with --published", suite)
        return PlaygroundSettings, [{}]
    home = import_module(_RETRIEVAL[suite][0])
    defaults = [each.model_dump() for each in home.published_settings()] if published else [{}]
    return getattr(home, _RETRIEVAL[suite][1]), defaults


def _checked(model: type[BaseModel], given: dict[str, Any]) -> BaseModel:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise refused(error, model) from None


def run(
    suite: str, settings: Sequence[BaseModel], subject: Subject, asking: Asking, out: Path, watch: Watch
) -> list[dict[str, Any]]:
    """Ask everything, entry by entry; what OUT has already is not asked again. Returns the entries asked for.

    ValueError from an entry (a prompt longer than the context, a dataset that is not there) leaves those before it in
    OUT.
    """
    results = Results(out, subject.about)
    ask = {"harness": _harness, "playground": _playground}.get(suite, _retrieval)
    return [entry for each in settings for entry in ask(suite, each, subject, asking, results, watch)]


def _retrieval(
    suite: str, settings: Any, subject: Subject, asking: Asking, results: Results, watch: Watch
) -> Iterator[dict[str, Any]]:
    from canonlm.suites.writing import Writer

    if subject.tokenizer is None:
        what = f"a model with a tokenizer (--tokenizer names one: a folder, a file or bytes), as {suite} asks in words"
        if subject.about["kind"] == "run":
            what = f"a model of text, as {suite} asks in words; a run on a task knows its own (--suite playground)"
        raise expected("MODEL", what, subject.about["source"])
    noted = {**settings.model_dump(mode="json"), **_contents(settings, ("text", "facts")), "bos": asking.bos}
    if (entry := results.find(suite, settings.name, noted)) is not None:
        watch.end(entry, again=True)
        yield entry
        return
    writer = Writer(
        subject.model, subject.tokenizer, batch_size=asking.batch_size, bos=asking.bos, beyond=asking.beyond
    )
    questions = getattr(import_module(_RETRIEVAL[suite][0]), _RETRIEVAL[suite][2])(settings, writer.tokens)
    ask = partial(results.ask, suite, questions, noted, writer.write, watch.advance, writer.not_finite)
    watch.begin(questions.name, len(questions))
    yield _entry(results, watch, suite, questions.name, noted, ask)


def _playground(
    suite: str, settings: Any, subject: Subject, asking: Asking, results: Results, watch: Watch
) -> Iterator[dict[str, Any]]:
    from canonlm.suites.playground import evaluations

    for name, noted, scores in evaluations(subject, settings, asking.batch_size):
        watch.begin(name, None)
        yield _entry(results, watch, suite, name, noted, partial(_kept, results, suite, name, noted, scores))


def _kept(
    results: Results, suite: str, name: str, noted: dict[str, Any], scores: Callable[..., list[Score]]
) -> list[Score]:
    rows: list[dict[str, Any]] = []
    found = scores(rows)
    if rows:
        results.keep(suite, name, noted, rows)
    return found


def _harness(
    suite: str, settings: Any, subject: Subject, asking: Asking, results: Results, watch: Watch
) -> Iterator[dict[str, Any]]:
    """The harness says only while it goes on which tasks there are: those of groups and patterns too."""
    from canonlm.suites.harness.run import run_harness

    noted = {**settings.model_dump(mode="json", exclude={"tasks"}), **_contents(settings, ("include",))}
    noted |= {"bos": asking.bos, "beyond": asking.beyond}
    kept = {entry["name"]: entry for entry in results.entries(suite, noted)}
    entries, begun = [], time.perf_counter()

    def on_task(name: str, scores: list[Score]) -> None:
        nonlocal begun
        entry = kept.get(name) or results.add(suite, name, noted, scores, time.perf_counter() - begun)
        begun = time.perf_counter()
        entries.append(entry)
        watch.end(entry, again=name in kept)

    run_harness(
        subject, settings, on_task, done=kept, bos=asking.bos, batch_size=asking.batch_size, beyond=asking.beyond
    )
    yield from entries


def _contents(settings: BaseModel, keys: Iterable[str]) -> dict[str, str]:
    """`{"text_sha256": …}` for settings that name a file or a folder here: what is in them decides results."""
    found = {}
    for key in keys:
        path = Path(str(getattr(settings, key, None) or "")).expanduser()
        files = [path] if os.path.isfile(path) else sorted(path.rglob("*")) if path.name and os.path.isdir(path) else []
        stamps = [f"{file.relative_to(path)} {Stamp.of(file).sha256}" for file in files if file.is_file()]
        if stamps:
            found[f"{key}_sha256"] = hashlib.sha256("\n".join(stamps).encode()).hexdigest()
    return found


def _entry(
    results: Results, watch: Watch, suite: str, name: str, noted: dict[str, Any], ask: Callable[[], list[Score]]
) -> dict[str, Any]:
    """The entry as it was kept, or else asked for now."""
    if (entry := results.find(suite, name, noted)) is not None:
        watch.end(entry, again=True)
        return entry
    start = time.perf_counter()
    found = ask()
    entry = results.add(suite, name, noted, found, time.perf_counter() - start)
    watch.end(entry, again=False)
    return entry
