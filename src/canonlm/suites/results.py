"""`results.json` of an evaluated model, and the answers behind it, kept while they come in.

    OUT/results.json                 {"model": {…}, "results": [{"suite", "name", "settings", "scores": […], …}, …]}
    OUT/answers/multihop-1hop-2k-….jsonl   one line per question: index, slice, answer, said, right

An entry is known by its suite, name and settings. What is there is not asked again; half a line, which a killed process
leaves, is. Several processes may write to one OUT, each to its own entries.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from canonlm.errors import expected, writing
from canonlm.files import write_json
from canonlm.suites.questions import Question, Questions, Score, scores

PACKAGES = ("canonlm", "torch", "transformers", "lm_eval")

Write = Callable[[Sequence[str], int, Sequence[str]], Iterator[tuple[int, str]]]
"""(prompts, most tokens, stop strings) → (index of a prompt, text), as they are written."""


class Results:
    """The folder OUT of one model. ValueError when it holds those of another: other weights, or another tokenizer."""

    def __init__(self, out: Path, model: Mapping[str, Any]) -> None:
        self.out, self.path = out, out / "results.json"
        self._model = dict(model)
        self._read()

    def find(self, suite: str, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The finished entry, if there is one."""
        return next((entry for entry in self.entries(suite, settings) if entry["name"] == name), None)

    def entries(self, suite: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All finished entries of a suite with these settings."""
        return [entry for entry in self._read() if (entry["suite"], entry["settings"]) == (suite, dict(settings))]

    def add(
        self, suite: str, name: str, settings: Mapping[str, Any], found: Sequence[Score], seconds: float
    ) -> dict[str, Any]:
        """Keep an entry, in place of an older one of the same name and settings; the file is whole at any time."""
        entry = {
            "suite": suite,
            "name": name,
            "settings": dict(settings),
            "scores": [asdict(score) for score in found],
            "seconds": round(seconds, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {package: number for package in PACKAGES if (number := _version(package))},
        }
        with _writing(self.out), FileLock(self.out / ".results.lock"):
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
    ) -> list[Score]:
        """Ask what has no answer yet; each answer is on disk before the next batch is asked.

        A question is a function of its number, so more of them (`n`) take up the answers to fewer. ValueError: another
        process is asking the same.
        """
        whose = {key: self._model.get(key) for key in _IDENTITY}
        key = _key(suite, questions.name, {**settings, "n": None}, whose)
        path = self.out / "answers" / f"{suite}-{questions.name}-{key[:8]}.jsonl"
        with _writing(path.parent):
            path.touch()
        try:
            with FileLock(path.with_name(f".{path.stem}.lock"), blocking=False):
                return self._ask(path, questions, write, on_answer)
        except Timeout:
            raise ValueError(f"{path}: another process is asking {questions.name}") from None

    def _ask(self, path: Path, questions: Questions, write: Write, on_answer: Callable[[int], None]) -> list[Score]:
        rows = {index: row for index, row in _rows(path).items() if index < len(questions)}
        left = {index: questions[index] for index in range(len(questions)) if index not in rows}
        numbers = list(left)
        on_answer(len(rows))
        with path.open("a", encoding="utf-8") as file:
            for place, said in self._written(questions, left, write):
                index, question = numbers[place], left[numbers[place]]
                row = {"index": index, "slice": dict(question.slice), "answer": question.answer, "said": said}
                row["right"] = questions.grade(question, said)
                with _writing(path.parent):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                rows[index] = row
                on_answer(len(rows))
        return scores([rows[index] for index in sorted(rows)], questions.measures)

    @staticmethod
    def _written(questions: Questions, left: Mapping[int, Question], write: Write) -> Iterator[tuple[int, str]]:
        try:
            prompts = [question.prompt for question in left.values()]
            yield from write(prompts, questions.most, questions.stop) if left else ()
        except ValueError as error:
            raise ValueError(f"{questions.name}: {error}") from None

    def _read(self) -> list[dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            model, entries = found["model"], list(found["results"])
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise expected("--out", "a folder", str(self.out)) from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            what = (
                f"a folder whose results.json can be read (it cannot: {error}; without it, the answers are still there)"
            )
            raise expected("--out", what, str(self.out)) from None
        for key in _IDENTITY:
            if model.get(key) != self._model.get(key):
                what = "a folder without results, or with those of this model and tokenizer; it has those of "
                what += str(model.get("source"))
                raise expected("--out", what, str(self.out))
        return entries


_IDENTITY = ("fingerprint", "tokenizer")
"""What of a model tells it from another."""


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Into the folder, which is made where it is not there."""
    with writing("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield


def _key(*what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """The answers that are there; a line that was cut is removed."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.split(b"\n") if line]
        found = {row["index"]: row for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a damaged line ({error}); remove it to ask these questions again") from None
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
