"""The results of `canonlm eval` as tables; shares in percent, with their standard errors."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from canonlm.report.blocks import Cell
from canonlm.report.format import count_of, number, percent, shown, signed
from canonlm.runs.answers import read_answers
from canonlm.runs.documents import differences
from canonlm.runs.evaluated import Evaluated, difference
from canonlm.runs.load import MAX_LABEL, Run
from canonlm.runs.rows import DAMAGE, one_line

PAIRED = "bits_per_byte, paired"

SUITES = {
    "multihop": (
        "Birth years in a text",
        "Share of questions whose birth year was written exactly; 1hop-2k: stated directly, among 2,000 "
        "tokens of other text.",
    ),
    "babilong": (
        "Stories in a longer text",
        "Share of right answers; babilong-qa1-2k: the first kind of question, in 2,000 tokens.",
    ),
    "harness": ("Benchmarks", "Tasks of the lm-evaluation-harness, as it scores them."),
    "text": (
        "Documents",
        "Bits per byte: the mean over documents. Paired: its difference from the first model that has it, with a 95 % "
        "interval over documents. Perplexity: of all tokens, comparable with the same tokenizer only.",
    ),
    "playground": ("Synthetic tasks", "Accuracy of the saved model; x1.5: beyond the length it was trained at."),
}


def value(score: Mapping[str, Any]) -> str:
    """`93.0% ± 1.1`, `19.8 ± 0.4`"""
    stderr = score["stderr"]
    if not score["share"]:
        return number(score["value"]) + ("" if stderr is None else f" ± {number(stderr)}")
    return percent(score["value"]) + (f" ± {100 * stderr:.1f}" if stderr else "")  # 0: all answers were alike


def rows(evaluated: Sequence[Evaluated], suite: str) -> list[tuple[str, str, list[str]]]:
    """(name, measure, value of each model or "–"). A name with several settings, in one model or in two, has rows for
    each of them, and the name then shows the difference."""
    entries_by_question: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for place, one in enumerate(evaluated):
        for entry in one.entries:
            if entry["suite"] == suite:
                noted = json.dumps(entry["settings"], sort_keys=True)
                entries_by_question.setdefault((entry["name"], noted), {})[place] = entry
    lines = []
    for (name, noted), entries in entries_by_question.items():
        others = [json.loads(other) for other_name, other in entries_by_question if other_name == name]
        title = name + _difference(json.loads(noted), others)
        cells = {
            place: {score["measure"]: value(score) for score in entry["scores"] if not score["slice"]}
            for place, entry in entries.items()
        }
        for measure in dict.fromkeys(measure for cell in cells.values() for measure in cell):
            lines.append((title, measure, [cells.get(place, {}).get(measure, "–") for place in range(len(evaluated))]))
        if suite == "text" and len(entries) > 1:
            gaps = _paired(evaluated, entries)
            lines.append((title, PAIRED, [gaps.get(place, "–") for place in range(len(evaluated))]))
    return lines


def _paired(evaluated: Sequence[Evaluated], entries: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """For each model but the first its difference from the first, paired by document: `−0.0065 (−0.0071 to −0.0058)`.
    Models whose answers are not there, or are damaged, have none."""
    answers = {}
    for place, entry in entries.items():
        with suppress(*DAMAGE, OSError):
            answers[place] = read_answers(evaluated[place].path.parent, entry)
    if len(answers) < 2 or min(answers) != min(entries):
        return {}
    (first, of_first), *others = answers.items()
    gaps = {first: "the first"}
    for place, rows in others:
        with suppress(*DAMAGE, OSError):
            gap = differences(of_first, rows, same_tokens=False)[0]
            ends = "" if gap.interval is None else f" ({signed(gap.interval.low)} to {signed(gap.interval.high)})"
            gaps[place] = f"{signed(gap.mean)}{ends}"
    return gaps


def _difference(settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """` (people=3)`"""
    parts = ", ".join(f"{key}={shown(value)}" for key, value in difference(settings, others).items())
    return f" ({one_line(parts, MAX_LABEL)})" if parts else ""


def years_of(evaluated: Mapping[str, Evaluated], runs: Iterable[Run]) -> dict[str, dict[str, tuple[float, int]]]:
    """(share right, questions) of the birth-year questions that each finished run was asked after its last step, by
    their names. A name with several settings, in one run or in two, also shows the difference."""
    answers: dict[str, dict[tuple[str, str], tuple[float, int]]] = {}
    for run in runs:
        answers[run.name] = {}
        for entry in _after_the_last_step(evaluated, run):
            question = entry["name"], json.dumps(entry["settings"], sort_keys=True)
            for score in entry["scores"] if entry["suite"] == "multihop" else ():
                if score["measure"] == "exact" and not score["slice"] and score["n"]:
                    answers[run.name][question] = (score["value"], score["n"])
    questions = dict.fromkeys(question for of_run in answers.values() for question in of_run)
    titles = {
        (name, noted): name + _difference(json.loads(noted), [json.loads(n) for other, n in questions if other == name])
        for name, noted in questions
    }
    return {run: {titles[question]: share for question, share in of_run.items()} for run, of_run in answers.items()}


def _after_the_last_step(evaluated: Mapping[str, Evaluated], run: Run) -> Iterator[Mapping[str, Any]]:
    last = run.result and run.result.steps
    for name, one in evaluated.items() if run.finished else ():
        if name.startswith(f"{run.name}/") and one.model.get("step") in (None, last):
            yield from one.entries


def suite_tables(evaluated: Sequence[Evaluated]) -> Iterator[tuple[str, str, list[str], list[list[Cell]]]]:
    """(title, note, head, rows) for each suite; a column for each model that it evaluated."""
    for suite in dict.fromkeys(entry["suite"] for one in evaluated for entry in one.entries):
        models = [one for one in evaluated if any(entry["suite"] == suite for entry in one.entries)]
        title, about = SUITES.get(suite, (suite, ""))
        note = f"{count_of(len(models), 'model')}. {about} ± is one standard error."
        head = ["task", "measure", *(one.label for one in models)]
        yield title, note, head, [[name, measure, *cells] for name, measure, cells in rows(models, suite)]
