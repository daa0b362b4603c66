"""The demo's comparison, fairly: both architectures at the same learning rates and seeds, and plain Llama for longer.

    python benchmarks/demo.py [--out runs/fair]     about 50 minutes on two cores; can be interrupted and run again

Writes every evaluation of every run to benchmarks/results/demo.csv and demo-longer.csv, beside the report in --out. The
tables of docs/experiments/canon.md show these numbers.
"""

import argparse
import sys
from pathlib import Path

from canonlm.cli import main
from canonlm.core.files import write_text
from canonlm.report import load_play, numbers_csv

RESULTS = Path(__file__).parent / "results"
GRIDS = [
    "play copying --arch llama,llama+canon=A --lr 1e-3,3e-3,1e-2,3e-2 --seeds 3",
    "play depo --arch llama,llama+canon --lr 3e-4,1e-3,3e-3,1e-2 --seeds 3",
]
LONGER = "play depo --arch llama --lr 1e-3 train.steps=8000 train.eval_every=250 train.checkpoint_every=1000"


def run(out: Path) -> int:
    longer = out / "longer"
    for command, folder in [*((grid, out) for grid in GRIDS), (LONGER, longer)]:
        if code := main([*command.split(), "--out", str(folder)]):
            return code
    RESULTS.mkdir(exist_ok=True)
    for folder, name in [(out, "demo.csv"), (longer, "demo-longer.csv")]:
        write_text(RESULTS / name, numbers_csv(load_play(folder)))
        print(f"numbers: {RESULTS / name}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fair"), help="folder of the runs and the report")
    sys.exit(run(parser.parse_args().out))
