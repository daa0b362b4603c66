"""The 51 claims of the paper, and the verdicts from our runs, read from CSV files with a row per evaluation.

`export` writes the files from run folders, one for each setting; `read` returns the outcomes, and `entries` judges all
claims by them. The package contains the files of our runs (`OWN_RESULTS`).
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Literal

from canonlm.experiments import grid, schema
from canonlm.experiments.outcomes import Outcome, read_outcome
from canonlm.experiments.plan import plan as plan_of
from canonlm.experiments.schema import Experiment
from canonlm.experiments.verdicts import Verdict, judge
from canonlm.files import write_text
from canonlm.runs.folder import read_json
from canonlm.runs.rows import Count, Evaluation
from canonlm.train.config import RunConfig

OWN_RESULTS = Path(__file__).parent / "kept"
"""CSV files of the runs that we made."""

COLUMNS = (
    *("run", "setting", "arch", "size", "difficulty", "lr", "seed", "split", "step", "steps", "slices", "measures"),
    *("loss", "seconds", "experiments", "commit", "machine"),
)


@dataclass(frozen=True)
class Listed:
    """A claim of the paper, in our words. kind: how it can be tested. experiment: the file that tests it by training,
    or "" with a reason why none does."""

    id: str
    kind: Literal["trained", "counted", "timed", "published"]
    experiment: str
    text: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """A claim and its verdict at a scale; None if nothing at that scale tests it. machines, commits: of its runs."""

    claim: Listed
    verdict: Verdict | None
    machines: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()


def claims() -> list[Listed]:
    """All 51 claims, in order."""
    text = (files(__package__) / "claims.csv").read_text(encoding="utf-8")
    return [Listed(**row) for row in csv.DictReader(StringIO(text))]  # type: ignore[arg-type]


def entries(folder: Path, scale: str = "micro", seed_set: int = 0) -> list[Entry]:
    """All claims, judged by the CSV files of a folder. seed_set: of the runs. ValueError: a file is damaged, or no such
    scale."""
    rows = list(_rows(folder))
    outcomes = _outcomes(rows)
    about = {row["run"]: (row["machine"], row["commit"]) for row in rows}
    verdicts = {each.claim: each for name in schema.names() for each in judge(_loaded(name, seed_set), scale, outcomes)}
    judged = []
    for claim in claims():
        verdict = verdicts.get(claim.id)
        runs = [about[run] for run in verdict.runs if run in about] if verdict else []
        machines, commits = (tuple(sorted({each[i] for each in runs} - {""})) for i in (0, 1))
        judged.append(Entry(claim, verdict, machines, commits))
    return judged


@cache
def _loaded(name: str, seed_set: int) -> Experiment:
    return schema.load(name, seed_set=seed_set)


def read(folder: Path) -> dict[str, Outcome | None]:
    """Outcomes by the names of runs, of all CSV files of a folder."""
    return _outcomes(_rows(folder))


def export(experiments: Iterable[Experiment], scale: str, out: Path, folder: Path) -> int:
    """Write the evaluations of the finished runs in `out`, a file for each setting. Runs already in a file are kept and
    not read again. Returns the number of added runs."""
    experiments, added = list(experiments), 0
    existing = read(folder)
    plan = {run.name: run for run in plan_of(experiments, scale, out, outcomes_of(experiments, scale, out, existing))}
    points = {
        run.name: point
        for experiment in experiments
        for point in grid.points(experiment, scale)
        for run in _all_of(experiment, point, plan)
    }
    new: dict[str, list[dict[str, str]]] = {}
    for name, point in points.items():
        outcome = None if name in existing else read_outcome(out / "runs" / name)
        if outcome is not None:
            rows = _new_rows(out / "runs" / name, name, point, plan[name].config, outcome)
            new.setdefault(point.setting, []).extend(rows)
            added += 1
    for setting, rows in new.items():
        path = folder / f"{setting}.csv"
        folder.mkdir(parents=True, exist_ok=True)
        rows = sorted([*_rows_of(path), *rows], key=lambda row: (row["arch"], row["size"], row["split"], row["run"]))
        text = StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(path, text.getvalue())
    return added


def outcomes_of(
    experiments: Iterable[Experiment], scale: str, out: Path, existing: Mapping[str, Outcome | None] | None = None
) -> dict[str, Outcome | None]:
    """Outcomes of all finished runs in `out` that the experiments need, and the `existing` ones. Fresh seeds depend on
    tuning runs, so this repeats until the plan has no new runs."""
    outcomes = dict(existing or {})
    experiments, read_names = list(experiments), set(outcomes)
    while new := [run for run in plan_of(experiments, scale, out, outcomes) if run.name not in read_names]:
        for run in new:
            read_names.add(run.name)
            if (outcome := read_outcome(run.folder)) is not None:
                outcomes[run.name] = outcome
    return outcomes


def _all_of(experiment: Experiment, point: grid.Point, plan: Mapping[str, object]) -> Iterator[grid.GridRun]:
    setting = experiment.settings[point.setting]
    yield from grid.tuning_runs(experiment, point)
    for rate in grid.rates_of(setting, point.difficulty):
        for seed in range(max(setting.looks, default=0)):
            if (run := grid.fresh_run(experiment, point, rate, seed)).name in plan:
                yield run


def _new_rows(folder: Path, name: str, point: grid.Point, config: RunConfig, outcome: Outcome) -> list[dict[str, str]]:
    env, note, result = (read_json(folder / f"{file}.json") or {} for file in ("env", "experiment", "result"))
    common = {
        "run": name, "setting": point.setting, "arch": point.arch, "size": grid.size_of(config),
        "difficulty": point.difficulty or "", "lr": f"{config.train.optim.lr:g}", "seed": str(config.train.seed),
        "split": config.train.eval_split, "steps": str(outcome.steps),
        "seconds": f"{result.get('train_seconds') or 0:.0f}",
        "experiments": " ".join(f"{key}:{sha[:12]}" for key, sha in sorted(note.get("experiments", {}).items())),
        "commit": note.get("commit", ""), "machine": str(env.get("machine", "")),
    }  # fmt: skip
    return [
        {
            **common,
            "step": str(row.step),
            "slices": "; ".join(f"{key} {count.correct}/{count.total}" for key, count in row.slices.items()),
            "measures": "; ".join(f"{key} {value:.6g}" for key, value in row.measures.items()),
            "loss": "" if row.loss is None else f"{row.loss:.6g}",
        }
        for row in outcome.evals
    ]


def _rows(folder: Path) -> Iterator[dict[str, str]]:
    for path in sorted(folder.glob("*.csv")):
        yield from _rows_of(path)


def _rows_of(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if rows and tuple(rows[0]) != COLUMNS:
        raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}, got {', '.join(rows[0])}")
    return rows


def _outcomes(rows: Iterable[dict[str, str]]) -> dict[str, Outcome | None]:
    evals: dict[str, list[Evaluation]] = {}
    steps: dict[str, int] = {}
    for row in rows:
        counts = (part.rsplit(" ", 1) for part in row["slices"].split("; ") if part)
        slices = {key: Count(*map(int, count.split("/"))) for key, count in counts}
        measures = {key: float(value) for key, value in (p.rsplit(" ", 1) for p in row["measures"].split("; ") if p)}
        loss = float(row["loss"]) if row["loss"] else None
        evals.setdefault(row["run"], []).append(Evaluation(int(row["step"]), slices, loss, measures))
        steps[row["run"]] = int(row["steps"])
    return {
        name: Outcome(steps[name], tuple(sorted(rows_of_run, key=lambda row: row.step)))
        for name, rows_of_run in evals.items()
    }


def note(folder: Path, experiments: Mapping[str, str], commit: str) -> None:
    """Write the experiments that need a run, and their sha256, to its folder; existing notes are kept."""
    path = folder / "experiment.json"
    noted = read_json(path) or {}
    written = {"experiments": {**experiments, **noted.get("experiments", {})}, "commit": noted.get("commit", commit)}
    if written != noted:
        write_text(path, json.dumps(written, indent=1) + "\n")
