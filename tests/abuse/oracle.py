"""A command may either give its result for a damaged folder or refuse the folder in one line, and nothing else."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from abuse.cases import Case
from abuse.damage import SPARSE, Damage
from abuse.forks import Outcome

from canonlm.runs.rows import TIMINGS

CODES = {0, 1, 2}
STARTS = ("os.fork", "os.posix_spawn", "os.exec", "subprocess.Popen")
LONGEST = 5_100  # characters of a message
UNTIMED = {*TIMINGS, "train_seconds", "seconds", "finished"}
_NAMES = re.compile(r"canonlm: (\S.*?: \S|unknown |.*\S+\.\w{2,})")


def complaints(case: Case, outcome: Outcome, folder: Path, done: Damage, before: object) -> Iterator[str]:
    """All problems of an outcome, as texts that begin with their kind. `before` is the undamaged result."""
    if outcome.ended:
        questions = case.large and done.kind in {"value", "bytes"} and outcome.ended.startswith("took")
        long = case.streams and done.words == SPARSE and "GB" not in outcome.ended
        if not (questions or long):
            yield f"hang: {outcome.ended}"
        return
    if "Traceback (most recent call last)" in outcome.err or outcome.code not in CODES:
        yield f"traceback: {(outcome.err.strip().splitlines() or ['?'])[-1][:300]}"
    elif outcome.code == 2:
        lines = outcome.err.splitlines()
        if len(lines) != 1 or not outcome.err.startswith("canonlm: "):
            yield f"message: expected one line, got {len(lines)}: {outcome.err[:300]!r}"
        elif not (_NAMES.match(lines[0]) or any(Path(file).name in lines[0] for file in done.files)):
            yield f"message: names neither key nor file: {lines[0][:300]}"
        elif len(lines[0]) > LONGEST:
            yield f"message: of {len(lines[0]):,} characters: {lines[0][:200]}"
    elif outcome.code == 1 and not outcome.err.startswith("canonlm: "):
        yield f"message: exit code 1 and {outcome.err[:300]!r}"
    for name, text in (("output", "" if case.written else outcome.out), ("error", outcome.err)):
        if control := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x9b\u202e]", text):
            around = text[max(0, control.start() - 80) : control.end() + 40]
            yield f"terminal: {control[0]!r} in standard {name}: {around!r}"
    for event in outcome.events:
        if not (case.children and event.startswith(STARTS)):
            yield f"event: {event}"
    if outcome.leftovers:
        yield f"leftovers: {len(outcome.leftovers)} processes"
    if (folder / "pwned").exists():
        yield "event: code of the folder ran"
    if left := [path.name for path in folder.rglob("*.tmp-*") if not path.name.endswith("-stranger")]:
        yield f"leftovers: {left[0]}"
    silent = outcome.code == 0 and not outcome.err.strip()
    sealed = bool(done.files) and all(fnmatch(file, case.sealed) for file in done.files)
    if silent and sealed and result(case, outcome, folder) != before:
        yield "difference: another result, and not a word"


def result(case: Case, outcome: Outcome, folder: Path) -> dict[str, str]:
    """The result of a command, as texts or digests by name, without timings."""
    outcomes = {"stdout": outcome.out} if case.reported else {}
    for pattern in case.result:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                outcomes[str(path.relative_to(folder))] = _content(path)
    return outcomes


def _content(path: Path) -> str:
    content = path.read_bytes()
    with suppress(ValueError):  # damaged, no longer JSON
        if path.suffix == ".json":
            return json.dumps(untimed(json.loads(content)))
        if path.suffix == ".jsonl":
            return json.dumps([untimed(json.loads(line)) for line in content.splitlines()])
    return hashlib.sha256(content).hexdigest()


def untimed(value: object) -> object:
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in UNTIMED}
    return [untimed(item) for item in value] if isinstance(value, list) else value
