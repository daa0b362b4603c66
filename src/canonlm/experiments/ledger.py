"""Results of experiments as CSV files with a row per evaluation.

`export` writes the files from run folders, one for each setting; `read` returns the runs. The package contains the
files of our runs (`OWN_RESULTS`).
"""

import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from canonlm.core.errors import brief, expected, shown, writing
from canonlm.core.files import make_folder, write_json, write_text
from canonlm.core.untrusted import read_text
from canonlm.experiments import grid
from canonlm.experiments.outcomes import checked, noted, read_finished
from canonlm.experiments.plan import plan as plan_of
from canonlm.experiments.schema import Experiment
from canonlm.launch.grid import PlannedRun
from canonlm.runs.identity import exact
from canonlm.runs.load import Result, Run
from canonlm.runs.rows import MAX_BYTES, MAX_LINE, Evaluation, count, counted, finite, one_line
from canonlm.runs.task_info import TaskInfo

OWN_RESULTS = Path(__file__).parent / "kept"
"""CSV files of the runs that we made."""

csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))  # a field has all slices of a row of `metrics.jsonl`

_PLACE = "place"  # of a row, beside its columns: the file and the line

COLUMNS = (
    *("run", "setting", "arch", "size", "difficulty", "lr", "seed", "split", "step", "steps", "slices", "measures"),
    *("loss", "seconds", "experiments", "commit", "machine"),
)


def read(folder: Path) -> dict[str, Run]:
    """The runs of all CSV files of a folder, by their names. `env` has their machine and commit."""
    return _runs(row for path in sorted(folder.glob("*.csv")) for row in _rows_of(path))


def export(experiments: Iterable[Experiment], scale: str, out: Path, folder: Path) -> int:
    """Write the evaluations of the finished runs in `out`, a file for each setting. Runs already in a file are kept and
    not read again. Returns the number of added runs."""
    experiments, added = list(experiments), 0
    existing = read(folder)
    outcomes = outcomes_of(experiments, scale, out, existing)
    plan = {run.name: run for run in plan_of(experiments, scale, out, outcomes)}
    points = {
        run.name: point
        for experiment in experiments
        for point in grid.points(experiment, scale)
        for run in _all_of(experiment, point, plan, outcomes)
    }
    new: dict[str, list[dict[str, str]]] = {}
    for name, point in points.items():
        if name not in existing and (run := outcomes.get(name)) is not None:
            new.setdefault(point.setting, []).extend(_new_rows(plan[name], point, run))
            added += 1
    for setting, rows in new.items():
        path = folder / f"{setting}.csv"
        rows = sorted([*_rows_of(path), *rows], key=lambda row: (row["arch"], row["size"], row["split"], row["run"]))
        text = StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        with writing("--export", folder):
            make_folder(folder)
            write_text(path, text.getvalue())
    return added


def outcomes_of(
    experiments: Iterable[Experiment], scale: str, out: Path, existing: grid.Outcomes | None = None
) -> dict[str, Run | None]:
    """Outcomes of all finished runs in `out` that the experiments need, and the `existing` ones. Fresh seeds depend on
    tuning runs, so this repeats until the plan has no new runs."""
    outcomes = dict(existing or {})
    experiments, read_names = list(experiments), set(outcomes)
    while new := [run for run in plan_of(experiments, scale, out, outcomes) if run.name not in read_names]:
        for run in new:
            read_names.add(run.name)
            if (outcome := read_finished(run.folder)) is not None:
                outcomes[run.name] = outcome
    return outcomes


def _all_of(
    experiment: Experiment, point: grid.Point, plan: Mapping[str, object], outcomes: grid.Outcomes
) -> Iterator[grid.GridRun]:
    setting = experiment.settings[point.setting]
    yield from grid.tuning_runs(experiment, point, outcomes)
    for rate in grid.rates_tried(experiment, point, outcomes):
        for seed in range(max(setting.looks, default=0)):
            if (run := grid.fresh_run(experiment, point, rate, seed)).name in plan:
                yield run


def _new_rows(planned: PlannedRun, point: grid.Point, run: Run) -> list[dict[str, str]]:
    assert run.result is not None
    experiments, _ = noted(planned.folder)
    config = planned.config
    common = {
        "run": planned.name, "setting": point.setting, "arch": point.arch, "size": grid.size_of(config),
        "difficulty": point.difficulty or "", "lr": exact(config.train.optim.lr), "seed": str(config.train.seed),
        "split": config.train.eval_split, "steps": str(run.result.steps),
        "seconds": f"{run.result.train_seconds or 0:.0f}",
        "experiments": " ".join(f"{key}:{sha[:12]}" for key, sha in sorted(experiments.items())),
        **{key: one_line(str(run.env.get(key, ""))) for key in ("commit", "machine")},
    }  # fmt: skip
    return [
        {
            **common,
            "step": str(row.step),
            "slices": "; ".join(f"{key} {count.correct}/{count.total}" for key, count in row.slices.items()),
            "measures": "; ".join(
                f"{key} {value:.6g}" for key, value in row.measures.items() if key not in row.of_sets
            ),
            "loss": "" if row.loss is None else f"{row.loss:.6g}",
        }
        for row in run.evals
    ]


def _rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a file, each with its `place`. ValueError, with the line, for anything but rows as `export` writes
    them."""
    if not os.path.lexists(path):
        return
    reader = csv.reader(StringIO(read_text(path, MAX_BYTES), newline=""), strict=True)
    try:
        for fields in reader:
            if reader.line_num == 1 and tuple(fields) != COLUMNS:
                raise ValueError(f"expected the columns {', '.join(COLUMNS)}, got {brief(', '.join(fields))}")
            if fields and len(fields) != len(COLUMNS):
                raise ValueError(f"expected {len(COLUMNS)} fields, got {len(fields)}")
            if fields and reader.line_num > 1:
                yield {**dict(zip(COLUMNS, fields, strict=True)), _PLACE: f"{path}, line {reader.line_num}"}
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _runs(rows: Iterable[Mapping[str, str]]) -> dict[str, Run]:
    """The finished runs of rows. ValueError, with file and line: numbers that no run has, or rows that contradict."""
    evals: dict[str, dict[int, Evaluation]] = {}
    about: dict[str, dict[str, Any]] = {}
    for row in rows:
        try:
            one, name, known = _evaluation(row), row["run"], _about(row)
            if evals.setdefault(name, {}).setdefault(one.step, one) != one:
                raise ValueError(f"another row of {brief(name)} has other numbers for step {one.step}")
            if about.setdefault(name, known)["steps"] != known["steps"]:
                raise ValueError(f"another row of {brief(name)} has {about[name]['steps']} steps, not {known['steps']}")
        except ValueError as error:
            raise ValueError(f"{row[_PLACE]}: {error}") from None
    runs = {}
    for name, of_run in evals.items():
        in_order = tuple(of_run[step] for step in sorted(of_run))
        result = Result(about[name]["steps"], in_order[-1])
        try:
            runs[name] = checked(Run(name=name, evals=in_order, result=result, **about[name]))
        except ValueError as error:
            raise ValueError(f"{in_order[-1].place}: {brief(name)}: {error}") from None
    return runs


def _about(row: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a run that all of its rows repeat."""
    return {
        "arch": row["arch"], "lr": _number("lr", row["lr"]), "seed": count(row["seed"]), "steps": count(row["steps"]),
        "task": TaskInfo(row["setting"]), "task_label": row["setting"],
        "env": {key: one_line(row[key]) for key in ("machine", "commit")},
    }  # fmt: skip


def _evaluation(row: Mapping[str, str]) -> Evaluation:
    slices = {}
    for part in filter(None, row["slices"].split("; ")):
        if not (match := re.fullmatch(r"(.+) ([0-9]+)/([0-9]+)", part)):
            raise ValueError(f"slices: expected such as k=1 3/4, got {shown(part)}")
        slices[match[1]] = counted(match[2], match[3])
        if not slices[match[1]].total:
            raise ValueError(f"slices: expected at least one question, got {shown(part)}")
    measures = dict(part.rpartition(" ")[::2] for part in row["measures"].split("; ") if part)
    numbers = {key: _number(key, value) for key, value in measures.items()}
    if not slices and not measures:
        raise ValueError("expected slices or measures, got neither")
    loss = _number("loss", row["loss"]) if row["loss"] else None
    return Evaluation(count(row["step"]), slices, loss, numbers, place=row[_PLACE])


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not finite(number):
        raise expected(key or "measures", "a finite number", text)
    return number


def note(folder: Path, experiments: Mapping[str, str], commit: str) -> None:
    """Write the experiments that need a run, and their sha256, to its folder; existing notes are kept."""
    before, first_commit = noted(folder)
    if not experiments.keys() <= before.keys():
        written = {"experiments": {**experiments, **before}, "commit": first_commit or commit}
        write_json(folder / "experiment.json", written)
