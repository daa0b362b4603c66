"""Are verdicts right on runs that were really made? `benchmarks/atlas.yaml` has twenty of each architecture.

    python benchmarks/atlas.py [--pages 2000]

Writes benchmarks/results/atlas.json. The twenty final scores of an architecture are a distribution whose mean is known.
Intervals are tried on draws from two of them. Profiles have the same architecture under two names, and each name, and
the reference's second look, has runs of its own among the twenty. Rates are not chosen again: the twenty have one.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from verdicts import SEEDS, coverage, drawn_from

from canonlm.core.files import write_text
from canonlm.experiments import grid
from canonlm.experiments.ledger import OWN_RESULTS, read
from canonlm.experiments.outcomes import score
from canonlm.experiments.profile import SCALE, profile
from canonlm.experiments.profile_results import SOLVED, Profile, profiled
from canonlm.experiments.schema import Experiment, load
from canonlm.runs.load import Run
from canonlm.runs.seed_statistics import min_seeds, normal_difference, safe_difference

HERE = Path(__file__).parent
RUNS, OF_A_PROFILE = 20, min_seeds(1)


class Known(NamedTuple):
    """The runs of an architecture at its best rate, and the tuning runs of that rate."""

    rate: float
    fresh: list[Run]
    tuning: list[Run]
    scores: list[float]


def known() -> dict[tuple[str, str], Known]:
    """By task and architecture, where all twenty runs are there."""
    atlas, kept = load(str(HERE / "atlas.yaml")), read(OWN_RESULTS)
    complete = {}
    for point in grid.points(atlas, SCALE):
        if (rate := grid.tuned(atlas, point, kept)) is None:
            continue
        planned = grid.reported(atlas, point, kept, RUNS)
        tuning = [run.name for run in grid.tuning_runs(atlas, point, kept) if run.config.train.optim.lr == rate]
        if all(run.name in kept for run in planned):
            fresh = [kept[run.name] for run in planned]
            scores = [score(kept[run.name], atlas.settings[point.setting], run.config.train.steps) for run in planned]
            task = point.setting.removesuffix("-atlas")
            complete[task, point.arch] = Known(rate, fresh, [kept[name] for name in tuning], scores)
    return complete


def page(experiment: Experiment, law: Known, rng: np.random.Generator) -> Profile:
    """A profile of one architecture under two names, on one task."""
    outcomes, fresh = {}, iter(rng.permutation(len(law.fresh)))
    for point in grid.points(experiment, SCALE):
        tuning = iter(rng.permutation(len(law.tuning)))
        outcomes |= {run.name: law.tuning[next(tuning)] for run in grid.tuning_runs(experiment, point)}
        reported = grid.reported(experiment, point, outcomes, OF_A_PROFILE)
        outcomes |= {run.name: law.fresh[next(fresh)] for run in reported}
    return profiled(experiment, outcomes)


def verdicts(result: Profile) -> tuple[int, int]:
    """The numbers of comparisons with a verdict on final scores, and with an interval of speeds without 1."""
    every = [each for task in result.tasks for each in (*task.comparisons, task.itself) if each]
    ends = sum(each.end.state in ("higher", "lower") for each in every)
    return ends, sum(
        any(speed and not speed.low <= 1 <= speed.high for speed in each.speeds.values()) for each in every
    )


def described(law: Known) -> dict[str, float]:
    solve = sum(end >= SOLVED for end in law.scores)
    spread = {"mean": mean(law.scores), "sd": stdev(law.scores), "min": min(law.scores), "max": max(law.scores)}
    return {"rate": law.rate} | {key: round(value, 4) for key, value in spread.items()} | {"solve": solve}


def least_coverage(
    laws: dict[tuple[str, str], Known], how: Callable, seeds: int, pages: int, rng: np.random.Generator
) -> dict[str, float]:
    """The pair of architectures on one task, or of one with itself, whose true difference fewest intervals contain."""
    found = {}
    for ((task, one), first), ((other, two), second) in itertools.combinations_with_replacement(laws.items(), 2):
        if task == other:
            pair = drawn_from(first.scores), drawn_from(second.scores)
            found[f"{task}: {one}, {two}"] = round(coverage(pair, how, seeds, pages, rng), 4)
    worst = min(found, key=found.__getitem__)
    return {worst: found[worst]}


def false_profiles(laws: dict[tuple[str, str], Known], pages: int, rng: np.random.Generator) -> dict[str, object]:
    """Profiles of one architecture under two names: those with a false verdict, equally many of each architecture."""
    found: list[tuple[int, int]] = []
    for (task, _), law in laws.items():
        experiment = profile(["llama", "llama+canon"], [task])
        for name, setting in experiment.settings.items():
            experiment.settings[name] = setting.model_copy(update={"rates": [law.rate], "widen": 0})
        found += [verdicts(page(experiment, law, rng)) for _ in range(pages // len(laws))]
    ends, speeds = (sum(bool(verdict) for verdict in kind) for kind in zip(*found, strict=True))
    return {"pages": len(found), "seeds": OF_A_PROFILE, "with a verdict on scores": ends, "on speeds": speeds}


def main(pages: int) -> dict[str, object]:
    laws, rng = known(), np.random.default_rng(0)
    results: dict[str, object] = {f"{task} {arch}": described(law) for (task, arch), law in laws.items()}
    for seeds, how in itertools.product(SEEDS, (safe_difference, normal_difference)):
        results[f"{how.__name__}, {seeds} seeds, coverage"] = least_coverage(laws, how, seeds, pages, rng)
    results["profiles"] = false_profiles(laws, pages // 5, rng)
    return {"draws": pages} | results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=2_000)
    results = main(parser.parse_args().pages)
    write_text(HERE / "results" / "atlas.json", json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
