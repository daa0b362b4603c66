"""How fast training windows of prepared text are read: shuffled, on one core, beside a memory copy.

    python benchmarks/loader.py [--quick] [--json] [--folder DIR]

Random tokens, 2 GB as uint16 and 2 GB as uint32, are written to a temporary folder under DIR and removed at the end.
They are in shards of 64 MB, with documents of 800 tokens on average. Each row: batches of 2**18 tokens (input_ids and
targets, and doc_ids if documents are isolated) of a shuffled stream, fresh windows in every pass, best of five. "mix"
reads eight sources of different weights. The checksum is the sum of all ids. The memory copy moves the bytes of
input_ids and targets (two int64 a token). Seconds are CPU time. The files are in the system's memory, so nothing waits,
and on an idle machine wall-clock time is the same.

"cold" is one pass in wall-clock time, before which the system is asked to drop the files from its memory (layers below
may still cache them). "anonymous memory" is the growth of this process's memory since before the first window, without
the pages of the files, which the system may keep or drop.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import canonlm
from canonlm.data import index
from canonlm.data.shards import Dataset
from canonlm.data.text import TextStream

Clock = Callable[[], float]

PASSES = 5
BATCH = 2**18  # tokens
SHARD = 2**26  # bytes
DOCUMENT = 800  # tokens
CASES = {  # name: (dtype, seq_len, isolated documents, sources)
    "uint16, 4096": ("uint16", 4096, False, 1),
    "uint16, 1024": ("uint16", 1024, False, 1),
    "uint32, 4096": ("uint32", 4096, False, 1),
    "uint32, 1024": ("uint32", 1024, False, 1),
    "uint16, 4096, isolated": ("uint16", 4096, True, 1),
    "uint16, 1024, isolated": ("uint16", 1024, True, 1),
    "uint32, 4096, mix": ("uint32", 4096, False, 8),
}


def write(folder: Path, dtype: str, size: int) -> Dataset:
    """Random tokens, `size` bytes in all."""
    folder.mkdir()
    generator, shards = np.random.default_rng(0), []
    vocab_size, count = {"uint16": 2**15, "uint32": 2**17}[dtype], SHARD // np.dtype(dtype).itemsize
    for number in range(size // SHARD):
        ends = np.append(np.unique(generator.integers(1, count, size=count // DOCUMENT)), count)
        shard = index.Shard(f"train-{number:05}.ds", count, len(ends), count, "0" * 64, "0" * 64)
        generator.integers(vocab_size, size=count, dtype=dtype).tofile(folder / shard.name)
        ends.astype("<u8").tofile(folder / shard.ends)
        shards.append(shard)
    tokenizer = {"name": "tokenizer.json", "sha256": "0" * 64}
    index.write(folder, index.Index(vocab_size, dtype, tokenizer, None, None, {"train": tuple(shards)}, (), 0, {}))
    return Dataset(folder)


def drop(folder: Path) -> None:
    """Ask the system to drop the files from its memory; it does unless they are mapped."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_pass(stream: TextStream, seq_len: int, number: int, tokens: int, clock: Clock) -> tuple[float, int]:
    """(seconds, checksum) of pass `number`: `tokens` tokens of fresh windows, a batch at a time."""
    count, seconds, checksum = BATCH // seq_len, 0.0, 0
    for batch in range(number * tokens // BATCH, (number + 1) * tokens // BATCH):
        start = clock()
        made = stream.rows(batch * count, count)
        seconds += clock() - start
        checksum += int(made.input_ids.sum())
    return seconds, checksum


def anonymous_memory() -> int:
    """MiB of this process's memory that is not backed by files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024


def measure(root: Path, tokens: int, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    sets = {dtype: write(root / dtype, dtype, size) for dtype in ("uint16", "uint32")}
    streams = {}
    for name, (dtype, seq_len, isolated, sources) in CASES.items():
        mix = {f"source {i}": (sets[dtype], "train", 1 / (1 + i)) for i in range(sources)}
        streams[name] = TextStream(mix, 0, seq_len, isolated), seq_len
        streams[name][0].describe(0)  # compile, or load from numba's disk cache
    copied = np.ones(2 * tokens, np.int64)
    copy = copied.copy()
    memory = anonymous_memory()
    cold = {}
    for dtype, dataset in sets.items():
        drop(dataset.folder)
        name = f"{dtype}, 4096"
        cold[name] = tokens / one_pass(*streams[name], PASSES, tokens, time.perf_counter)[0]
    speeds, checksums = dict.fromkeys([*CASES, "memory copy"], 0.0), dict.fromkeys(CASES, 0)
    for dataset in sets.values():
        for path in dataset.folder.iterdir():
            path.read_bytes()  # all of it in the system's memory
    for number in range(PASSES):  # all cases in turn, so that a disturbance does not hit all passes of one
        for name, (stream, seq_len) in streams.items():
            seconds, checksum = one_pass(stream, seq_len, number, tokens, time.process_time)
            speeds[name] = max(speeds[name], tokens / seconds)
            checksums[name] += checksum
        start = time.process_time()
        np.copyto(copy, copied)
        speeds["memory copy"] = max(speeds["memory copy"], tokens / (time.process_time() - start))
    versions = {"canonlm": canonlm.__version__, "numpy": np.__version__, "torch": torch.__version__}
    return {
        "tokens_per_s": {name: round(speeds[name]) for name in CASES},
        "cold_tokens_per_s": {name: round(speed) for name, speed in cold.items()},
        "memory_copy_tokens_per_s": round(speeds["memory copy"]),
        "anonymous_memory_mib": anonymous_memory() - memory,
        "checksum": checksums,
        "bytes_per_set": size,
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
    parser.add_argument("--quick", action="store_true", help="1 M tokens a pass and 128 MB, instead of 32 M and 2 GB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help="where to write the tokens; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(Path(folder), (1 if options.quick else 32) * 2**20, 2**27 if options.quick else 2**31)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}; best of {PASSES} passes of {result['tokens_per_pass']:,} tokens; {result['versions']}")
    copy = result["memory_copy_tokens_per_s"]
    for name, speed in result["tokens_per_s"].items():
        share = f"{speed / copy:6.1%} of a memory copy"
        print(f"{name:24} {speed / 1e6:8.1f} M tokens/s  {share}   checksum {result['checksum'][name]}")
    for name, speed in result["cold_tokens_per_s"].items():
        print(f"{name + ', cold':24} {speed / 1e6:8.1f} M tokens/s")
    print(f"{'memory copy':24} {copy / 1e6:8.1f} M tokens/s  (two int64 per token)")
    print(f"anonymous memory: {result['anonymous_memory_mib']:+} MiB")


if __name__ == "__main__":
    main()
