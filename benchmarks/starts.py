"""What the start of a run costs: eight short runs of `canonlm play`, forked from one process or each started by itself.

    python benchmarks/starts.py [--runs 8] [--out FILE.json]

Both ways in turns, three rounds. Seconds of the clock, and of processor time in all processes.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from canonlm.train.machine import cpu_name

ROUNDS = 3
PLAY = """\
import sys
from canonlm.cli import main
from canonlm.launch import local
if sys.argv[1] == "separate":
    local.can_fork = lambda *_: False
sys.exit(main(sys.argv[2:]))
"""


def seconds(way: str, runs: int) -> tuple[float, float]:
    """Of the clock, and of processor time."""
    with tempfile.TemporaryDirectory() as folder:
        play = ["play", "copying", "--arch", "llama", "--seeds", str(runs), "train.steps=60", "--out", folder]
        before, began = _processor(), time.perf_counter()
        subprocess.run([sys.executable, "-c", PLAY, way, *play], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began, _processor() - before


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {"forked": [], "separate": []}
    for _ in range(ROUNDS):
        for way, rounds in taken.items():
            rounds.append(seconds(way, options.runs))
    medians = {
        way: dict(zip(("clock_s", "processor_s"), map(statistics.median, zip(*rounds, strict=True)), strict=True))
        for way, rounds in taken.items()
    }
    result = {"machine": cpu_name(), "cores": os.cpu_count(), "runs": options.runs, "medians": medians, "rounds": taken}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
