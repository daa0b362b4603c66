"""Works through experiments: registers them, trains missing runs, judges claims. A repeated call continues."""

import itertools
import re
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import canonlm
from canonlm.core.errors import expected, unknown, writing
from canonlm.core.files import make_folder, write_json, write_text
from canonlm.experiments import grid, ledger, registration, schema
from canonlm.experiments.outcomes import noted
from canonlm.experiments.plan import plan as plan_of
from canonlm.experiments.schema import Experiment
from canonlm.experiments.verdicts import Verdict, judge
from canonlm.launch import queue
from canonlm.launch.grid import PlannedRun
from canonlm.launch.plan import Cost, cost
from canonlm.runs.load import Run
from canonlm.train import data


def chosen(
    name: str, scale: str, only: Collection[str] = (), *, seed_set: int = 0, trust: bool = False
) -> list[Experiment]:
    """The experiment of that name, or for `all` every one that has the scale. ValueError: no such experiment, scale,
    setting or claim, a score that a task does not have, or a test of the paper's figure that its own numbers fail.
    trust: as in `schema.load`."""
    if scale not in schema.SCALES:
        raise unknown("scale", scale, schema.SCALES)
    loaded = [
        schema.load(each, seed_set=seed_set, trust=trust) for each in (schema.names() if name == "all" else [name])
    ]
    with_scale = [experiment for experiment in loaded if scale in experiment.scales]
    if not with_scale:
        raise ValueError(f"{name} has no {scale} scale; it has: {', '.join(loaded[0].scales) or 'none'}")
    settings = {point.setting for experiment in with_scale for point in grid.points(experiment, scale)}
    claims = {number for experiment in with_scale for number, claim in experiment.claims.items() if scale in claim.at}
    for part in only:
        if part not in settings | claims:
            raise unknown("setting or claim", part, settings | claims, "settings and claims")
    for experiment in with_scale:
        grid.check_scores(experiment, scale)
        if experiment.figure is not None:
            registration.refuse(experiment, scale)
    return [experiment for experiment in with_scale if grid.points(experiment, scale, only)]


def seed_set_of(text: str, out: Path, *folders: Path) -> int:
    """The number of a seed set; of `new`, the first after 0 of which no run is in `out`, among our own results, or in
    `folders` with CSV files: nobody has looked at it, so it can confirm a verdict. ValueError: neither."""
    if text != "new":
        if not text.isdecimal() or int(text) > schema.MAX_SEED_SET:
            raise expected("--seed-set", f"an integer from 0 to {schema.MAX_SEED_SET}, or new", text)
        return int(text)
    seeds = {run.seed for folder in (ledger.OWN_RESULTS, *folders) for run in ledger.read(folder).values()}
    seeds |= {int(match[1]) for path in (out / "runs").glob("*") if (match := re.search(r"-seed(\d+)-\w+$", path.name))}
    seen = {seed // schema.SEEDS_OF_A_SET for seed in seeds}
    return next(number for number in itertools.count(1) if number not in seen)


@dataclass(frozen=True)
class Estimate:
    """The cost of an experiment, without runs that earlier ones in the list need. cells: the number of cells
    of the paper that it repeats. done: the number of these runs that have finished."""

    experiment: Experiment
    cells: int
    cost: Cost
    done: int


def estimate(
    experiments: Sequence[Experiment],
    scale: str,
    out: Path,
    gpu: str,
    only: Collection[str] = (),
    finished: grid.Outcomes = MappingProxyType({}),
) -> list[Estimate]:
    """The costs of experiments. finished: outcomes of runs from elsewhere. Starts and writes nothing."""
    counted: set[str] = set()
    estimates = []
    for experiment in experiments:
        outcomes = ledger.outcomes_of([experiment], scale, out, finished)
        needed = grid.first_look_runs(experiment, scale, only, outcomes=outcomes)
        runs = {run.name: run.config for run in needed if run.name not in counted}
        counted |= runs.keys()
        cells = len(grid.cells(experiment)) if scale == "paper" else 0
        done = len(runs.keys() & outcomes.keys())
        estimates.append(Estimate(experiment, cells, cost(runs.values(), gpu), done))
    return estimates


def replicate(
    experiments: Sequence[Experiment],
    scale: str,
    out: Path,
    *,
    jobs: int = 1,
    only: Collection[str] = (),
    finished: grid.Outcomes = MappingProxyType({}),
    on_event: Callable[[queue.Event], None] = lambda event: None,
) -> dict[str, Run | None]:
    """Train unfinished runs, one experiment after another; returns the outcomes of all runs. finished: outcomes of runs
    from elsewhere, which are not trained. KeyboardInterrupt: stopped by a signal, and every run is saved."""
    commit = _commit()
    for experiment in experiments:
        register(experiment, scale, out, commit)
    outcomes: dict[str, Run | None] = dict(finished)
    for experiment in experiments:

        def plan(experiment: Experiment = experiment) -> list[PlannedRun]:
            outcomes.update(_finished_outcomes([experiment], scale, out, outcomes))
            planned = plan_of([experiment], scale, out, outcomes, only)
            return [_with_tokenizer(run) for run in planned if run.name not in finished]

        def report(event: queue.Event, experiment: Experiment = experiment) -> None:
            if event.kind == "started":
                ledger.note(event.run.folder, {f"{experiment.name}-{scale}": experiment.sha256}, commit)
            on_event(event)

        queue.work(out, plan, jobs=jobs, on_event=report)
        for run in plan():  # also those that another experiment has trained
            if outcomes.get(run.name) is not None:
                ledger.note(run.folder, {f"{experiment.name}-{scale}": experiment.sha256}, commit)
    return outcomes


def _with_tokenizer(run: PlannedRun) -> PlannedRun:
    """A run on text gets the special tokens of its folder. ValueError: the folder does not exist, or has
    another vocabulary."""
    return run if run.config.text is None else replace(run, config=data.complete(run.config))


def verdicts(experiments: Sequence[Experiment], scale: str, outcomes: grid.Outcomes) -> list[Verdict]:
    judged = [verdict for experiment in experiments for verdict in judge(experiment, scale, outcomes)]
    return sorted(judged, key=lambda verdict: verdict.claim)


def register(experiment: Experiment, scale: str, out: Path, commit: str = "") -> Path:
    """Write the experiment's file and its sha256 into `out`, before the first run. A changed file is another
    experiment, and gets a registration of its own."""
    name = f"{experiment.name}-{scale}-{experiment.sha256[:12]}"
    path = out / "experiments" / f"{name}.json"
    if path.exists():
        return path
    with writing("--out", out):
        make_folder(out, "experiments")
        write_text(path.with_suffix(".yaml"), experiment.text)
        about: dict[str, Any] = {"experiment": experiment.name, "scale": scale, "sha256": experiment.sha256}
        about |= {"registered": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "canonlm": canonlm.__version__}
        about |= {"commit": commit, "settings": {key: s.model_dump() for key, s in experiment.settings.items()}}
        write_json(path, about)
    return path


def of_another_version(experiment: Experiment, scale: str, out: Path, names: Collection[str]) -> int:
    """The number of these runs that were trained for another version of the experiment's file."""
    key = f"{experiment.name}-{scale}"
    return sum(noted(out / "runs" / name)[0].get(key, experiment.sha256) != experiment.sha256 for name in names)


def _finished_outcomes(
    experiments: Sequence[Experiment], scale: str, out: Path, known: grid.Outcomes
) -> dict[str, Run | None]:
    """The outcomes of finished runs, and None for runs that failed too often."""
    outcomes = ledger.outcomes_of(experiments, scale, out, known)
    for run in plan_of(experiments, scale, out, outcomes):
        if run.name not in outcomes and len(queue.failures(out / "leases", run.name)) >= queue.MAX_FAILURES:
            outcomes[run.name] = None
    return outcomes


def _commit() -> str:
    """The commit of this source, "" if it is not a clone."""
    try:
        command = ["git", "-C", str(Path(canonlm.__file__).parent), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
