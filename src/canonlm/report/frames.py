"""Run folders in, rows of `canonlm.report.tidy` out: what runs scored at last, and on the way.

Nothing here trusts a file: what cannot be read, or has not finished, is left out and named.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .. import archs
from .evals import Evaluated, load_evaluated
from .play import run_folders
from .published.benchmarks import DIFFICULTIES, LOWER_IS_BETTER, PERCENT
from .runs import DAMAGE, Evaluation, LeftOut, Run, load_runs, primary, slice_key
from .tidy import QUESTION, frame, short_size

if TYPE_CHECKING:
    import polars as pl

Row = dict[str, Any]

_TITLES = {"llama": "Llama", "gla5": "GLA5", "gdn2": "GDN2", "mamba2": "Mamba2"}
"""Base architectures as the release writes them."""

_ONCE = ("fda", "swde", "squad_completion")
_TWICE = {"canonlm_fda_twice": "fda", "canonlm_swde_twice": "swde", "canonlm_squad_twice": "squad_completion"}
"""Tasks of the harness in which the text with the answer is told once and twice."""


def runs_frame(folders: Iterable[str | Path]) -> "tuple[pl.DataFrame, list[LeftOut]]":
    """Final accuracies and measures of playground runs, and everything that `canonlm eval` has found.

    folders: runs, folders of runs, play folders, folders of results of `canonlm eval`.

    Left out, with a reason: what cannot be read, runs that have not finished (`runs_curves` has them) or saved nothing.
    ValueError: a folder with neither runs nor results in it.
    """
    found: list[tuple[Path, list[Row]]] = []
    left_out: list[LeftOut] = []
    for folder in dict.fromkeys(map(Path, folders)):
        rows: list[Row] = []
        found.append((folder, rows))
        runs, unread = load_runs(run_folders(folder))
        evaluated, unreadable = load_evaluated(folder)
        finals: dict[str, set[tuple[Any, ...]]] = {}
        asked = {part for one in evaluated for part in (folder.name, *one.label.split("/"))}
        # A run on text has no final accuracy, but what it was asked afterwards is shown.
        left_out += [entry for entry in unread if not (entry.name in asked and entry.reason.startswith("text:"))]
        left_out += unreadable
        for run in runs:
            if run.result is None:
                left_out.append(LeftOut(run.name, "; ".join([f"{run.state}: no final result", *run.notes])))
            else:
                final = list(_of_evaluation(run, run.result.final))
                finals[run.name] = {_asked(row) for row in final}
                rows += final
                if damage := [*run.notes, *([f"{run.damaged_rows} damaged rows"] if run.damaged_rows else [])]:
                    left_out.append(LeftOut(f"part of {run.name}", "; ".join(damage)))
        for one in evaluated:
            known = set().union(*(finals.get(part, set()) for part in (folder.name, *one.label.split("/"))))
            try:
                for row in list(_of_evaluated(one, folder)):
                    again = {"setting": f"{row['setting']}, asked again"} if _asked(row) in known else {}
                    rows.append(row | again)  # other questions of the same kind: no second pair of the run
            except DAMAGE as error:
                left_out.append(LeftOut(one.label, f"not readable: {type(error).__name__}: {error}"))
    return frame(_told_apart(found)), left_out


def runs_curves(folders: Iterable[str | Path]) -> "tuple[pl.DataFrame, list[LeftOut]]":
    """Every evaluation during training and every recorded training loss, running and crashed runs included; `tokens` is
    how many had been seen. Otherwise as `runs_frame`."""
    found: list[tuple[Path, list[Row]]] = []
    left_out: list[LeftOut] = []
    for folder in dict.fromkeys(map(Path, folders)):
        rows: list[Row] = []
        found.append((folder, rows))
        runs, unread = load_runs(run_folders(folder))
        left_out += unread
        for run in runs:
            about = _of_run(run)
            for row in run.evals:
                rows += _of_evaluation(run, row)
            for train in run.train:
                if math.isfinite(train.loss):
                    rows.append(about | {"tokens": tokens_of(run.config, train.step), "task": "train", "slice": "all",
                                         "metric": "loss", "unit": "", "value": train.loss})  # fmt: skip
            if damage := [*run.notes, *([f"{run.damaged_rows} damaged rows"] if run.damaged_rows else [])]:
                left_out.append(LeftOut(f"part of {run.name}", "; ".join(damage)))
    return frame(_told_apart(found)), left_out


def _asked(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in QUESTION)


def _told_apart(found: Sequence[tuple[Path, list[Row]]]) -> Iterator[Row]:
    """Models of one name in two folders get the folder before it."""
    names = [{row["model"] for row in rows} for _, rows in found]
    for place, (folder, rows) in enumerate(found):
        others = set().union(*names[:place], *names[place + 1 :])
        for row in rows:
            yield row | {"model": f"{folder}/{row['model']}"} if row["model"] in others else row


def split_arch(arch: str) -> tuple[str, str | None]:
    """(architecture without Canon, sites): `gla5+canon` → `GLA5`, `AbCD`; `llama+canon=AC+rope=0.25` →
    `Llama+rope=0.25`, `AC`. Sites are None where the name says nothing to us."""
    base, *parts = arch.split("+")
    others = [part for part in parts if part.partition("=")[0] not in ("canon", "frozen")]
    name = "+".join([_TITLES.get(base.removesuffix("-conv"), base), *others])
    try:
        fields = archs.resolve(arch, head_dim=64, num_heads=16)
    except ValueError:
        return arch, None
    sites = fields.get("canon_set") or ",".join(dict.fromkeys(s or "none" for s in fields.get("canon_sets", ["none"])))
    return name, sites + ("(frozen)" if fields.get("canon_frozen") else "")


def tokens_of(config: Mapping[str, Any], step: int) -> int | None:
    """Tokens that had been read at a step; None where an old configuration does not say."""
    try:
        return step * int(config["train"]["batch_size"]) * int(config["data"]["seq_len"])
    except DAMAGE:
        return None


def setting_of(task: Mapping[str, Any]) -> str:
    """The name of the difficulty, where it is one of the paper's, or else all settings of the task."""
    spec = {key: value for key, value in task.items() if key != "name"}
    for name, known in DIFFICULTIES.get(str(task.get("name")), {}).items():
        if spec == known:
            return name
    return ", ".join(f"{key}={value}" for key, value in spec.items())


def _shape(config: Mapping[str, Any]) -> str | None:
    """`12L768D`, as the paper calls models of this size: the same with and without Canon layers."""
    model = config.get("model")
    layers, width = (
        (model.get(key) for key in ("num_hidden_layers", "hidden_size")) if isinstance(model, dict) else (0, 0)
    )
    return f"{layers}L{width}D" if isinstance(layers, int) and isinstance(width, int) and layers and width else None


def _of_run(run: Run) -> Row:
    arch, canon = split_arch(run.arch)
    size = _shape(run.config) or (short_size(run.result.num_parameters) if run.result else None)
    return {"source": "yours", "model": run.name, "arch": arch, "canon": canon, "size": size, "lr": run.lr,
            "seed": run.seed}  # fmt: skip


def _of_evaluation(run: Run, row: Evaluation) -> Iterator[Row]:
    """The mean over the slices of the primary scale first, as in the report, then slice by slice, then measures."""
    task = run.config["task"] if isinstance(run.config["task"], dict) else {"name": run.task}
    about = _of_run(run) | {"tokens": tokens_of(run.config, row.step), "task": run.task, "setting": setting_of(task)}
    each = {}
    for key, count in row.slices.items():
        each[key] = math.sqrt(count.accuracy * (1 - count.accuracy) / max(1, count.total - 1))
    keys = primary(row.slices)
    accuracy = about | {"metric": "accuracy", "unit": PERCENT}
    if "all" not in row.slices:
        error = math.sqrt(sum(each[key] ** 2 for key in keys)) / len(keys)
        total = sum(row.slices[key].total for key in keys)
        yield accuracy | {"slice": "all", "value": 100 * row.accuracy, "stderr": 100 * error, "n": total}
    for key, count in row.slices.items():
        yield accuracy | {"slice": key, "value": 100 * count.correct / count.total, "stderr": 100 * each[key],
                          "n": count.total}  # fmt: skip
    for name, value in row.measures.items():
        yield about | {"slice": "all", "metric": name, "unit": "", "value": value}
    if row.loss is not None:
        yield about | {"slice": "all", "metric": "loss", "unit": "", "value": row.loss}


def _of_evaluated(one: Evaluated, folder: Path) -> Iterator[Row]:
    about = _of_model(one, folder)
    for entry in one.entries:
        suite, name = entry["suite"], entry["name"]
        for score in entry["scores"]:
            share = bool(score["share"])
            scale = 100 if share else 1
            value, stderr, n = float(score["value"]), score.get("stderr"), score.get("n")
            if not math.isfinite(value):
                continue
            task, slice, metric = _question(suite, name, score["measure"])
            where = slice_key(score["slice"])
            if where != "all":
                slice = where if suite == "playground" else f"{slice}, {where}"
            setting = _asked_with(suite, entry.get("settings") or {})
            yield about | {
                "task": task, "setting": setting, "slice": slice, "metric": metric,
                "unit": PERCENT if share and metric not in LOWER_IS_BETTER else "", "value": scale * value,
                "stderr": None if stderr is None else scale * float(stderr), "n": n if isinstance(n, int) else None,
            }  # fmt: skip


def _question(suite: str, name: str, measure: str) -> tuple[str, str, str]:
    """(task, slice, metric) as the published results have them."""
    if suite == "multihop":
        return suite, name, measure
    if suite == "babilong":
        return suite, name.removeprefix("babilong-"), measure
    if suite == "harness" and name.startswith("niah_single_") and measure.isdecimal():
        return name, f"{int(measure) / 1024:g}k", "contains"  # the harness names a needle's score by its length
    if suite == "harness" and name in _ONCE:
        return name, "once", measure
    if suite == "harness" and name in _TWICE:
        return _TWICE[name], "twice", measure
    return name, "all", measure


def _asked_with(suite: str, settings: Mapping[str, Any]) -> str | None:
    """What sets numbers of one name apart: the difficulty of a task; for multi-hop whether people are asked about by
    the published law, in which the place in the text gives answers away."""
    if suite == "playground" and isinstance(task := settings.get("task"), dict):
        return setting_of(task)
    told = []
    if suite == "multihop" and settings.get("published") is False:
        told = ["fair", *([f"{settings['people']} people"] if "people" in settings else [])]
    if suite == "babilong" and settings.get("text") != "dataset":
        told = [str(settings.get("facts", "simulator"))]
    told += [
        f"{key}={settings[key]}" for key in ("limit", "num_fewshot", "max_length") if settings.get(key) is not None
    ]
    told += ["bos"] if settings.get("bos") else []
    return ", ".join(told) or None


def _of_model(one: Evaluated, folder: Path) -> Row:
    """What is known of an evaluated model: from its run, or because it is a published one, or from its results."""
    source = Path(str(one.model.get("source", "")))
    label = f"{folder.name}/{one.label}" if (folder / "config.yaml").is_file() else one.label
    about: Row = {"source": "yours", "model": label, "size": short_size(one.model.get("parameters"))}
    if source.name in _settings():
        return about | _settings()[source.name]
    arch = one.model.get("arch")
    if isinstance(arch, str):
        about["arch"], about["canon"] = split_arch(arch)
    for place in (source, folder / source.name, folder / "runs" / source.name, folder):
        if place.name == source.name and (place / "config.yaml").is_file():
            return about | _of_its_run(place, one.model.get("step"))
    return about


@cache
def _settings() -> dict[str, Row]:
    from .published import settings

    known = settings().select("model", "arch", "canon", "size", "tokens", "lr").to_dicts()
    return {row.pop("model"): row for row in known}


def _of_its_run(place: Path, step: Any) -> Row:
    """From the configuration alone, as the run may be one on text, which `load_run` refuses."""
    try:
        config = yaml.safe_load((place / "config.yaml").read_text(encoding="utf-8"))
        train = config["train"]
        arch, canon = split_arch(str(config["arch"]))
        tokens = tokens_of(config, step) if isinstance(step, int) else None
        size = {"size": shape} if (shape := _shape(config)) else {}
        return {"arch": arch, "canon": canon, "lr": float(train["optim"]["lr"]), "seed": int(train["seed"]),
                "tokens": tokens, **size}  # fmt: skip
    except (*DAMAGE, OSError, yaml.YAMLError):
        return {}
