"""A profile: some architectures on all tasks of the micro scale, as an experiment made in memory.

It shares runs with registered experiments, and `replicate` works through it like any other. All
architectures have the same data, steps and rates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import yaml

from canonlm.core import user_code
from canonlm.core.errors import expected, unknown
from canonlm.experiments import grid
from canonlm.experiments.schema import FIRST_TUNING_SEED, Experiment, Panel, Setting, named, parse_size, setting
from canonlm.launch.recipes import load_preset
from canonlm.runs.seed_statistics import min_seeds
from canonlm.train.config import RunConfig, resolve
from canonlm.train.load_config import merge

SCALE = "micro"
ABILITIES = {
    "depth": ["depo"],
    "copying": ["copying"],
    "breadth": ["brevo"],
    "manipulation": ["mano"],
    "structure": ["lano"],
    "capacity": ["capo"],
    "tracking": ["s3", "z60", "a5"],
    "recall": ["noisy-recall", "changed-recall"],
    "length": ["longer-words", "more-pairs", "longer-rings"],
}
"""The tasks of a profile by the ability that they ask for; those alone in their ability are the default."""
AGAIN = "-again"
"""Ends the name of a setting with other seeds, which only the first architecture is trained with: it is compared with
itself."""
FIRST_SEED_AGAIN = 500
QUICK_SHARE = 3
"""A quick profile trains for the steps of a full one divided by this."""
BUDGET = 4
"""With `until`, a run has at most this many times the steps of a full profile."""


def tasks_of(names: Sequence[str]) -> list[str]:
    """The tasks of these tasks and abilities, each once; of none: those that a profile has by default. ValueError for
    any other name."""
    every = {name for of_ability in ABILITIES.values() for name in of_ability}
    chosen: list[str] = []
    for name in names or [ability for ability, of_ability in ABILITIES.items() if len(of_ability) == 1]:
        if name not in ABILITIES and name not in every:
            raise unknown("task or ability", name, {*ABILITIES, *every}, "tasks and abilities")
        chosen += ABILITIES.get(name, [name])
    return list(dict.fromkeys(chosen))


def label_of(setting_name: str) -> str:
    """`longer-words-micro` → `Longer words`"""
    words = setting_name.removesuffix(f"-{SCALE}").replace("-", " ")
    return words[:1].upper() + words[1:]


def profile(
    archs: Sequence[str],
    task_names: Sequence[str] = (),
    *,
    seeds: int | None = None,
    quick: bool = False,
    match: str | None = None,
    until: float | None = None,
    sizes: Sequence[str] = (),
    seed_set: int = 0,
) -> Experiment:
    """Every architecture on every task. The others are compared with the first architecture.

    task_names: of tasks and abilities (ABILITIES); empty: the abilities with one task. seeds: fresh seeds of each
    architecture; default: as many as verdicts need (`min_seeds`), or one if quick.
    quick: the middle rate, and a third of the training. match: as in `canonlm play`. until: a run ends
    when it has that share of the answers right, after at most BUDGET times as many steps. sizes: of all models, such as
    2L64D, each a row of its own; empty: the preset's. seed_set: as in `schema.load`.
    ValueError: no such task or architecture, fewer seeds than one, a model that cannot be built or matched.
    """
    from canonlm.train.build import check, with_complete_name  # imports torch, which pages do not need

    chosen_tasks = tasks_of(task_names)
    if seeds is not None and not 1 <= seeds <= FIRST_TUNING_SEED:
        raise expected("--seeds", f"an integer from 1 to {FIRST_TUNING_SEED}", seeds)
    if until is not None and quick:
        raise expected("--until", "no value with --quick", f"{until:.0%}")
    for size in sizes:
        parse_size(size)
    if twice := [size for size in sizes if sizes.count(size) > 1]:
        raise expected("--sizes", "different sizes", twice[0])
    pairs = len(chosen_tasks) * max(1, len(sizes)) * (len(set(archs)) - 1)
    count = seeds or (1 if quick else min_seeds(pairs))
    settings, panels = {}, []
    for task in chosen_tasks:
        registered = setting(name := f"{task}-{SCALE}")
        registered = registered if until is None else _longer(registered, until)
        settings[name] = _quick(registered, count) if quick else _tuned(registered, count)
        names = list(dict.fromkeys(with_complete_name(_config(registered, arch)).arch for arch in archs))
        if len(names) > 1 and not quick:
            settings[name + AGAIN] = settings[name].model_copy(update={"first_seed": FIRST_SEED_AGAIN})
        for each in ([size] for size in sizes) if sizes else [[]]:
            panels.append(Panel(settings=[name], arms=names, sizes=each))
            if name + AGAIN in settings:
                panels.append(Panel(settings=[name + AGAIN], arms=names[:1], sizes=each))
    first = panels[0].arms[0] if match else None
    command = "canonlm profile --quick" if quick else "canonlm profile"
    experiment = Experiment(
        title=_question(panels[0].arms), source=command, micro=panels, match=first, match_by=match or "parameters"
    )
    text = yaml.safe_dump(experiment.model_dump(exclude_defaults=True), sort_keys=False)
    text += "".join(f"# {key}: sha256 {file.sha256}\n" for arch in archs for key, file in _files(arch).items())
    named(experiment, "profile-quick" if quick else "profile-until" if until else "profile", text, settings, seed_set)
    for point in grid.points(experiment, SCALE):
        check(grid.tuning_runs(experiment, point)[0].config)
    return experiment


def _question(archs: Sequence[str]) -> str:
    if len(archs) == 1:
        return f"What is {archs[0]} good at?"
    if len(archs) == 2:
        return f"Is {archs[1]} better than {archs[0]}, at what, and is it sure?"
    return f"Which is better than {archs[0]}: {', '.join(archs[1:-1])} or {archs[-1]}? At what, and is it sure?"


def runs_of(experiment: Experiment, outcomes: grid.Outcomes) -> list[grid.GridRun]:
    """All runs of the profile, as its seeds are those of one look."""
    return grid.first_look_runs(experiment, SCALE, outcomes=outcomes)


def _tuned(registered: Setting, seeds: int) -> Setting:
    """With three tuning seeds per rate, rates that go on beyond an edge, and one look."""
    return registered.model_copy(update={"tuning_seeds": 3, "widen": 2, "looks": {seeds: 0.05}})


def _longer(registered: Setting, until: float) -> Setting:
    """Until a share of the answers that are scored is right, for BUDGET times the steps at most."""
    changed = _scaled(registered, lambda number: number * BUDGET)
    ends = {"until": until, "until_slices": registered.slices}
    return registered.model_copy(update={"changes": merge(merge(registered.changes, changed), {"train": ends})})


def _scaled(registered: Setting, scaled: Callable[[int], int]) -> dict[str, Any]:
    """Changes of the steps, or of the exposures of a task whose stream ends."""
    config = _config(registered, "llama")
    task = config.built_task
    if task is not None and task.training_windows(0, config.data.seq_len) is not None:
        return {"task": {"exposures": scaled(task.spec.exposures)}}
    return {"train": {"steps": scaled(config.train.steps)}}


def _quick(registered: Setting, seeds: int) -> Setting:
    """With a third of the training at one rate: nothing is tuned, and all seeds are reported."""
    rates = grid.rates_of(registered, None)
    shorter = _scaled(registered, lambda number: number // QUICK_SHARE)
    return registered.model_copy(
        update={
            "changes": merge(registered.changes, shorter),
            "rates": [rates[len(rates) // 2]],
            "tuning_seeds": seeds,
            "widen": 0,
            "choose_on": "test",
            "looks": {},
        }
    )


def _files(arch: str) -> dict[str, user_code.Outside]:
    """The user's files, which are part of the experiment's sha256."""
    reference = user_code.reference_of(arch)
    return {reference: user_code.load(reference)} if reference else {}


def _config(registered: Setting, arch: str) -> RunConfig:
    preset = load_preset(registered.task, registered.preset)
    return resolve(merge(merge(preset.run, registered.changes), {"arch": arch}))
