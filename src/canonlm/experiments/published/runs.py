"""Your runs in the names and units of the published results, and `canonlm.load_runs`.

No file is trusted: what cannot be read, or has not finished, is left out and named.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from canonlm.core.errors import expected, unknown
from canonlm.core.untrusted import is_inside
from canonlm.experiments import published
from canonlm.experiments.published import names
from canonlm.experiments.published.benchmarks import LOWER_IS_BETTER
from canonlm.experiments.published.names import split_arch
from canonlm.runs.evaluated import Evaluated
from canonlm.runs.folder import Folders, read_config
from canonlm.runs.gather import Gathered, gather
from canonlm.runs.identity import NOT_IN_GROUP, NOT_IN_IDENTITY, flat, short_size, what_differs, write
from canonlm.runs.identity import settings as settings_of
from canonlm.runs.load import NOT_BEGUN, LeftOut, Run, shape_of, tokens_of
from canonlm.runs.rows import DAMAGE
from canonlm.runs.table import PERCENT, QUESTION, RUN_COLUMNS, SHARE, fitting, measurements, parts_of, results, tasks_of

Row = dict[str, Any]

NAMED_WHEN_LEFT_OUT = 10
_SEEN = (*NOT_IN_IDENTITY, *NOT_IN_GROUP, "arch", "task", "text", "train.steps", "model.fields", "model.matched")
"""Settings that other columns of the frame hold: `tokens` has the length."""


def load_runs(folders: Folders = "runs", *, settings: Sequence[str] = ()) -> pl.DataFrame:
    """Everything that runs have measured, as a polars data frame (`.to_pandas()` for pandas): a row per measurement.

    folders: one or several of: what `canonlm play`, `profile` and `replicate` wrote, a run of `canonlm train`, results
    of `canonlm eval`, or a folder of such folders. A run that lies in two of them counts once.
    settings: keys of the runs' `config.yaml` that become columns, such as "train.batch_size".

    Columns: run, state, task, setting, arch, parameters, lr, seed, kind, split, step, tokens, slice, metric, value,
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
    gathered = gather(folders)
    rows, unreadable = measurements(gathered, names)
    runs = [run for one in gathered for run in one.runs.values()]
    _warn([*(entry for one in gathered for entry in one.left_out), *unreadable], runs)
    return _with_settings(rows.select(RUN_COLUMNS), runs, settings)


def _warn(left_out: Sequence[LeftOut], runs: Sequence[Run]) -> None:
    lines = [f"{entry.name}: {entry.reason}" for entry in left_out]
    for run in runs:
        unfinished = [] if run.finished else [f"{run.state}, so it has no rows of kind final"]
        if damage := [*unfinished, *run.damage]:
            lines.append(f"{run.name}: {'; '.join(damage)}")
    if lines:
        more = [f"and {len(lines) - NAMED_WHEN_LEFT_OUT} more"] if len(lines) > NAMED_WHEN_LEFT_OUT else []
        text = "\n  ".join(["not everything is in the data frame:", *lines[:NAMED_WHEN_LEFT_OUT], *more])
        warnings.warn(text, stacklevel=3)


def _with_settings(frame: pl.DataFrame, runs: Sequence[Run], keys: Sequence[str]) -> pl.DataFrame:
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


def runs_frame(folders: Iterable[str | Path]) -> tuple[pl.DataFrame, list[LeftOut]]:
    """Final accuracies, measures and losses of runs, and all results of `canonlm eval`, from folders of them.

    Left out, with a reason: what cannot be read, runs that have not finished (`runs_curves` has them) or saved nothing.
    ValueError: a folder with neither runs nor results in it.
    """
    return finals(gather(list(folders)))


def runs_curves(folders: Iterable[str | Path]) -> tuple[pl.DataFrame, list[LeftOut]]:
    """Every evaluation during training and every recorded training loss, also of running and crashed runs; `tokens`:
    seen so far. Otherwise like `runs_frame`."""
    return curves(gather(list(folders)))


def finals(gathered: Iterable[Gathered]) -> tuple[pl.DataFrame, list[LeftOut]]:
    """`runs_frame` of gathered runs."""
    gathered, left_out = list(gathered), []
    rows, unreadable = measurements(gathered, names, ("final", "suite"))
    for one in gathered:
        parts = {part for each in one.evaluated.values() for part in parts_of(each, one)}
        for entry in one.left_out:  # results of `canonlm eval` are shown even if the run's own files have no numbers
            if not (entry.reason.startswith(("text", NOT_BEGUN)) and Path(entry.name).name in parts):
                left_out.append(entry)
        for run in one.runs.values():
            if run.result is None:
                left_out.append(LeftOut(run.name, "; ".join([f"{run.state}: no final result", *run.notes])))
            left_out += _damage(run) if run.result else []
    rows = rows.filter(pl.col("split").is_not_null() | (pl.col("kind") == "suite"))  # no times and speeds
    return _published(_asked_once(rows, gathered), gathered), [*left_out, *unreadable]


def curves(gathered: Iterable[Gathered]) -> tuple[pl.DataFrame, list[LeftOut]]:
    """`runs_curves` of gathered runs."""
    gathered = list(gathered)
    rows, _ = measurements(gathered, names, ("evaluation", "training"))
    of_training = pl.col("kind") == "training"
    rows = rows.filter(~of_training | (pl.col("metric") == "loss")).with_columns(
        task=pl.when(of_training).then(pl.lit("train")).otherwise("task"),
        setting=pl.when(~of_training).then("setting"),
    )
    left_out = [
        entry for one in gathered for entry in (*one.left_out, *(e for run in one.runs.values() for e in _damage(run)))
    ]
    return _published(rows, gathered), left_out


def _published(rows: pl.DataFrame, gathered: Sequence[Gathered]) -> pl.DataFrame:
    """Measurements as results: with the models' columns as the paper has them, and shares in percent."""
    of_suite = pl.col("kind") == "suite"
    about = [{**row, "model": name, "kind": "run"} for name, row in _about_runs(gathered).items()]
    about += [{**_about_model(each, name, one.folder), "model": name, "kind": "suite"}
              for one in gathered for name, each in one.evaluated.items()]  # fmt: skip
    models = results(about).select("model", "source", "arch", "canon", "size", "lr", "seed", suite_tokens="tokens")
    models = models.with_columns(kind=pl.Series([row["kind"] for row in about], dtype=pl.String))
    share, less = pl.col("unit") == SHARE, pl.col("metric").is_in(list(LOWER_IS_BETTER))
    value = (
        pl.when(pl.col("correct").is_null())
        .then(100 * pl.col("value"))
        .otherwise(100 * pl.col("correct") / pl.col("total"))
    )
    known = rows.filter(pl.col("value").is_not_null()).select(
        "model", *QUESTION[:-1], "total",
        kind=pl.when(of_suite).then("kind").otherwise(pl.lit("run")),
        tokens="tokens",
        unit=pl.when(share & ~less).then(pl.lit(PERCENT)).otherwise(pl.lit("")),
        value=pl.when(share).then(value).otherwise("value"),
        stderr=pl.when(share).then(100 * pl.col("stderr")).otherwise("stderr"),
    )  # fmt: skip
    joined = known.join(models, on=["model", "kind"], how="left", maintain_order="left")
    return results(joined.with_columns(tokens=pl.when(of_suite).then("suite_tokens").otherwise("tokens")))


def _asked_once(rows: pl.DataFrame, gathered: Sequence[Gathered]) -> pl.DataFrame:
    """A second answer to a question of a run makes no second pair of it: its setting says "evaluated again"."""
    of_run = [
        (name, part)
        for one in gathered
        for name, each in one.evaluated.items()
        for part in parts_of(each, one)
        if part in one.runs
    ]
    parts = pl.DataFrame(of_run, {"model": pl.String, "part": pl.String}, orient="row").unique()
    final = rows.filter(pl.col("kind") == "final", pl.col("value").is_not_null()).select(*QUESTION, "model")
    answered = parts.join(final, left_on="part", right_on="model").select("model", *QUESTION).unique()
    answered = answered.with_columns(kind=pl.lit("suite"), again=pl.lit(", evaluated again"))
    rows = rows.join(answered, on=["model", *QUESTION, "kind"], how="left", nulls_equal=True, maintain_order="left")
    return rows.with_columns(setting=pl.coalesce(pl.col("setting") + pl.col("again"), "setting"))


def nothing_in(folder: Path, left_out: Sequence[LeftOut]) -> ValueError:
    """The error for folders with nothing to show."""
    reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in left_out[:3]) or "there is nothing in them"
    return expected("FOLDER", f"runs, or results of `canonlm eval`, that can be read ({reasons})", str(folder))


def settings(gathered: Iterable[Gathered]) -> dict[str, dict[str, Any]]:
    """The configuration of every run with dotted keys (`train.optim.lr`), by its `model` in the frames; a finished run
    also has `parameters`."""
    known = {}
    for run in (run for one in gathered for run in one.runs.values()):
        size = run.result.num_parameters if run.result else None
        known[run.name] = flat(run.config) | ({} if size is None else {"parameters": size})
    return known


def _damage(run: Run) -> list[LeftOut]:
    return [LeftOut(f"part of {run.name}", "; ".join(run.damage))] if run.damage else []


def _about_runs(gathered: Iterable[Gathered]) -> dict[str, Row]:
    """The columns of the model, by the name of the run. If runs of one architecture, size and task differ in more than
    Canon layers, length, rate and seed, the architecture names the difference."""
    runs = [run for one in gathered for run in one.runs.values()]
    tasks = tasks_of(runs, names)
    rows: dict[str, Row] = {}
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        arch, canon = split_arch(run.arch, _fields(run.config))
        size = shape_of(run.config)
        alike.setdefault((arch, size, *tasks[run.name]), []).append(run)
        size = size or (short_size(run.result.num_parameters) if run.result else None)
        rows[run.name] = {"source": "yours", "arch": arch, "canon": canon, "size": size, "lr": run.lr, "seed": run.seed}
    for group in alike.values():
        for run, text in zip(group, what_differs([settings_of(run.config, _SEEN) for run in group]), strict=True):
            rows[run.name]["arch"] += f" ({text})" if text else ""
    return rows


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    model = config.get("model")
    fields, matched = (model.get(key) if isinstance(model, dict) else None for key in ("fields", "matched"))
    matched = matched if isinstance(matched, dict) else {}  # adjusted by `--match`: the architecture is the same
    return {k: v for k, v in fields.items() if k not in matched} if isinstance(fields, dict) else {}


def _about_model(one: Evaluated, name: str, folder: Path) -> Row:
    """The columns of an evaluated model: from its run, from the published settings, or from its results."""
    source = Path(str(one.model.get("source", "")))
    about: Row = {"source": "yours", "size": short_size(one.model.get("parameters"))}
    if source.name in _settings():
        return about | _settings()[source.name]
    arch = one.model.get("arch")
    if isinstance(arch, str):
        about["arch"], about["canon"] = split_arch(arch)
    for place in (source, folder / source.name, folder / "runs" / source.name, folder):
        # Somebody else's results may name any of your folders.
        if place.name == source.name and is_inside(place / "config.yaml", folder):
            return about | _of_its_run(place, one.model.get("step"))
    return about


@cache
def _settings() -> dict[str, Row]:
    known = published.settings().select("model", "arch", "canon", "size", "tokens", "lr").to_dicts()
    return {row.pop("model"): row for row in known}


def _of_its_run(place: Path, step: Any) -> Row:
    """The columns from the configuration alone, as the run's other files may be damaged."""
    try:
        config = read_config(place)
        arch, canon = split_arch(str(config["arch"]), _fields(config))
        lr, seed = float(config["train"]["optim"]["lr"]), int(config["train"]["seed"])
        tokens = tokens_of(config, step) if isinstance(step, int) else None
        known = {"arch": arch, "canon": canon, "lr": lr, "seed": seed, "tokens": tokens}
        return known | ({"size": shape} if (shape := shape_of(config)) else {})
    except (*DAMAGE, OSError):
        return {}
