"""Final scores in the kept rows of settings, of their seeds from FIRST_SEED on: accuracies in percent, or a measure.

python benchmarks/kept.py copying-micro,copying-atlas first=all [SEED_SET [FIRST_SEED]]   # rows of both
python benchmarks/kept.py text-micro loss_beyond 0 200
python benchmarks/kept.py s3-words n=8 0 200 +canon=64   # all pairs with and without it; 64 questions a run
python benchmarks/kept.py text-micro-depths loss 0 400 +canon   # of a measure
"""

import csv
import sys
from collections import defaultdict
from statistics import mean

from canonlm.experiments.ledger import OWN_RESULTS
from canonlm.experiments.schema import SEEDS_OF_A_SET
from canonlm.runs.seed_statistics import LEVEL, normal_difference, safe_difference


def by_seed(
    settings: str, score: str, seed_set: str = "0", first_seed: str = "0"
) -> dict[tuple[str, str, str], dict[int, float]]:
    """The accuracies on a slice, in percent, or a measure, at the end of training: for each seed, by architecture, size
    and learning rate."""
    first, rows = SEEDS_OF_A_SET * int(seed_set) + int(first_seed), []
    for setting in settings.split(","):
        with (OWN_RESULTS / f"{setting}.csv").open(newline="", encoding="utf-8") as file:
            fresh = [row for row in csv.DictReader(file) if row["split"] == "test"]
        rows += [row for row in fresh if first <= int(row["seed"]) < SEEDS_OF_A_SET * (int(seed_set) + 1)]
    last = {row["run"]: row for row in sorted(rows, key=lambda row: int(row["step"]))}
    by_arm: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    for row in sorted(last.values(), key=lambda row: int(row["seed"])):
        values = dict(part.rsplit(" ", 1) for key in ("slices", "measures") for part in row[key].split("; ") if part)
        correct, _, total = values[score].partition("/")
        value = 100 * int(correct) / int(total) if total else float(correct)
        by_arm[row["arch"], row["size"], row["lr"]][int(row["seed"])] = value
    return dict(sorted(by_arm.items()))


def print_pairs(by_arm: dict[tuple[str, str, str], dict[int, float]], added: str, questions: int | None) -> None:
    """The means without and with `added`, and the safe and the normal interval of the difference: in points, if every
    run has answered this many questions."""
    unit, form = (100, "{:.0f}") if questions else (1, "{:.3f}")
    scores = {(arm, size): [value / unit for value in seeds.values()] for (arm, size, _), seeds in by_arm.items()}
    pairs = [((arm, size), (arm + added, size)) for arm, size in scores if (arm + added, size) in scores]
    for without, with_it in pairs:
        values = scores[with_it], scores[without]
        shown = " -> ".join(form.format(unit * mean(each)) for each in reversed(values))
        for name, of in (("safe", safe_difference), ("normal", normal_difference)):
            ends = (form.format(unit * end) for end in of(*values, questions, LEVEL / len(pairs)))
            shown += f"\t{name} {' to '.join(ends)}"
        print(*without, shown, sep="\t")


if __name__ == "__main__":
    if len(sys.argv) < 3:  # --help, too
        sys.exit(__doc__)
    if len(sys.argv) > 5:
        added, _, questions = sys.argv[5].rpartition("=")
        counted = questions.isdecimal()  # not the sites of +canon=D
        print_pairs(by_seed(*sys.argv[1:5]), added if counted else sys.argv[5], int(questions) if counted else None)
        sys.exit()
    for arm, seeds in by_seed(*sys.argv[1:]).items():
        values = sorted(seeds.values())
        print(*arm, "seeds", *(f"{value:.4g}" for value in values), "mean", f"{mean(values):.4g}", sep="\t")
