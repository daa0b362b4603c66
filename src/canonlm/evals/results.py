"""`results.json` of an evaluated model, and the answers behind it, kept while they come in.

    OUT/results.json                 {"model": {…}, "results": [{"suite", "name", "settings", "scores": […], …}, …]}
    OUT/answers/multihop-1hop-2k-….jsonl   one line per question: index, slice, answer, said, right

An entry is known by its suite, name and settings. What is there is not asked again; half a line, which a killed process
leaves, is.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from canonlm.errors import expected
from canonlm.evals.questions import Questions, Score, scores
from canonlm.train.files import write_json

PACKAGES = ("canonlm", "torch", "transformers", "lm_eval")

Write = Callable[[Sequence[str], int, Sequence[str]], Iterator[tuple[int, str]]]
"""(prompts, most tokens, stop strings) → (index of a prompt, text), as they are written."""


class Results:
    """The folder OUT of one model. ValueError when it holds those of another."""

    def __init__(self, out: Path, model: Mapping[str, Any]) -> None:
        self.out, self.path = out, out / "results.json"
        found = _read(self.path)
        if found and found["model"].get("fingerprint") != model.get("fingerprint"):
            what = f"a folder without results, or with those of this model; it has those of {found['model']['source']}"
            raise expected("--out", what, str(out))
        self._entries: list[dict[str, Any]] = found.get("results", [])
        self._model = dict(model)

    def find(self, suite: str, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The finished entry, if there is one."""
        return next((entry for entry in self.entries(suite, settings) if entry["name"] == name), None)

    def entries(self, suite: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All finished entries of a suite with these settings."""
        return [entry for entry in self._entries if (entry["suite"], entry["settings"]) == (suite, dict(settings))]

    def add(
        self, suite: str, name: str, settings: Mapping[str, Any], found: Sequence[Score], seconds: float
    ) -> dict[str, Any]:
        """Keep an entry; the file is whole at any time."""
        entry = {
            "suite": suite,
            "name": name,
            "settings": dict(settings),
            "scores": [asdict(score) for score in found],
            "seconds": round(seconds, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {package: number for package in PACKAGES if (number := _version(package))},
        }
        self._entries.append(entry)
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"model": self._model, "results": self._entries})
        return entry

    def ask(
        self,
        suite: str,
        questions: Questions,
        settings: Mapping[str, Any],
        write: Write,
        on_answer: Callable[[int], None] = lambda answered: None,
    ) -> list[Score]:
        """Ask what has no answer yet; each answer is on disk before the next batch is asked."""
        path = self.out / "answers" / f"{suite}-{questions.name}-{_key(suite, questions.name, settings)[:8]}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _rows(path)
        left = [index for index in range(len(questions)) if index not in rows]
        on_answer(len(rows))
        with path.open("a", encoding="utf-8") as file:
            prompts = [questions[index].prompt for index in left]
            for place, said in write(prompts, questions.most, questions.stop) if left else ():
                index = left[place]
                question = questions[index]
                row = {"index": index, "slice": dict(question.slice), "answer": question.answer, "said": said}
                row["right"] = questions.grade(question, said)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                rows[index] = row
                on_answer(len(rows))
        return scores([rows[index] for index in sorted(rows)], questions.measures)


def _key(suite: str, name: str, settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([suite, name, settings], sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if {"model", "results"} <= found.keys() else {}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, OSError) as error:
        raise expected("--out", f"a folder whose results.json can be read ({error})", str(path.parent)) from None


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """The answers that are there; a line that was cut is removed."""
    if not path.exists():
        return {}
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    rows = [json.loads(line) for line in whole]
    size = sum(len(line.encode()) for line in whole)
    if size < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(size)
    return {row["index"]: row for row in rows}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
