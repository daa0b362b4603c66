"""How fast the samplers are: packed training windows (ids, labels, doc ids) on one core, beside a memory copy.

    python benchmarks/tasks.py [--quick] [--json]

Each row: training windows at the paper's smallest difficulty and context, fresh ones in every pass, best of five. The
checksum is the sum of all ids of all passes, so that skipped work would be noticed. The memory copy moves the same
number of bytes per token (three int32) and shows how far a sampler is from the speed of memory.
"""

import argparse
import json
import platform
import time
from typing import Any

import numba
import numpy as np

import canonlm
from canonlm import tasks

CASES = {  # name: (task, difficulty, context)
    "depo1-225": ("depo", "depo1-225", 2048),
    "depo2-75": ("depo", "depo2-75", 2048),
    "mano-10": ("mano", "mano-10", 1024),
    "cfg3f": ("lano", "cfg3f", 512),
    "brevo1-70": ("brevo", "brevo1-70", 1024),
    "brevo2-30": ("brevo", "brevo2-30", 1536),
    "copying-32": ("copying", "copying-32", 1024),
    "mqar-16": ("mqar", "mqar-16", 1024),
    "state-s5": ("state", "state-s5", 1024),
    "automaton-5": ("automaton", "automaton-5", 1024),
    "flipflop-64": ("flipflop", "flipflop-64", 1024),
    "arithmetic-40": ("arithmetic", "arithmetic-40", 1024),
    "arithmetic-40-brackets": ("arithmetic", "arithmetic-40-brackets", 1024),
    "recall-noisy": ("recall", "recall-noisy", 1024),
    "recall-zoology": ("recall", "recall-zoology", 1024),
    "palindrome-128": ("palindrome", "palindrome-128", 1024),
    "selective-256": ("selective", "selective-256", 1024),
    "stack-341": ("stack", "stack-341", 1024),
    "dictionary-64": ("dictionary", "dictionary-64", 1024),
    "induction-256": ("induction", "induction-256", 1024),
    "capo-50k": ("capo", "capo-50k", 512),
}
PASSES = 5
BATCH = 2**18  # tokens per call: the paper's batch for Depo, 128 windows of 2048


def one_pass(task: tasks.Task, seq_len: int, number: int, tokens: int) -> tuple[float, int]:
    """(seconds, checksum) of pass `number`: `tokens` tokens of fresh windows, a batch at a time."""
    count, seconds, checksum = BATCH // seq_len, 0.0, 0
    for batch in range(number * tokens // BATCH, (number + 1) * tokens // BATCH):
        start = time.perf_counter()
        windows = task.windows("train", 0, batch * count, count, seq_len=seq_len)
        seconds += time.perf_counter() - start
        checksum += int(windows.input_ids.sum(dtype=np.int64))
    return seconds, checksum


def measure(tokens: int) -> dict[str, Any]:
    speeds, checksums = dict.fromkeys([*CASES, "memory copy"], 0.0), dict.fromkeys(CASES, 0)
    samplers = {name: (tasks.get(task, difficulty=difficulty), seq) for name, (task, difficulty, seq) in CASES.items()}
    for task, seq_len in samplers.values():
        task.windows("train", 0, 0, 1, seq_len=seq_len)  # compile, or load from numba's disk cache
    source = np.ones(3 * tokens, np.int32)
    copy = source.copy()
    for number in range(PASSES):  # all cases in turn, so that a disturbance does not hit all passes of one
        for name, (task, seq_len) in samplers.items():
            seconds, checksum = one_pass(task, seq_len, number, tokens)
            speeds[name] = max(speeds[name], tokens / seconds)
            checksums[name] += checksum
        start = time.perf_counter()
        np.copyto(copy, source)
        speeds["memory copy"] = max(speeds["memory copy"], tokens / (time.perf_counter() - start))
    versions = {"canonlm": canonlm.__version__, "numba": numba.__version__, "numpy": np.__version__}
    return {
        "tokens_per_s": {name: round(speeds[name]) for name in CASES},
        "memory_copy_tokens_per_s": round(speeds["memory copy"]),
        "checksum": checksums,
        "tokens_per_pass": tokens,
        "passes": PASSES,
        "machine": _machine(),
        "versions": versions | {"python": platform.python_version()},
    }


def _machine() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or platform.processor()}, {platform.system()} {platform.machine()}, one core used"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 M tokens a pass instead of 32 M")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure((1 if options.quick else 32) * 2**20)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}; best of {PASSES} passes of {result['tokens_per_pass']:,} tokens; {result['versions']}")
    copy = result["memory_copy_tokens_per_s"]
    for name, speed in result["tokens_per_s"].items():
        share = f"{speed / copy:6.1%} of a memory copy"
        print(f"{name:22} {speed / 1e6:8.1f} M tokens/s  {share}   checksum {result['checksum'][name]}")
    print(f"{'memory copy':22} {copy / 1e6:8.1f} M tokens/s  (three int32 per token)")


if __name__ == "__main__":
    main()
