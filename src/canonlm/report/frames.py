"""Turns run folders into rows of `canonlm.experiments.tidy`: final scores, and scores during training.

No file is trusted: what cannot be read, or has not finished, is left out and named.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canonlm.core.errors import expected
from canonlm.core.untrusted import is_inside
from canonlm.experiments.published.benchmarks import LOWER_IS_BETTER, PERCENT
from canonlm.experiments.published.names import question_of, setting_of, setting_of_suite, split_arch
from canonlm.experiments.tidy import QUESTION, frame, short_size
from canonlm.runs.evaluated import Evaluated
from canonlm.runs.folder import read_config
from canonlm.runs.gather import Gathered, gather
from canonlm.runs.identity import NOT_IN_GROUP, NOT_IN_IDENTITY, flat, what_differs
from canonlm.runs.identity import settings as settings_of
from canonlm.runs.load import LeftOut, Run, TextRun, mixes, shape_of, tokens_of
from canonlm.runs.rows import DAMAGE, Evaluation, TextEvaluation, finite, one_line, slice_key
from canonlm.runs.values import values_of

if TYPE_CHECKING:
    import polars as pl

Row = dict[str, Any]

_SEEN = (*NOT_IN_IDENTITY, *NOT_IN_GROUP, "arch", "task", "text", "train.steps", "model.fields", "model.matched")
"""Settings that other columns of the frame hold: `tokens` has the length."""


def runs_frame(folders: Iterable[str | Path]) -> "tuple[pl.DataFrame, list[LeftOut]]":
    """Final accuracies, measures and losses of runs, and all results of `canonlm eval`, from folders of them.

    Left out, with a reason: what cannot be read, runs that have not finished (`runs_curves` has them) or saved nothing.
    ValueError: a folder with neither runs nor results in it.
    """
    return finals(gather(list(folders)))


def runs_curves(folders: Iterable[str | Path]) -> "tuple[pl.DataFrame, list[LeftOut]]":
    """Every evaluation during training and every recorded training loss, also of running and crashed runs; `tokens`:
    seen so far. Otherwise like `runs_frame`."""
    return curves(gather(list(folders)))


def finals(gathered: Iterable[Gathered]) -> "tuple[pl.DataFrame, list[LeftOut]]":
    """`runs_frame` of gathered runs."""
    gathered = list(gathered)
    about = _about(gathered)
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for one in gathered:
        finals: dict[str, set[tuple[Any, ...]]] = {}
        parts = {part for each in one.evaluated.values() for part in _parts(each, one.folder)}
        # Results of `canonlm eval` are shown even if the run's own files have no numbers.
        left_out += [entry for entry in one.left_out if not (_has_no_numbers(entry) and Path(entry.name).name in parts)]
        for name, run in one.runs.items():
            if run.result is None:
                left_out.append(LeftOut(run.name, "; ".join([f"{run.state}: no final result", *run.notes])))
            else:
                final = list(_of_evaluation(run.result.final, run.config, about[run.name]))
                finals[name] = {_question(row) for row in final}
                rows += final
                left_out += _damage(run)
        for name, each in one.evaluated.items():
            known = set().union(*(finals.get(part, set()) for part in _parts(each, one.folder)))
            try:
                for row in list(_of_evaluated(each, name, one.folder)):
                    again = {"setting": f"{row['setting']}, evaluated again"} if _question(row) in known else {}
                    rows.append(row | again)  # a second answer to a question makes no second pair of the run
            except DAMAGE as error:
                left_out.append(LeftOut(name, f"not readable: {type(error).__name__}: {error}"))
    return frame(rows), left_out


def curves(gathered: Iterable[Gathered]) -> "tuple[pl.DataFrame, list[LeftOut]]":
    """`runs_curves` of gathered runs."""
    gathered = list(gathered)
    about = _about(gathered)
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for one in gathered:
        left_out += one.left_out
        for run in one.runs.values():
            for row in run.evals:
                rows += _of_evaluation(row, run.config, about[run.name])
            for train in run.train:
                if finite(train.loss):
                    rows.append(about[run.name] | {
                        "tokens": tokens_of(run.config, train.step), "task": "train", "setting": None, "slice": "all",
                        "metric": "loss", "unit": "", "value": train.loss})  # fmt: skip
            left_out += _damage(run)
    return frame(rows), left_out


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


def _has_no_numbers(entry: LeftOut) -> bool:
    return entry.reason.startswith(("text", "nothing recorded yet"))


def _parts(one: Evaluated, folder: Path) -> tuple[str, ...]:
    """Names, one of which is that of the evaluated run."""
    return folder.name, *one.label.split("/")


def _damage(run: Run | TextRun) -> list[LeftOut]:
    return [LeftOut(f"part of {run.name}", "; ".join(run.damage))] if run.damage else []


def _about(gathered: Iterable[Gathered]) -> dict[str, Row]:
    """The columns of model and task, by the name of the run. If runs of one architecture, size and task differ in more
    than Canon layers, length, rate and seed, the architecture names the difference."""
    runs = [run for one in gathered for run in one.runs.values()]
    tasks = tasks_of(runs)
    rows: dict[str, Row] = {}
    alike: dict[tuple[Any, ...], list[Run | TextRun]] = {}
    for run in runs:
        arch, canon = split_arch(run.arch, _fields(run.config))
        task, setting = tasks[run.name]
        size = shape_of(run.config)
        alike.setdefault((arch, size, task, setting), []).append(run)
        size = size or (short_size(run.result.num_parameters) if run.result else None)
        rows[run.name] = {"source": "yours", "model": run.name, "arch": arch, "canon": canon, "size": size,
                          "lr": run.lr, "seed": run.seed, "task": task, "setting": setting}  # fmt: skip
    for group in alike.values():
        for run, text in zip(group, what_differs([settings_of(run.config, _SEEN) for run in group]), strict=True):
            rows[run.name]["arch"] += f" ({text})" if text else ""
    return rows


def tasks_of(runs: Sequence[Run | TextRun]) -> dict[str, tuple[str, str]]:
    """(task, setting) by the name of the run; the setting of text is the name of its mix."""
    texts = mixes([run for run in runs if isinstance(run, TextRun)])
    tasks = {run.name: ("text", mix) for mix, group in texts.items() for run in group}
    for run in runs:
        if isinstance(run, Run):
            task = run.config["task"]
            tasks[run.name] = run.task, setting_of(task if isinstance(task, dict) else {"name": task})
    return tasks


def _question(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in QUESTION)


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    model = config.get("model")
    fields, matched = (model.get(key) if isinstance(model, dict) else None for key in ("fields", "matched"))
    matched = matched if isinstance(matched, dict) else {}  # adjusted to match parameters: the architecture is the same
    return {k: v for k, v in fields.items() if k not in matched} if isinstance(fields, dict) else {}


def _of_evaluation(row: Evaluation | TextEvaluation, config: Mapping[str, Any], about: Row) -> Iterator[Row]:
    about = about | {"tokens": tokens_of(config, row.step), "unit": ""}
    for each in values_of(about["task"], row):
        if each.value is not None:
            percent = {} if each.percent is None else {"unit": PERCENT, "value": each.percent, "stderr": each.stderr}
            yield about | {"slice": each.slice, "metric": each.metric, "value": each.value, "n": each.total} | percent


def _of_evaluated(one: Evaluated, name: str, folder: Path) -> Iterator[Row]:
    about = _of_model(one, name, folder)
    for _, score, (task, setting, slice, metric) in scores_of(one):
        value, stderr, share = score["value"], score["stderr"], score["share"]
        scale = 100 if share else 1
        if math.isfinite(value):
            yield about | {
                "task": task, "setting": setting, "slice": slice, "metric": metric,
                "unit": PERCENT if share and metric not in LOWER_IS_BETTER else "", "value": scale * value,
                "stderr": None if stderr is None else scale * stderr, "n": score["n"],
            }  # fmt: skip


def scores_of(one: Evaluated) -> Iterator[tuple[Mapping[str, Any], Row, tuple[str, str | None, str, str]]]:
    """Each score with its entry and its (task, setting, slice, metric)."""
    for entry in one.entries:
        suite = entry["suite"]
        setting = setting_of_suite(suite, entry["settings"])
        for score in entry["scores"]:
            task, slice, metric = question_of(suite, entry["name"], score["measure"])
            key = one_line(slice_key(score["slice"]))
            if key != "all":
                slice = key if suite == "playground" else f"{slice}, {key}"
            yield entry, score, (task, setting, slice, metric)


def _of_model(one: Evaluated, name: str, folder: Path) -> Row:
    """The columns of an evaluated model: from its run, from the published settings, or from its results."""
    source = Path(str(one.model.get("source", "")))
    about: Row = {"source": "yours", "model": name, "size": short_size(one.model.get("parameters"))}
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
    from canonlm.experiments.published import settings

    known = settings().select("model", "arch", "canon", "size", "tokens", "lr").to_dicts()
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
