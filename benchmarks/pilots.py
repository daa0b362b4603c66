"""Short runs to choose the micro sizes of `canonlm replicate`: where does the reference neither fail nor saturate?

    python benchmarks/pilots.py TASK ARCH LR [KEY=VALUE]...    one run of the tiny preset with these changes

Adds the run's last evaluation to benchmarks/results/pilots.csv, and all evaluations of its measures, with their values
in the column `loss`. The seed is 900, which no experiment uses, and the scores are those of the validation split, so no
verdict depends on samples that a pilot has seen.
"""

import csv
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from canonlm.launch.recipes import TEXT, load_preset
from canonlm.train.config import resolve
from canonlm.train.load_config import merge, override
from canonlm.train.loop import train

ROWS = Path(__file__).parent / "results" / "pilots.csv"
FIELDS = ("task", "arch", "lr", "changes", "steps", "seconds", "slice", "correct", "total", "loss")
SEED = 900


def main(task: str, arch: str, lr: str, *changes: str) -> None:
    torch.set_num_threads(1)
    raw = merge(load_preset(task, "tiny").run, {"arch": arch, "train": {"seed": SEED, "optim": {"lr": float(lr)}}})
    override(raw, ["train.eval_split=validation", *changes])
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        evals = []
        result = train(
            resolve(raw), Path(folder) / "run", lambda row: evals.append(row) if row["kind"] == "eval" else None
        )
        seconds = time.perf_counter() - begin
    last = result["final"]
    common = {"task": task, "arch": arch, "lr": lr, "changes": " ".join(changes), "steps": result["steps"]}
    new = not ROWS.exists()
    with ROWS.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in evals:
            measures = {**({"loss": row["loss"]} if task == TEXT else {}), **row.get("measures", {})}
            for name, value in measures.items():
                where = {"slice": json.dumps({"step": row["step"], "measure": name}), "loss": f"{value:.4g}"}
                writer.writerow({**common, "seconds": f"{seconds:.0f}", **where})
                print(task, arch, lr, *changes, where, flush=True)
        for part in last.get("slices", ()):
            where = json.dumps(part["slice"])
            counts = {"slice": where, "correct": part["correct"], "total": part["total"]}
            writer.writerow({**common, "seconds": f"{seconds:.0f}", **counts, "loss": f"{last['loss']:.4g}"})
            print(task, arch, lr, *changes, where, f"{part['correct'] / part['total']:.3f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 4:  # --help, too
        sys.exit(__doc__)
    main(*sys.argv[1:])
