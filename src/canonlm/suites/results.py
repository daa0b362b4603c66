"""`results.json` of an evaluated model, and files of its answers, written as they come in.

    OUT/results.json                 {"model": {…}, "results": [{"suite", "name", "settings", "scores": […], …}, …]}
    OUT/answers/multihop-1hop-2k-….jsonl   one line per question: index, slice, answer, output, right

Suite, name and settings identify an entry. Questions with an answer are not evaluated again, unless a killed process
left half a line. Several processes may write to one OUT, each to its own entries. An entry has the file of its answers
and their sha256, so that changed answers are detected.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from filelock import Timeout

from canonlm.core.errors import brief, expected, writing
from canonlm.core.files import append, lock, make_folder, write_json, write_text
from canonlm.core.untrusted import read_object
from canonlm.runs.answers import Row, check_answers, damaged, digest, rows_in
from canonlm.runs.answers import read_answers as read_answers  # its name in earlier versions
from canonlm.runs.identity import slug
from canonlm.suites.questions import Questions, Score, scores
from canonlm.suites.questions import not_finite as of_not_finite

PACKAGES = ("canonlm", "torch", "transformers", "lm_eval")

Write = Callable[[Sequence[str], int, Sequence[str]], Iterator[tuple[int, str]]]
"""(prompts, max new tokens, stop strings) → (index of a prompt, text), as they are written."""


class Results:
    """The folder OUT of one model. ValueError if it has results of another: other weights, or another tokenizer."""

    def __init__(self, out: Path, model: Mapping[str, Any]) -> None:
        self.out, self.path = out, out / "results.json"
        self._model = dict(model)
        self._answers: dict[tuple[str, str], Row] = {}  # of new entries, by suite and name
        self._read()

    def find(self, suite: str, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The finished entry, if there is one. ValueError: its answers were changed."""
        entry = next((entry for entry in self.entries(suite, settings) if entry["name"] == name), None)
        if entry is not None:
            check_answers(self.out, entry)
        return entry

    def entries(self, suite: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All finished entries of a suite with these settings."""
        return [entry for entry in self._read() if (entry["suite"], entry["settings"]) == (suite, dict(settings))]

    def add(
        self, suite: str, name: str, settings: Mapping[str, Any], scores: Sequence[Score], seconds: float
    ) -> dict[str, Any]:
        """Add an entry, or replace one of the same name and settings. The file is complete at any time."""
        entry = {
            "suite": suite,
            "name": name,
            "settings": dict(settings),
            "scores": [asdict(score) for score in scores],
            "seconds": round(seconds, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {package: number for package in PACKAGES if (number := _version(package))},
        }
        if (answers := self._answers.pop((suite, name), None)) is not None:
            entry["answers"] = answers
        with self._writing(), lock(self.out / ".results.lock"):
            others = [
                e for e in self._read() if (e["suite"], e["name"], e["settings"]) != (suite, name, dict(settings))
            ]
            write_json(self.path, {"model": self._model, "results": [*others, entry]})
        return entry

    def ask(
        self,
        suite: str,
        questions: Questions,
        settings: Mapping[str, Any],
        write: Write,
        on_answer: Callable[[int], None] = lambda answered: None,
        not_finite: Collection[int] = (),
    ) -> list[Score]:
        """Ask all questions without an answer; each answer is on disk before the next batch.

        A question is a function of its number, so more questions (`n`) reuse the answers to fewer. ValueError: another
        process is asking the same.

        not_finite: the indices of prompts whose logits are not finite, updated by `write` (`Writer.not_finite`).
        """

        def answers(done: Collection[int]) -> Iterator[Row]:
            on_answer(count := len(done))
            numbers = [index for index in range(len(questions)) if index not in done]
            unanswered = [questions[index] for index in numbers]
            try:
                prompts = [question.prompt for question in unanswered]
                for place, text in write(prompts, questions.max_new_tokens, questions.stop) if unanswered else ():
                    question = unanswered[place]
                    row = {"index": numbers[place], "slice": dict(question.slice), "answer": question.answer}
                    row |= {"output": text, "right": questions.grade(question, text)}
                    yield row | ({"finite": False} if place in not_finite else {})
                    on_answer(count := count + 1)
            except ValueError as error:
                raise ValueError(f"{questions.name}: {error}") from None

        def score(rows: Sequence[Row]) -> list[Score]:
            unclear = sum(row.get("finite") is False for row in rows)
            return [*scores(rows, questions.measures), *of_not_finite(unclear, len(rows))]

        return self.collect(suite, questions.name, {**settings, "n": None}, answers, score, len(questions))

    def collect(
        self,
        suite: str,
        name: str,
        settings: Mapping[str, Any],
        answers: Callable[[Collection[int]], Iterator[Row]],
        score: Callable[[Sequence[Row]], list[Score]],
        end: float = math.inf,
    ) -> list[Score]:
        """As `ask`, for a suite whose answers are not texts: `answers(done)` yields those whose `index` is not in
        `done`, and each is on disk before the next. end: answers from this index on do not count."""
        path = self._path(suite, name, settings)
        with self._asking(path, name):
            by_index = {index: row for index, row in rows_in(path, cut=True).items() if index < end}
            with TextIOWrapper(append(path), encoding="utf-8") as file:
                for row in answers(frozenset(by_index)):
                    with self._writing("answers"):
                        file.write(json.dumps(row) + "\n")
                        file.flush()
                    by_index[row["index"]] = row
        rows = [by_index[index] for index in sorted(by_index)]
        with _reading(path):
            results = score(rows)
        self._note(suite, name, path, rows)
        return results

    def keep(self, suite: str, name: str, settings: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Write the answers of an entry that will be added, for a suite that uses neither. `rows` are as in the files
        of `ask`, with `index` from 0."""
        path = self._path(suite, name, settings)
        with self._writing("answers"):
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._note(suite, name, path, rows)

    @contextmanager
    def _writing(self, *names: str) -> Iterator[None]:
        """For writing into the folder, or a folder in it, which is created if it is missing."""
        with writing("--out", self.out):
            make_folder(self.out, *names)
            yield

    @contextmanager
    def _asking(self, path: Path, name: str) -> Iterator[None]:
        """For adding answers to a file, which is created if it is missing. ValueError: another process does it."""
        with self._writing("answers"):
            append(path).close()
        try:
            with lock(path.with_name(f".{path.stem}.lock"), timeout=0):
                yield
        except Timeout:
            raise ValueError(f"{path}: another process is asking {name}") from None

    def _path(self, suite: str, name: str, settings: Mapping[str, Any]) -> Path:
        model = {key: self._model.get(key) for key in _IDENTITY}
        return self.out / "answers" / f"{slug(f'{suite}-{name}')}-{_key(suite, name, settings, model)[:8]}.jsonl"

    def _note(self, suite: str, name: str, path: Path, rows: Sequence[Row]) -> None:
        file = path.relative_to(self.out).as_posix()
        self._answers[suite, name] = {"file": file, "count": len(rows), "sha256": digest(rows)}

    def _read(self) -> list[dict[str, Any]]:
        if self.out.exists() and not self.out.is_dir():
            raise expected("--out", "a folder", str(self.out))
        if not self.path.exists():
            return []
        try:
            content = read_object(self.path)
            model, entries = dict(content["model"]), [_entry(entry) for entry in content["results"]]
        except (ValueError, KeyError, TypeError, OSError) as error:
            what = (
                f"a folder whose results.json can be read (it cannot: {error}; the answers are in files of their own)"
            )
            raise expected("--out", what, str(self.out)) from None
        for key in (*_IDENTITY, *({"checksum"} & model.keys() & self._model.keys())):
            if model.get(key) != self._model.get(key):
                what = "a folder without results, or with those of this model and tokenizer; it has those of "
                what += str(model.get("source"))
                raise expected("--out", what, str(self.out))
        return entries


_IDENTITY = ("fingerprint", "tokenizer")
"""Keys that identify a model."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """For computing scores from answers of a file, which may be damaged."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _entry(entry: Any) -> Row:
    if not isinstance(entry, dict) or not {"suite", "name", "settings", "scores"} <= entry.keys():
        raise ValueError("an entry without a suite, a name, settings and scores")
    kinds = {"measure": str, "value": int | float, "slice": dict}
    for score in entry["scores"] if isinstance(entry["scores"], list) else [None]:
        if not isinstance(score, dict) or not all(isinstance(score.get(key), kind) for key, kind in kinds.items()):
            raise ValueError(f"{brief(str(entry['name']))}: a score without a measure, a value and a slice")
    return entry


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
