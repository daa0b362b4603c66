"""The runs of an experiment at a scale: tuning seeds at every rate, then fresh seeds at the best rate.

A run is named by its identity (`canonlm.runs.identity`), so experiments that need the same run share it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from canonlm.core.errors import InvalidSetting, expected, unknown
from canonlm.experiments.outcomes import diverged, score
from canonlm.experiments.schema import FIRST_TUNING_SEED, SEEDS_OF_A_SET, At, Experiment, Setting, parse_size, places
from canonlm.launch.recipes import Preset, load_preset
from canonlm.runs.identity import identity, slug, within_limit
from canonlm.runs.load import Run
from canonlm.runs.rows import slice_key
from canonlm.runs.seed_statistics import best_rate
from canonlm.train.config import RunConfig, resolve
from canonlm.train.load_config import merge, outside_of

Outcomes = Mapping[str, Run | None]
"""Finished runs by name; None for a run that has failed for good."""


@dataclass(frozen=True)
class Point:
    """One architecture in one place of a panel."""

    setting: str
    arch: str
    difficulty: str | None  # or the setting's variant
    size: str | None


class GridRun(NamedTuple):
    """A run that an experiment needs."""

    name: str
    config: RunConfig


def points(experiment: Experiment, scale: str, only: Collection[str] = (), *, shared: bool = True) -> list[Point]:
    """All points that a scale trains, each once. only: names of settings, and of claims, which stand for the points
    that they compare. shared: also points of other figures."""
    compared = {point for number in only for point in _of_claim(experiment, scale, number)}
    trained = [
        Point(name, arch, difficulty, size)
        for panel in experiment.panels(scale)
        if shared or not panel.shared
        for name in panel.settings
        for difficulty in (*experiment.settings[name].kinds,) or (None,)
        for size in (*panel.sizes,) or (None,)
        for arch in panel.arms
    ]
    return [point for point in dict.fromkeys(trained) if not only or point.setting in only or point in compared]


def _of_claim(experiment: Experiment, scale: str, number: str) -> list[Point]:
    claim = experiment.claims.get(number)
    if claim is None or scale not in claim.at:
        return []
    return [point for arm in claim.arms for point in points_of(experiment, claim.at[scale], arm)]


def points_of(experiment: Experiment, at: At, arm: str) -> list[Point]:
    """The points of a claim's arm: one for each of its sizes."""
    return [Point(at.setting, arch, kind, size) for arch, kind, size in places(experiment, at, arm)]


def check_scores(experiment: Experiment, scale: str) -> None:
    """ValueError: a claim names a slice or a measure that its task does not have, or accuracies of text."""
    for number, claim in experiment.claims.items():
        at = claim.at.get(scale)  # type: ignore[call-overload]
        if at is None or not (at.slices or claim.slices or claim.measure or claim.steps_to):
            continue
        task, key = _base(experiment, points_of(experiment, at, claim.arms[0])[0]).built_task, f"claims.{number}."
        slices = [] if task is None else [slice_key(where) for where in task.slices()]
        for name in at.slices or claim.slices:
            if name not in slices:
                raise InvalidSetting(f"{key}slices", unknown(f"{key}slices", name, slices, "slices"))
        measures = ["loss", "loss_beyond"] if task is None else task.measures
        if claim.measure is not None and claim.measure not in measures:
            raise InvalidSetting(f"{key}measure", unknown(f"{key}measure", claim.measure, measures, "measures"))
        if claim.steps_to is not None and task is None:
            raise expected(f"{key}steps_to", "a task with accuracies", at.setting)


def first_look_runs(
    experiment: Experiment,
    scale: str,
    only: Collection[str] = (),
    *,
    shared: bool = True,
    outcomes: Outcomes = MappingProxyType({}),
) -> list[GridRun]:
    """The runs of the first look, each once. Until a rate is chosen, fresh seeds are at the middle rate; a point whose
    rates have all failed has none."""
    runs: dict[str, GridRun] = {}
    for point in points(experiment, scale, only, shared=shared):
        setting = experiment.settings[point.setting]
        tuning, rate = tuning_runs(experiment, point, outcomes), tuned(experiment, point, outcomes)
        if rate is None and not all(run.name in outcomes for run in tuning):
            rates = rates_of(setting, point.difficulty)
            rate = rates[len(rates) // 2]
        first = 0 if rate is None else min(setting.looks, default=0)
        fresh = [fresh_run(experiment, point, rate or 0, seed) for seed in range(first)]
        runs |= {run.name: run for run in (*tuning, *fresh)}
    return list(runs.values())


def tuning_runs(experiment: Experiment, point: Point, outcomes: Outcomes = MappingProxyType({})) -> list[GridRun]:
    """The runs that choose the rate. outcomes: of those that are done, which may ask for rates beyond the setting's."""
    rates = rates_tried(experiment, point, outcomes)
    return [run for rate in rates for run in _of_rate(experiment, point, rate)]


def _of_rate(experiment: Experiment, point: Point, rate: float) -> list[GridRun]:
    setting = experiment.settings[point.setting]
    if setting.choose_on == "test":
        return [fresh_run(experiment, point, rate, number) for number in range(setting.tuning_seeds)]
    numbers = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + setting.tuning_seeds)
    return [_run(experiment, point, rate, number, "validation") for number in numbers]


def fresh_run(experiment: Experiment, point: Point, rate: float, number: int) -> GridRun:
    """number: of the seed among the setting's reported ones."""
    return _run(experiment, point, rate, experiment.settings[point.setting].first_seed + number, "test")


def reported(experiment: Experiment, point: Point, outcomes: Outcomes, seeds: int) -> list[GridRun]:
    """The runs behind a verdict, in the order of their seeds; none while the rate is not known."""
    if (rate := tuned(experiment, point, outcomes)) is None:
        return []
    if experiment.settings[point.setting].choose_on == "test":
        return _of_rate(experiment, point, rate)
    return [fresh_run(experiment, point, rate, seed) for seed in range(seeds)]


def tuned(experiment: Experiment, point: Point, outcomes: Outcomes) -> float | None:
    """The rate whose tuning seeds have the best mean score, of equal ones the lowest loss; None while a tuning run is
    not done, or if all rates have failed. A rate at which a run failed or diverged does not count."""
    return _best_of(experiment, point, rates_tried(experiment, point, outcomes), outcomes)


def rates_tried(experiment: Experiment, point: Point, outcomes: Outcomes) -> tuple[float, ...]:
    """The rates that a point is tuned over: those of its setting, then more beyond an edge while the best one is there,
    `widen` at most."""
    setting = experiment.settings[point.setting]
    rates = rates_of(setting, point.difficulty)
    for _ in range(setting.widen):
        tried = sorted(rates)
        best = _best_of(experiment, point, rates, outcomes)
        if best == tried[-1]:
            rates = (*rates, _beyond(tried))
        elif best == tried[0]:
            rates = (*rates, _beyond(tried[::-1]))
        else:
            break
    return rates


def _beyond(rates: Sequence[float]) -> float:
    """The next rate after the last: 3e-4, 1e-3, 3e-3 → 1e-2."""
    period = min(2, len(rates) - 1)
    return float(f"{rates[-period] * rates[-1] / rates[-1 - period]:.6g}")


def _best_of(experiment: Experiment, point: Point, rates: Sequence[float], outcomes: Outcomes) -> float | None:
    setting, means = experiment.settings[point.setting], {}
    for rate in rates:
        planned = {run.name: run.config.train.steps for run in _of_rate(experiment, point, rate)}
        if not planned.keys() <= outcomes.keys():
            return None
        finished = {name: each for name in planned if (each := outcomes[name]) and not diverged(each, setting.measure)}
        if len(finished) == len(planned):
            scores = [score(each, setting, planned[name]) for name, each in finished.items()]
            means[rate] = len(scores), sum(scores) / len(scores), -fmean(each.final_loss for each in finished.values())
    return best_rate(means) if means else None


def at_edge(experiment: Experiment, point: Point, rate: float | None, outcomes: Outcomes) -> bool:
    """Whether the rate is the smallest or the largest of several rates that were tried."""
    tried = rates_tried(experiment, point, outcomes)
    return len(tried) > 1 and rate in (min(tried), max(tried))


def rates_of(setting: Setting, difficulty: str | None) -> tuple[float, ...]:
    return tuple(setting.rates) or _preset_of(setting, difficulty).lrs


# -- configurations ---------------------------------------------------------------------------------------------------


def _preset_of(setting: Setting, difficulty: str | None) -> Preset:
    return _preset(setting.task, setting.preset, None if setting.variants else difficulty)


@cache
def _preset(task: str, preset: str, difficulty: str | None) -> Preset:
    return load_preset(task, preset, difficulty)


_bases: dict[tuple[str, str, str | None], RunConfig] = {}
_models: dict[tuple[str, Point], RunConfig] = {}
_runs: dict[tuple[str, Point, float, int, str], GridRun] = {}


def _base(experiment: Experiment, point: Point) -> RunConfig:
    """The configuration of a setting at a difficulty, checked once, as a check takes milliseconds."""
    key = experiment.sha256, point.setting, point.difficulty
    if key not in _bases:
        setting = experiment.settings[point.setting]
        raw = merge(_preset_of(setting, point.difficulty).run, setting.changes)
        raw = merge(raw, setting.variants.get(point.difficulty or "", {}))
        _bases[key] = resolve(merge(raw, {"arch": "llama"}))
    return _bases[key]


def _run(experiment: Experiment, point: Point, rate: float, number: int, split: str) -> GridRun:
    seed = SEEDS_OF_A_SET * experiment.seed_set + number
    key = experiment.sha256, point, rate, seed, split
    if key not in _runs:
        config = _config(_sized(experiment, point), rate, seed, split)
        _runs[key] = GridRun(name_of(config), config)
    return _runs[key]


def _sized(experiment: Experiment, point: Point) -> RunConfig:
    """The configuration with the point's architecture and size, and the sizes that the experiment matches."""
    key = experiment.sha256, point
    if key not in _models:
        base = _base(experiment, point)
        model = base.model
        if point.size is not None:
            layers, width, heads = parse_size(point.size)
            heads = heads or max(1, width * model.num_attention_heads // model.hidden_size)
            sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
            model = model.model_copy(update=sizes)
        sized = base.model_copy(update={"arch": point.arch, "model": model})
        _models[key] = sized if experiment.match is None else _matched(sized, experiment.match, experiment.match_by)
    return _models[key]


def _matched(config: RunConfig, reference: str, match: str) -> RunConfig:
    from canonlm.train.build import build_model, matched, with_complete_name  # imports torch, which pages do not need

    model = build_model(config.model_copy(update={"arch": reference}), "meta")
    if not (changes := matched(config, model, match)):
        return config
    changes["fields"] = {**config.model.fields, **changes["fields"]}
    return with_complete_name(config.model_copy(update={"model": config.model.model_copy(update=changes)}))


def _config(base: RunConfig, rate: float, seed: int, split: str) -> RunConfig:
    changes = {"seed": seed, "eval_split": split, "optim": base.train.optim.model_copy(update={"lr": rate})}
    task = base.built_task
    if task is not None and (windows := task.training_windows(seed, base.data.seq_len)) is not None:
        changes["steps"] = -(-windows // base.train.batch_size)  # all of a stream that ends
    return base.model_copy(update={"train": base.train.model_copy(update=changes)})


def name_of(config: RunConfig) -> str:
    """The name of a run and its folder: readable, and unique by the run's identity, which covers the contents of the
    user's files."""
    optim, task = config.train.optim, (config.task or {}).get("name", "text")
    plain = f"{slug(task)}-{slug(config.arch)}"
    outside = {reference: file.sha256 for reference, file in outside_of(config).items()}
    which = identity(config.model_dump(), outside)
    return within_limit(plain, f"-lr{optim.lr:g}-seed{config.train.seed}-{which}")


def size_of(config: RunConfig) -> str:
    return f"{config.model.num_hidden_layers}L{config.model.hidden_size}D"


# -- the paper's cells ------------------------------------------------------------------------------------------------


def cells(experiment: Experiment) -> set[tuple[str, str, str, str, str]]:
    """(task as the paper calls it, our architecture, difficulty as the paper writes it, size, slice or measure) of the
    numbers that the paper prints and the paper scale repeats."""
    printed = set()
    for point in points(experiment, "paper", shared=False):
        setting = experiment.settings[point.setting]
        for key in [setting.measure] if setting.measure else setting.slices or [""]:
            if setting.paper:
                printed.add(
                    (setting.paper, point.arch, _printed(setting.task, point.difficulty), point.size or "", key)
                )
    return printed


def _printed(task: str, difficulty: str | None) -> str:
    """`depo1-225` and `depo1-225-k4` → `N=225`, `mano-10` → `L=10`, `cfg3f` → `cfg3f`"""
    name, _, number = (difficulty or "").removesuffix("-k4").rpartition("-")
    return f"{'L' if task == 'mano' else 'N'}={number}" if name else number
