"""Grades a file of answers from any model: JSON lines or Parquet, with an index and answers.

    {"index": 0, "answers": [[17, 4], [9]]}         token ids, one list per answer
    {"index": 1, "answers": ["w3 w7.", "w9."]}      the same in the tokens' names
    {"index": 2, "answers": [17, 4]}                for a sample with only one answer; "w3 w7." works, too

null stands for no answer, or for none at all, which is wrong. The column `answers` of a dump has the positions of
answers; questions that share an answer (the first item, the whole list) may also have one each. A line that cannot be
parsed is counted and listed; it is neither right nor wrong.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from canonlm.core.errors import expected
from canonlm.core.untrusted import open_regular
from canonlm.data.parquet_guard import check_pages
from canonlm.data.reading import TOO_LONG, lines
from canonlm.tasks import Sample, Task, Verdict
from canonlm.tasks.rows import spans
from canonlm.tasks.tally import Tally


@dataclass(frozen=True)
class Wrong:
    """A wrong answer: the index of its sample, the number of its question (0, 1, …), and the verdict."""

    index: int
    question: int
    verdict: Verdict


@dataclass
class Graded:
    """The result. `slices` as in an evaluation; `refused`: reason → the numbers of the lines (rows of a Parquet file
    are counted from 0, lines from 1)."""

    samples: int
    slices: list[dict[str, Any]]
    wrong: list[Wrong]
    refused: dict[str, list[int]]


class _BadLine(ValueError):
    """The reason why a line cannot be graded, in words that do not depend on the line."""


def grade_file(
    task: Task,
    path: Path,
    *,
    n: int,
    split: str = "train",
    seed: int = 0,
    keep_wrong: int = 5,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Graded:
    """Grade the answers in `path` to samples 0 … n - 1 of (split, seed).

    Keeps the first `keep_wrong` wrong answers; on_progress gets the number of samples graded so far. ValueError: the
    file cannot be read, or no line of it can be graded.
    """
    task.sample(split, seed, 0)  # raises for a wrong split or seed
    tally = Tally(task.slices() if split == "test" else ())
    result = Graded(0, [], [], {})
    graded: set[int] = set()
    for number, entry in _entries(path):
        try:
            index = _index(entry, n)
            if index in graded:
                raise _BadLine("a repeated index")
            sample = task.sample(split, seed, index)
            verdicts = task.grade(sample, _answers(task, sample, entry["answers"]))
        except _BadLine as error:
            result.refused.setdefault(str(error), []).append(number)
            continue
        graded.add(index)
        for question, verdict in enumerate(verdicts):
            tally.add(verdict)
            if not verdict.correct and len(result.wrong) < keep_wrong:
                result.wrong.append(Wrong(index, question, verdict))
        on_progress(len(graded))
    if not graded:
        reasons = ", ".join(f"{reason} ({numbers(lines)})" for reason, lines in result.refused.items()) or "nothing"
        raise ValueError(f'{path}: expected lines such as {{"index": 0, "answers": [[5, 7]]}}, got {reasons}')
    result.samples, result.slices = len(graded), [row for row in tally.rows() if row["total"]]
    return result


def numbers(lines: list[int]) -> str:
    """`2, 5-90, 93`"""
    runs = [[line for _, line in run] for _, run in groupby(enumerate(lines), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, entry); for a bad line, the entry is a _BadLine."""
    try:
        with open_regular(path) as file:
            if file.read(4) == b"PAR1":
                yield from _rows(file, path)
                return
            file.seek(0)
            for number, (line, _) in enumerate(lines(file), 1):
                if line is None:
                    yield number, _BadLine(TOO_LONG)
                elif line.strip():
                    yield number, _parsed(line)
    except (pa.ArrowException, UnicodeDecodeError):
        raise expected("--verify", "a complete Parquet file", str(path)) from None
    except OSError as error:
        reason = " ".join(str(error.strerror or error).split())  # Arrow's own have several lines
        raise expected("--verify", f"a readable file ({reason})", str(path)) from None


def _rows(file: IO[bytes], path: Path) -> Iterator[tuple[int, Any]]:
    table, row = pq.ParquetFile(file), 0
    if missing := {"index", "answers"} - set(table.schema_arrow.names):
        raise ValueError(f"{path}: expected the columns index and answers, got no {' and no '.join(sorted(missing))}")
    for group in range(table.num_row_groups):
        try:
            check_pages(file, table, group, ("index", "answers"))
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read ({error})") from None
        for batch in table.iter_batches(columns=["index", "answers"], row_groups=[group], batch_size=4096):
            for entry in batch.to_pylist():
                yield row, entry
                row += 1


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return _BadLine("not JSON")


def _index(entry: Any, n: int) -> int:
    if isinstance(entry, _BadLine):
        raise entry
    if not isinstance(entry, dict):
        raise _BadLine("not an object with index and answers")
    for key in ("index", "answers"):
        if key not in entry:
            raise _BadLine(f"no {key}")
    index = entry["index"]
    if not isinstance(index, int) or isinstance(index, bool):
        raise _BadLine("an index that is not an integer")
    if not 0 <= index < n:
        raise _BadLine(f"an index that is not in 0 … {n - 1}")
    return index


def _answers(task: Task, sample: Sample, entry: Any) -> list[list[Any]]:
    """One list of tokens per query."""
    if entry is None:
        return [[] for _ in sample.queries]
    if isinstance(entry, str) or (isinstance(entry, list) and any(isinstance(part, int) for part in entry)):
        entry = [entry]
    if not isinstance(entry, list):
        raise _BadLine("answers that are not lists of tokens")
    answers = [[] if part is None else _tokens(task, part) for part in entry]
    if len(answers) == len(sample.queries):
        return answers
    starts = [start for start, _ in spans(sample)]
    if len(answers) != len(starts):
        raise _BadLine("more or fewer answers than questions")
    return [answers[starts.index(query.start)] for query in sample.queries]


def _tokens(task: Task, part: Any) -> list[Any]:
    if isinstance(part, str):
        return _from_text(task, part)
    if not isinstance(part, list) or any(isinstance(t, bool) or not isinstance(t, int | str) for t in part):
        raise _BadLine("answers that are not lists of tokens")
    return [task.vocab.ids.get(token, token) if isinstance(token, str) else token for token in part]


def _from_text(task: Task, text: str) -> list[Any]:
    """The tokens of names separated by blanks; if tokens are pieces of text, those of the text after a prompt."""
    if not hasattr(task.vocab, "encode"):
        return [task.vocab.ids.get(name, name) for name in text.split()]
    try:
        text.encode("utf-8")  # ValueError for half of a surrogate pair
        return task.vocab.encode(f" {text.strip()}")
    except ValueError:  # it has tokens that the task never uses: a wrong answer, shown as it is
        return [text]
