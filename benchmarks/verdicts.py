"""How often intervals and verdicts are right, on simulated runs whose distributions are known.

    python benchmarks/verdicts.py [--pages 2000] [--only coverage,tuning,pages,margins,power,speeds]

Writes benchmarks/results/verdicts.json after each part; 2,000 pages take about 20 minutes of a core. The distributions
are those of the runs that we keep (`atlas`: drawn from them with replacement) and worse ones: runs that solve a task or
do not, rare failures, skew, ties, unequal spread, correlated pairs. The functions judged are those of
`canonlm.runs.seed_statistics` and `canonlm.runs.speed`, and `canonlm.experiments.verdicts.state_of`.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from canonlm.core.files import write_text
from canonlm.experiments.verdicts import state_of
from canonlm.runs.seed_statistics import (
    LEVEL,
    compare,
    gaffke_interval,
    min_seeds,
    normal_difference,
    safe_difference,
    t_interval,
    visible_gap,
)
from canonlm.runs.speed import Speed, speed_factor

RESULT = Path(__file__).parent / "results" / "verdicts.json"
QUESTIONS = 1_000  # of a run
SEEDS = (5, 7)


class Law(NamedTuple):
    """A distribution of the accuracies of runs. draw(rng, seeds) → values in [0, 1]."""

    draw: Callable[[np.random.Generator, int], np.ndarray]
    mean: float


def gaussian(mean: float, sd: float) -> Law:
    return Law(lambda rng, seeds: np.clip(rng.normal(mean, sd, seeds), 0, 1), mean)


def two_state(share: float, solved: float = 1.0, not_solved: float = 0.13, sd: float = 0.0) -> Law:
    """Runs that have solved the task, or not."""

    def draw(rng: np.random.Generator, seeds: int) -> np.ndarray:
        done = rng.random(seeds) < share
        return np.clip(np.where(done, solved, not_solved) + sd * rng.normal(size=seeds), 0, 1)

    return Law(draw, share * solved + (1 - share) * not_solved)


def skewed(mean: float, sd: float, shape: float = 0.8) -> Law:
    """A long tail towards 0: minus a lognormal number."""
    centre, scale = math.exp(shape**2 / 2), math.sqrt((math.exp(shape**2) - 1) * math.exp(shape**2))
    return Law(lambda rng, seeds: mean - sd * (rng.lognormal(0, shape, seeds) - centre) / scale, mean)


U_SHAPED = Law(lambda rng, seeds: rng.beta(0.3, 0.3, seeds), 0.5)


def drawn_from(values: Sequence[float]) -> Law:
    return Law(lambda rng, seeds: rng.choice(values, seeds), float(np.mean(values)))


def _equal_means() -> dict[str, tuple[Law, Law]]:
    laws: dict[str, tuple[Law, Law]] = {}
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        law = two_state(share)
        laws[f"solves with {share} / steady"] = law, gaussian(law.mean, 0.01)
        laws[f"solves with {share} / the same"] = law, law
    for share, depth in ((0.05, 0.4), (0.1, 0.4), (0.2, 0.4), (0.1, 0.8), (0.2, 0.8)):
        law = two_state(1 - share, 0.9, 0.9 - depth, 0.02)
        laws[f"{share:.0%} fail by {100 * depth:.0f} points / steady"] = law, gaussian(law.mean, 0.02)
    laws["solves with 0.5 / solves a part with 0.625"] = two_state(0.5, 1, 0), two_state(0.625, 0.8, 0)
    laws["skewed, sd 7 / sd 1"] = skewed(0.6, 0.07), gaussian(0.6, 0.01)
    laws["sd 1 / sd 10"] = gaussian(0.5, 0.01), gaussian(0.5, 0.1)
    laws["sd 3 / the same"] = gaussian(0.5, 0.03), gaussian(0.5, 0.03)
    laws["sd 20 / the same"] = gaussian(0.5, 0.2), gaussian(0.5, 0.2)
    laws["U-shaped / the same"] = U_SHAPED, U_SHAPED
    laws["U-shaped / steady"] = U_SHAPED, gaussian(0.5, 0.01)
    laws["all right / the same"] = gaussian(1, 0), gaussian(1, 0)
    return laws


EQUAL = _equal_means()
DIFFERENT = {
    "sd 2, gap 20": (gaussian(0.7, 0.02), gaussian(0.5, 0.02)),
    "sd 2, gap 40": (gaussian(0.9, 0.02), gaussian(0.5, 0.02)),
    "0.8 against chance (0.13), sd 5": (gaussian(0.8, 0.05), gaussian(0.13, 0.01)),
    "0.95 against chance (0.13), sd 2": (gaussian(0.95, 0.02), gaussian(0.13, 0.01)),
    "solves with 0.9 against 0.1": (two_state(0.9), two_state(0.1)),
    "solves with 0.8 against 0": (two_state(0.8), gaussian(0.13, 0.01)),
}


def coverage(laws: tuple[Law, Law], how: Callable, seeds: int, pages: int, rng: np.random.Generator) -> float:
    """The share of intervals of a difference that contain the true one."""
    gap, held = laws[0].mean - laws[1].mean, 0
    for _ in range(pages):
        low, high = how(*(law.draw(rng, seeds).tolist() for law in laws), QUESTIONS)
        held += low - 1e-9 <= gap <= high + 1e-9
    return held / pages


def coverage_of_one(law: Law, how: Callable, seeds: int, pages: int, rng: np.random.Generator) -> float:
    held = 0
    for _ in range(pages):
        low, high = how(law.draw(rng, seeds).tolist())
        held += low - 1e-9 <= law.mean <= high + 1e-9
    return held / pages


def correlated(rho: float) -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
    """Two arms of which one state is 0.9 and the other 0.3, whose seeds agree with correlation rho."""

    def draw(rng: np.random.Generator, seeds: int) -> tuple[np.ndarray, np.ndarray]:
        both = rng.multivariate_normal([0, 0], [[1, rho], [rho, 1]], seeds).T
        first, other = np.where(both > 0, 0.9, 0.3)
        return first, other

    return draw


def false_pages(draw_arms: Callable[[], Sequence[np.ndarray]], pages: int) -> float:
    """The share of pages with any verdict; the first arm is the reference, and all means are equal."""
    wrong = 0
    for _ in range(pages):
        first, *others = draw_arms()
        results = [compare({"": arm.tolist()}, {"": first.tolist()}, QUESTIONS, pairs=len(others)) for arm in others]
        wrong += any(each.state in ("higher", "lower") for each in results)
    return wrong / pages


class Rates(NamedTuple):
    """An architecture's distributions at its learning rates."""

    laws: tuple[Law, ...]

    def tuned(self, rng: np.random.Generator, tuning: int, seeds: int) -> np.ndarray:
        """Fresh seeds at the rate that tuning seeds have chosen."""
        scores = [law.draw(rng, tuning).mean() for law in self.laws]
        return self.laws[int(np.argmax(scores))].draw(rng, seeds)


RATES = {
    "0.60, 0.55, 0.30, sd 5": Rates((gaussian(0.6, 0.05), gaussian(0.55, 0.05), gaussian(0.3, 0.05))),
    "0.60, 0.50, 0.30, sd 7": Rates((gaussian(0.6, 0.07), gaussian(0.5, 0.07), gaussian(0.3, 0.07))),
    "solves with 0.8, or 0.75, or 0.3": Rates((two_state(0.8), gaussian(0.75, 0.05), gaussian(0.3, 0.05))),
    "solves with 0.9, 0.6, 0.1": Rates((two_state(0.9), two_state(0.6), two_state(0.1))),
}


def page_with_tuning(rates: Rates, tuning: int, seeds: int, pairs: int, pages: int, rng: np.random.Generator) -> float:
    """Pages of identical architectures, each tuned on seeds of its own."""
    return false_pages(lambda: [rates.tuned(rng, tuning, seeds) for _ in range(pairs + 1)], pages)


MARGINS = {  # expectation, smallest difference, laws, the true state's opposite
    "higher by 10: true +13 (solves with 0.15 / chance)": ("higher", 0.1, two_state(0.15), gaussian(0.13, 0.01)),
    "higher by 10: true +17 (0.2)": ("higher", 0.1, two_state(0.2), gaussian(0.13, 0.01)),
    "higher by 10: true +26 (0.3)": ("higher", 0.1, two_state(0.3), gaussian(0.13, 0.01)),
    "higher by 5: true +4.5, sd 1": ("higher", 0.05, gaussian(0.545, 0.01), gaussian(0.5, 0.01)),
    "not lower by 5: true -8 (10% fail by 80)": ("not lower", 0.05, two_state(0.9, 0.9, 0.1), gaussian(0.9, 0.01)),
    "not lower by 5: true -16 (20% fail by 80)": ("not lower", 0.05, two_state(0.8, 0.9, 0.1), gaussian(0.9, 0.01)),
    "alike within 5: true -8 (10% fail by 80)": ("alike", 0.05, two_state(0.9, 0.9, 0.1), gaussian(0.9, 0.01)),
}


def wrong_state(expect: str, smallest: float, laws: tuple[Law, Law], seeds: int, pages: int, rng) -> float:
    """The share of verdicts that are the opposite of the truth."""
    gap = laws[0].mean - laws[1].mean
    holds = {"higher": gap >= smallest, "not lower": gap >= -smallest, "alike": abs(gap) <= smallest}[expect]
    wrong = "contradicted" if holds else "supported"
    draws = (tuple(law.draw(rng, seeds).tolist() for law in laws) for _ in range(pages))
    return sum(state_of(expect, smallest, safe_difference(*each, QUESTIONS)) == wrong for each in draws) / pages


def power(laws: tuple[Law, Law], seeds: int, pairs: int, pages: int, rng: np.random.Generator) -> float:
    draws = ([law.draw(rng, seeds).tolist() for law in laws] for _ in range(pages))
    return sum(compare({"": a}, {"": b}, QUESTIONS, pairs=pairs).state == "higher" for a, b in draws) / pages


END, EVERY = 600, 50  # the steps of a run, and from one evaluation to the next
Draw = Callable[[np.random.Generator, int], np.ndarray]


def learns(steps: float, sd: float) -> Draw:
    """Steps to a score, lognormal; later ones than END are not seen."""
    return lambda rng, seeds: steps * np.exp(sd * rng.normal(size=seeds))


def early_or_late(early: float, late: float, share: float = 0.5) -> Draw:
    return lambda rng, seeds: np.where(rng.random(seeds) < share, early, late) * np.exp(0.02 * rng.normal(size=seeds))


EQUALLY_FAST: dict[str, tuple[Draw, Draw]] = {
    "steady / half of the runs early, half late": (learns(275, 0.02), early_or_late(175, 375)),
    "steady / half early, half never": (learns(275, 0.02), early_or_late(175, math.inf)),
    "half early, half never / the same": (early_or_late(175, math.inf), early_or_late(175, math.inf)),
    "sd 0.3 / the same": (learns(275, 0.3), learns(275, 0.3)),
    "sd 0.8 / the same": (learns(275, 0.8), learns(275, 0.8)),
    "sd 0.02 / sd 0.8": (learns(275, 0.02), learns(275, 0.8)),
    "late, sd 0.5 / the same": (learns(550, 0.5), learns(550, 0.5)),
    "one in ten never / the same": (early_or_late(275, math.inf, 0.9), early_or_late(275, math.inf, 0.9)),
}
FASTER: dict[str, tuple[Draw, Draw]] = {
    "twice as fast, sd 0.1": (learns(175, 0.1), learns(350, 0.1)),
    "twice as fast, sd 0.3": (learns(175, 0.3), learns(350, 0.3)),
    "three times as fast, sd 0.3": (learns(125, 0.3), learns(375, 0.3)),
    "the other never gets there": (learns(275, 0.3), early_or_late(math.inf, math.inf)),
}


def called_faster(draws: tuple[Draw, Draw], seeds: int, pairs: int, pages: int, rng: np.random.Generator) -> float:
    """The share of pages on which a pair has an interval of speeds without 1."""
    found = 0
    for _ in range(pages):
        shown = (_speed(draws, seeds, pairs, rng) for _ in range(pairs))
        found += any(each is not None and not each.low <= 1 <= each.high for each in shown)
    return found / pages


def _speed(draws: tuple[Draw, Draw], seeds: int, pairs: int, rng: np.random.Generator) -> Speed | None:
    seen = (EVERY * np.ceil(draw(rng, seeds) / EVERY) for draw in draws)
    ours, theirs = ([step if step <= END else None for step in each.tolist()] for each in seen)
    return speed_factor(ours, theirs, END, LEVEL / pairs, every=EVERY)


def part(name: str, pages: int) -> dict[str, float]:
    """The results of one part, by what they are."""
    rng = np.random.default_rng(0)
    results: dict[str, float] = {}

    def note(what: str, value: float) -> None:
        results[what] = round(value, 4)
        print(f"{name:10} {what:75} {value:.4f}", flush=True)

    for seeds in SEEDS:
        if name == "coverage":
            for law, pair in EQUAL.items():
                note(f"{law}, {seeds} seeds, safe", coverage(pair, safe_difference, seeds, pages, rng))
                note(f"{law}, {seeds} seeds, normal", coverage(pair, normal_difference, seeds, pages, rng))
                one = partial(coverage_of_one, pair[0], seeds=seeds, pages=pages, rng=rng)
                note(f"{law}, {seeds} seeds, first arm, safe", one(gaffke_interval))
                note(f"{law}, {seeds} seeds, first arm, normal", one(partial(t_interval, questions=QUESTIONS)))
        elif name == "tuning":
            for rates, each in RATES.items():
                for tuning in (1, 3, 5):
                    what = f"rates {rates}, {tuning} tuning seeds, {seeds} seeds"
                    note(what, page_with_tuning(each, tuning, seeds, 1, pages, rng))
                note(f"rates {rates}, 3 tuning seeds, {seeds} seeds, page of 6",
                     page_with_tuning(each, 3, seeds, 6, pages // 4, rng))  # fmt: skip
        elif name == "pages":
            for law, (first, other) in EQUAL.items():
                for pairs in (1, 3, 6):
                    draw = partial(_arms, first, other, pairs, seeds, rng)
                    note(f"{law}, {seeds} seeds, {pairs} pairs", false_pages(draw, pages // pairs))
            for rho in (-0.5, 0.5, 0.8):
                draw_pair = correlated(rho)
                note(f"correlation {rho}, {seeds} seeds", false_pages(lambda: draw_pair(rng, seeds), pages))  # noqa: B023
        elif name == "margins":
            for what, (expect, smallest, *laws) in MARGINS.items():
                note(f"{what}, {seeds} seeds", wrong_state(expect, smallest, tuple(laws), seeds, pages, rng))
        elif name == "power":
            for what, laws in DIFFERENT.items():
                for pairs in (1, 6):
                    note(f"{what}, {seeds} seeds, {pairs} pairs", power(laws, seeds, pairs, pages // 4, rng))
        elif name == "speeds":
            for (what, draws), pairs in itertools.product((EQUALLY_FAST | FASTER).items(), (1, 6)):
                enough = max(seeds, min_seeds(pairs))
                share = called_faster(draws, enough, pairs, pages // pairs, rng)
                note(f"{what}, {enough} seeds, {pairs} pairs", share)
    if name == "power":
        for seeds in (5, 7, 10, 20, 40):
            note(f"visible gap of steady runs at 0.9 and 0.5, {seeds} seeds", visible_gap([0.9] * 2, [0.5] * 2, seeds))
    return results


def _arms(first: Law, other: Law, pairs: int, seeds: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [first.draw(rng, seeds), *(other.draw(rng, seeds) for _ in range(pairs))]


PARTS = ("coverage", "pages", "tuning", "margins", "power", "speeds")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=2_000)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results = {name: results[name] for name in PARTS if name in results}
    for name in options.only.split(","):
        results[name] = {"pages": options.pages, **part(name, options.pages)}
        write_text(RESULT, json.dumps(results, indent=1) + "\n")
