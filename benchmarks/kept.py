"""Final scores in the kept rows of an experiment: `python benchmarks/kept.py copying-micro first=all`."""

import csv
import sys
from collections import defaultdict
from statistics import mean

from canonlm.experiments.ledger import OWN_RESULTS


def scores(setting: str, slice_: str) -> dict[tuple[str, str, str], list[float]]:
    """Accuracies at the end of training, in percent and ascending, by architecture, size and learning rate."""
    with (OWN_RESULTS / f"{setting}.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
    last = {row["run"]: row for row in sorted(rows, key=lambda row: int(row["step"]))}
    by_arm = defaultdict(list)
    for row in last.values():
        counts = dict(part.rsplit(" ", 1) for part in row["slices"].split("; "))
        correct, total = map(int, counts[slice_].split("/"))
        by_arm[row["arch"], row["size"], row["lr"]].append(100 * correct / total)
    return {arm: sorted(values) for arm, values in sorted(by_arm.items())}


if __name__ == "__main__":
    for arm, values in scores(*sys.argv[1:]).items():
        print(*arm, "seeds", *(f"{value:.1f}" for value in values), "mean", f"{mean(values):.1f}", sep="\t")
