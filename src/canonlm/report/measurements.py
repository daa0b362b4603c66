"""All measurements of run folders as one long data frame: a row per measurement, as the runs wrote it.

`frames` prepares numbers for pages (percent, names as the paper writes them). This is for your own analyses.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canonlm.core.errors import unknown
from canonlm.experiments.tidy import fitting
from canonlm.report.frames import scores_of, tasks_of
from canonlm.runs.evaluated import Evaluated
from canonlm.runs.folder import Folders
from canonlm.runs.gather import Gathered, gather
from canonlm.runs.identity import flat, write
from canonlm.runs.load import LeftOut, Run, TextRun, tokens_of
from canonlm.runs.rows import DAMAGE, Evaluation, TextEvaluation, known_count
from canonlm.runs.values import values_of

if TYPE_CHECKING:
    import polars as pl

COLUMNS = {
    "run": "String",  # the folder's name
    "state": "String",  # finished, or: unfinished at step 300 of 2000
    "task": "String",  # depo, text; of `canonlm eval`: the name of the test
    "setting": "String",  # difficulty or settings of the task; of text: the sources
    "arch": "String",
    "parameters": "Int64",  # once the run has finished
    "lr": "Float64",  # of the configuration; the measure `lr` is that of a step
    "seed": "Int64",
    "kind": "String",  # training, evaluation, final, suite
    "split": "String",
    "step": "Int64",
    "tokens": "Int64",  # seen in training up to this step
    "slice": "String",  # which questions: all, k=4, 1hop-2k; of text: the validation set
    "measure": "String",
    "value": "Float64",  # null where it was not a finite number
    "stderr": "Float64",  # as `canonlm eval` gives it
    "correct": "Int64",
    "total": "Int64",  # answers, or tokens of a text, behind the value
}

TRAINING = ("loss", "lr", "grad_norm", "tokens_per_s", "z_loss", "mfu", "data_wait_share", "memory_gb")
NAMED_WHEN_LEFT_OUT = 10

Row = tuple[Any, ...]


def load_runs(folders: Folders = "runs", *, settings: Sequence[str] = ()) -> "pl.DataFrame":
    """Everything that runs have measured, as a polars data frame (`.to_pandas()` for pandas): a row per measurement.

    folders: one or several of: what `canonlm play`, `profile` and `replicate` wrote, a run of `canonlm train`, results
    of `canonlm eval`, or a folder of such folders. A run that lies in two of them counts once.
    settings: keys of the runs' `config.yaml` that become columns, such as "train.batch_size".

    Columns: run, state, task, setting, arch, parameters, lr, seed, kind, split, step, tokens, slice, measure, value,
    stderr, correct, total. `kind` is one of

    - training: what a step logged (`loss`, `lr`, `grad_norm`, `tokens_per_s`, …);
    - evaluation: during training. Accuracies are shares from 0 to 1, a row per slice; the row with slice "all" is the
      task's headline, in which every slice weighs the same, so it has a `total` and no `correct`;
    - final: the same after the last step, and the run's `train_seconds` and `tokens_per_s`;
    - suite: the results of `canonlm eval`.

    A UserWarning names what could not be read, or only in part, and unfinished runs, which have no rows of kind
    "final". Raises ValueError for a folder without runs or results, and for a setting that no run
    has.
    """
    import polars as pl

    gathered = gather(folders)
    runs = [run for one in gathered for run in one.runs.values()]
    tasks = tasks_of(runs)
    about: dict[str, Row] = {}
    for run in runs:
        parameters = run.result.num_parameters if run.result else None
        about[run.name] = (run.name, run.state, *tasks[run.name], run.arch, parameters, run.lr, run.seed)
    rows = [about[run.name] + row for run in runs for row in _of_run(run)]
    left_out = [entry for one in gathered for entry in one.left_out]
    for one in gathered:
        for name, evaluated in one.evaluated.items():
            try:
                rows += list(_of_suites(evaluated, name, one, about))
            except DAMAGE as error:
                left_out.append(LeftOut(name, f"not readable: {type(error).__name__}: {error}"))
    _warn(left_out, runs)
    types = {name: getattr(pl, kind) for name, kind in COLUMNS.items()}
    frame = pl.DataFrame([tuple(map(fitting, row)) for row in rows], types, orient="row")
    return _with_settings(frame, runs, settings)


def _of_run(run: Run | TextRun) -> Iterator[Row]:
    for step in run.train:
        tokens = tokens_of(run.config, step.step)
        for name in TRAINING:
            if (value := getattr(step, name)) is not None:
                yield ("training", "train", step.step, tokens, "all", name, value, None, None, None)
    split = str(flat(run.config).get("train.eval_split", "test"))
    for row in run.evals:
        yield from _of_evaluation(run, row, ("evaluation", split))
    if run.result is not None:
        yield from _of_evaluation(run, run.result.final, ("final", split))
        at = ("final", None, run.result.steps, tokens_of(run.config, run.result.steps))
        for name in ("train_seconds", "tokens_per_s"):
            if (value := getattr(run.result, name)) is not None:
                yield (*at, "all", name, value, None, None, None)


def _of_evaluation(run: Run | TextRun, row: Evaluation | TextEvaluation, kind: tuple[str, str]) -> Iterator[Row]:
    at = (*kind, row.step, tokens_of(run.config, row.step))
    for each in values_of(getattr(run, "task", ""), row):
        yield (*at, each.slice, each.metric, each.value, None, each.correct, each.total)


def _of_suites(one: Evaluated, name: str, where: Gathered, about: dict[str, Row]) -> Iterator[Row]:
    step, parameters = (known_count(one.model.get(key)) for key in ("step", "parameters"))
    arch = one.model.get("arch")
    parts = {*one.label.split("/"), where.folder.name}
    run = next((run for short, run in where.runs.items() if short in parts or Path(short).name in parts), None)
    known = about[run.name] if run else None
    tokens = tokens_of(run.config, step) if run and step is not None else None
    head = known or (name, None, None, None, arch if isinstance(arch, str) else None, parameters, None, None)
    for entry, score, (task, setting, slice, measure) in scores_of(one):
        split = entry["settings"].get("split")
        yield (*head[:2], task, setting, *head[4:], "suite", split if isinstance(split, str) else None, step, tokens,
               slice, measure, score["value"], score["stderr"], None, score["n"])  # fmt: skip


def _warn(left_out: Sequence[LeftOut], runs: Sequence[Run | TextRun]) -> None:
    lines = [f"{entry.name}: {entry.reason}" for entry in left_out]
    for run in runs:
        unfinished = [] if run.finished else [f"{run.state}, so it has no rows of kind final"]
        if damage := [*unfinished, *run.damage]:
            lines.append(f"{run.name}: {'; '.join(damage)}")
    if lines:
        more = [f"and {len(lines) - NAMED_WHEN_LEFT_OUT} more"] if len(lines) > NAMED_WHEN_LEFT_OUT else []
        text = "\n  ".join(["not everything is in the data frame:", *lines[:NAMED_WHEN_LEFT_OUT], *more])
        warnings.warn(text, stacklevel=3)


def _with_settings(frame: "pl.DataFrame", runs: Sequence[Run | TextRun], keys: Sequence[str]) -> "pl.DataFrame":
    import polars as pl

    configs = {run.name: flat(run.config) for run in runs}
    for key in keys:
        values = {name: config[key] for name, config in configs.items() if key in config}
        if not values:
            raise unknown("setting", key, sorted(set().union(*configs.values())))
        kinds = {type(value) for value in values.values() if value is not None}
        if not (kinds <= {int, float} or kinds in ({str}, {bool})):
            values = {name: write(value) for name, value in values.items()}
        column = [fitting(values.get(name)) for name in frame["run"]]
        frame = frame.with_columns(pl.Series(key, column, strict=False))
    return frame
