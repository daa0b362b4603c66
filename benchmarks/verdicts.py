"""How often verdicts are right, on simulated pages of reports whose distributions of runs are known.

    python benchmarks/verdicts.py [--pages 2000]        about 10 minutes; writes benchmarks/results/verdicts.json

A page has five slices and one or three pairs of architectures. A run has 1,000 questions a slice, in clusters of ten
that share an example (intra-class correlation 0.1). The script counts pages with a false verdict, intervals that
contain the mean, and pages on which a true difference is detected.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from canonlm.core.files import write_text
from canonlm.runs.seed_statistics import compare, gaffke_interval, t_interval

RESULT = Path(__file__).parent / "results" / "verdicts.json"
SLICES, QUESTIONS, CLUSTER, CORRELATION = 5, 1_000, 10, 0.1
Means = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(mean: float, sd: float) -> Means:
    return lambda rng, seeds: np.clip(rng.normal(mean, sd, (SLICES, seeds)), 0, 1)


def bimodal(share: float, *, together: bool, solved: float = 0.98, chance: float = 0.14) -> Means:
    """Runs that have solved the task, or not: each slice independently, or all slices together."""

    def draw(rng: np.random.Generator, seeds: int) -> np.ndarray:
        done = rng.random((1 if together else SLICES, seeds)) < share
        return np.broadcast_to(np.where(done, solved, chance), (SLICES, seeds))

    return draw


def u_shaped(rng: np.random.Generator, seeds: int) -> np.ndarray:
    return rng.beta(0.3, 0.3, (SLICES, seeds))


def tied(rng: np.random.Generator, seeds: int) -> np.ndarray:
    return np.ones((SLICES, seeds))


SAME = {
    "gaussian, sd 1": gaussian(0.5, 0.01),
    "gaussian, sd 3": gaussian(0.5, 0.03),
    "bimodal 0.5, slices apart": bimodal(0.5, together=False),
    "bimodal 0.5, slices together": bimodal(0.5, together=True),
    "bimodal 0.9, slices together": bimodal(0.9, together=True),
    "U-shaped": u_shaped,
    "tied at 1": tied,
}
DIFFERENT = {
    "0.94 against 0.125": (gaussian(0.94, 0.02), gaussian(0.125, 0.01)),
    "bimodal 0.9 against 0.1, together": (bimodal(0.9, together=True), bimodal(0.1, together=True)),
    "three points at sd 2": (gaussian(0.53, 0.02), gaussian(0.5, 0.02)),
}


def page(rng: np.random.Generator, draw_means: Means, seeds: int) -> dict[str, list[float]]:
    """Measured accuracies of one architecture, by slice."""
    means = draw_means(rng, seeds)
    clusters = QUESTIONS // CLUSTER
    strength = (1 - CORRELATION) / CORRELATION
    inside = (means > 1e-9) & (means < 1 - 1e-9)
    safe = np.where(inside, means, 0.5)
    shared = rng.beta(safe[..., None] * strength, (1 - safe[..., None]) * strength, (*means.shape, clusters))
    shared = np.where(inside[..., None], shared, means[..., None])
    measured = rng.binomial(CLUSTER, shared).sum(-1) / QUESTIONS
    return {str(index): row.tolist() for index, row in enumerate(measured)}


def false_wins(first: Means, other: Means, seeds: int, pairs: int, pages: int, rng: np.random.Generator) -> float:
    """The share of pages with any verdict when the means are equal."""
    wrong = 0
    for _ in range(pages):
        arms = [page(rng, first if index == 0 else other, seeds) for index in range(2 if pairs == 1 else 3)]
        combos = [(0, 1)] if pairs == 1 else [(0, 1), (0, 2), (1, 2)]
        verdicts = [compare(arms[a], arms[b], QUESTIONS, pairs=pairs) for a, b in combos]
        wrong += any(each.state in ("higher", "lower") for each in verdicts)
    return wrong / pages


def power(first: Means, other: Means, seeds: int, pages: int, rng: np.random.Generator) -> tuple[float, float]:
    """The shares of pages and of slices on which the difference is detected."""
    verdicts = [compare(page(rng, first, seeds), page(rng, other, seeds), QUESTIONS) for _ in range(pages)]
    score = sum(each.state == "higher" for each in verdicts) / pages
    return score, sum(len(each.slices) for each in verdicts) / (pages * SLICES)


def bias_of_choosing(rates: int, runs: Callable[[tuple[int, int]], np.ndarray], mean: float, pages: int) -> float:
    """How far the best of equally good rates lies above their common mean. runs: draws scores [rates, five seeds]."""
    return float(np.mean([runs((rates, 5)).mean(axis=1).max() for _ in range(pages)])) - mean


def coverage(values: Callable[[np.random.Generator], np.ndarray], mean: float, how, pages: int, rng) -> float:
    covered = 0
    for _ in range(pages):
        low, high = how(values(rng).tolist())
        covered += low - 1e-9 <= mean <= high + 1e-9
    return covered / pages


def simulate(pages: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    results: dict[str, dict[str, float]] = {"false wins": {}, "coverage": {}, "power": {}, "bias of choosing": {}}

    def note(kind: str, what: str, value: float) -> None:
        results[kind][what] = round(value, 4)
        print(f"{kind:12} {what:60} {value:.4f}")

    for seeds in (3, 5, 8):
        for name, means in SAME.items():
            note("false wins", f"{name}, {seeds} seeds", false_wins(means, means, seeds, 1, pages, rng))
        spread = false_wins(gaussian(0.5, 0.01), gaussian(0.5, 0.05), seeds, 1, pages, rng)
        note("false wins", f"gaussian, sd 1 against 5, {seeds} seeds", spread)
    for name, means in SAME.items():
        note("false wins", f"{name}, 5 seeds, three pairs", false_wins(means, means, 5, 3, pages // 2, rng))
    for name, (first, other) in DIFFERENT.items():
        for seeds in (5, 8, 10):
            score, slices = power(first, other, seeds, max(200, pages // 4), rng)
            note("power", f"{name}, {seeds} seeds, score", score)
            note("power", f"{name}, {seeds} seeds, slices", slices)
    for seeds in (3, 5, 10):
        for share in (0.1, 0.5, 0.9):

            def two_state(rng: np.random.Generator, share: float = share, seeds: int = seeds) -> np.ndarray:
                return np.where(rng.random(seeds) < share, 1.0, 0.1)

            note(
                "coverage",
                f"Gaffke, bimodal {share}, {seeds} seeds",
                coverage(two_state, share + 0.1 * (1 - share), gaffke_interval, pages, rng),
            )

        def normal(rng: np.random.Generator, seeds: int = seeds) -> np.ndarray:
            return rng.normal(0.5, 0.03, seeds)

        note(
            "coverage",
            f"floored t, gaussian sd 3, {seeds} seeds",
            coverage(normal, 0.5, lambda values: t_interval(values, QUESTIONS), pages, rng),
        )
    chooser = np.random.default_rng(1)
    for rates in (2, 3, 4, 6):
        errors = bias_of_choosing(rates, lambda shape: chooser.normal(0, 5**0.5, shape), 0, 10 * pages)
        note("bias of choosing", f"best of {rates} equal rates, gaussian, in standard errors of a mean", errors)
        halves = bias_of_choosing(rates, lambda shape: (chooser.random(shape) < 0.5) * 1.0, 0.5, 10 * pages)
        note("bias of choosing", f"best of {rates} equal rates, solved by half of five seeds, in shares", halves)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=2_000)
    options = parser.parse_args()
    result = {"pages": options.pages, **simulate(options.pages)}
    write_text(RESULT, json.dumps(result, indent=1) + "\n")
    sys.exit(0)
