"""Where should Canon layers go? The table of `benchmarks/sites.yaml`, and effects of A, B, C and D in all their sets.

python benchmarks/sites.py

Runs with one seed see the same windows in the same order, so differences are paired by seed, with 95 % t-intervals that
are not corrected for their number. An effect of several sites is how much the gain of one changes where another is
there, too: the usual contrasts of a 2^4 design, on average over the other sites; negative lowers the loss.
"""

import itertools
from statistics import mean

from kept import by_seed

from canonlm.runs.seed_statistics import t_interval

SITES = "ABCD"
RATE = 0.003


def interval(values: list[float]) -> str:
    low, high = t_interval(values)
    return f"{mean(values):+.3f} [{low:+.3f}, {high:+.3f}]"


def effect(losses: dict[str, dict[int, float]], sites: tuple[str, ...], seed: int) -> float:
    """The contrast of these sites, averaged over the sets of the others: of one, its gain; of two, the gain of one
    where the other is, minus its gain where it is not; and so on."""
    total = 0.0
    for there in itertools.product((False, True), repeat=len(SITES)):
        named = "".join(itertools.compress(SITES, there))
        sign = (-1) ** (len(sites) - sum(site in named for site in sites))
        total += sign * losses[named][seed]
    return total / 2 ** (len(SITES) - len(sites))


if __name__ == "__main__":
    losses = {}
    # Some of its runs were there already, as those of text-micro-again.
    runs = by_seed("text-micro-again", "loss", "0", "300") | by_seed("text-micro-sites", "loss", "0", "300")
    for (arch, _, rate), seeds in runs.items():
        if not arch.startswith("llama") or float(rate) != RATE or ":silu" in arch:
            continue
        losses["ABCD" if arch == "llama+canon" else arch.removeprefix("llama").removeprefix("+canon=")] = seeds
    for sites, seeds in sorted(losses.items(), key=lambda item: mean(item[1].values())):
        gains = [seeds[seed] - losses[""][seed] for seed in seeds]
        print(f"{sites or 'none':14}{mean(seeds.values()):.3f}", interval(gains) if sites else "", sep="  ")
    print()
    for one, other in (("ABCD", "CD"), ("ABCD", "KVOM"), ("ABCD", "+canon:k2"), ("ABCD", "+canon:k7")):
        print(f"{one} minus {other:10}", interval([losses[one][seed] - losses[other][seed] for seed in losses[one]]))
    print()
    for count in range(1, len(SITES) + 1):
        for sites in itertools.combinations(SITES, count):
            print(f"{' x '.join(sites):14}", interval([effect(losses, sites, seed) for seed in losses[""]]), sep="")
    alone = [sum(losses[site][seed] - losses[""][seed] for site in SITES) for seed in losses[""]]
    together = [losses[SITES][seed] - losses[""][seed] for seed in losses[""]]
    print("\nsum of the single gains", interval(alone), "all four", interval(together))
    print("all four minus the sum", interval([a - b for a, b in zip(together, alone, strict=True)]))
