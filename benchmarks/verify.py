"""What a run pays to verify the shards that it reads (`data.verify`), and to check for tokens beyond the vocabulary.

    python benchmarks/verify.py [--quick] [--threads 1,2] [--json FILE] [--folder DIR]

training     Tokens per second of our loop while the verifier works and while it does not, taking turns of a few steps
             within one run. The verifier has work for all its turns: it hashes 256 MB of tokens again and again (a real
             run does so once). The files are in the system's memory. The ratio is the median over neighbouring turns.
             `megabytes_per_s` and `core` are the verifier's speed and its share of a core in its turns.
hashing      The verifier alone.
vocabulary   Reading batches of 2**18 tokens in windows of 4096, and the check for tokens beyond the vocabulary alone
             (the maximum of the same number of tokens): medians over the rounds.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from canon import load, machine, save

from canonlm.data import index
from canonlm.data.shards import Dataset
from canonlm.data.text import TextStream
from canonlm.data.verify import Opened, Verifier
from canonlm.train import loop, verification
from canonlm.train.config import RunConfig, resolve

SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "time": 256, "batch": 8}
QUICK = {"layers": 1, "hidden": 32, "heads": 2, "time": 128, "batch": 4}
SHARD = 2**24  # bytes; the verifier pauses between two
FILES = 16  # different ones: 256 MB
NAMES = 20_000  # shards, which are links to these files
STEPS_A_TURN = 4
WARM_UP = 4  # turns
VOCAB = 8192
TARGET = 0.99


def corpus(folder: Path) -> Dataset:
    """Random tokens. A shard is a link to one of FILES files."""
    folder.mkdir()
    count, generator, shards, sums = SHARD // 2, np.random.default_rng(0), [], []
    for number in range(NAMES):
        name, original = f"train-{number:05}.ds", f"train-{number % FILES:05}.ds"
        if number < FILES:
            generator.integers(0, VOCAB, count, np.uint16).tofile(folder / name)
            np.array([count], "<u8").tofile(folder / f"{name}.index")
            sums.append([index.file_sha256(folder / file) for file in (name, f"{name}.index")])
        else:
            os.link(folder / original, folder / name)
            os.link(folder / f"{original}.index", folder / f"{name}.index")
        shards.append(index.Shard(name, count, 1, count, *sums[number % FILES]))
    tokenizer, splits = {"name": "tokenizer.json", "sha256": "0" * 64}, {"train": tuple(shards), "valid": ()}
    index.write(folder, index.Index(VOCAB, "uint16", tokenizer, None, None, splits, (), 0, {}))
    return Dataset(folder)


class Watched(Verifier):
    """Works on all shards of the corpus while `may_work` is set, and counts its CPU time."""

    def __init__(self) -> None:
        super().__init__()
        self.may_work, self.processor_s = threading.Event(), 0.0
        Watched.last = self

    last: "Watched"

    def begin(self, dataset: Dataset) -> None:
        for shard in dataset.index.splits["train"]:
            super().add(Opened(dataset.folder, shard))

    def add(self, opened: Opened) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        self.may_work.set()
        super().close()

    def _verify(self, opened: Opened) -> bool:
        self.may_work.wait()
        start = time.thread_time()
        try:
            return super()._verify(opened)
        finally:
            self.processor_s += time.thread_time() - start


def configured(folder: Path, shape: dict[str, int], steps: int, threads: int) -> RunConfig:
    sizes = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    settings = {
        "arch": "llama+canon",
        "text": {"sources": {"tokens": {"path": str(folder)}}},
        "model": {field: shape[size] for size, field in sizes.items()},
        "data": {"seq_len": shape["time"]},
        "train": {
            "steps": steps,
            "batch_size": shape["batch"],
            "num_threads": threads,
            "log_every": STEPS_A_TURN,
            "eval_every": steps,
            "eval_size": 1,
            "checkpoint_every": steps,
            "optim": {"lr": 1e-3, "warmup_steps": 10},
        },
    }
    return resolve(settings)


def training(dataset: Dataset, shape: dict[str, int], turns: int, threads: int) -> dict[str, Any]:
    verification.Verifier = Watched  # type: ignore[misc]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    work: list[tuple[int, float]] = []  # bytes and processor seconds of the verifier's turns
    since = [0.0, 0, 0.0]

    def turn(row: dict[str, Any]) -> None:
        if row["kind"] != "train":
            return
        now, verifier, number = time.perf_counter(), Watched.last, row["step"] // STEPS_A_TURN
        worked = verifier.may_work.is_set()
        if number > WARM_UP:
            seconds[worked].append(now - since[0])
            if worked:
                work.append((verifier.verified_bytes - int(since[1]), verifier.processor_s - since[2]))
        if number == 1:
            verifier.begin(dataset)
        (verifier.may_work.clear if worked else verifier.may_work.set)()
        time.sleep(0.05)  # lets the verifier finish its current shard
        since[:] = time.perf_counter(), verifier.verified_bytes, verifier.processor_s

    with tempfile.TemporaryDirectory() as folder:
        steps = STEPS_A_TURN * (2 * turns + WARM_UP)
        loop.train(configured(dataset.folder, shape, steps, threads), Path(folder), turn)
    verifier = Watched.last
    assert verifier.error is None
    assert verifier.pending, "the verifier ran out of work: increase NAMES"
    tokens = STEPS_A_TURN * shape["batch"] * shape["time"]
    ratios = [without / verified for without, verified in zip(seconds[False], seconds[True], strict=False)]
    size, processor_s = (sum(numbers) for numbers in zip(*work, strict=True))
    verified_s = sum(seconds[True])
    return {
        "threads": threads,
        "tokens_per_s": {
            "without": round(tokens / statistics.median(seconds[False])),
            "verifying": round(tokens / statistics.median(seconds[True])),
        },
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        "megabytes_per_s": round(size / verified_s / 1e6),
        "core": round(processor_s / verified_s, 3),
        "load": load(),
    }


def hashing(dataset: Dataset, passes: int) -> dict[str, Any]:
    speeds, cores = [], []
    for _ in range(passes):
        verifier = Watched()
        verifier.may_work.set()
        start = time.perf_counter()
        for shard in dataset.index.splits["train"][:FILES]:
            Verifier.add(verifier, Opened(dataset.folder, shard))
        while not Verifier.wait(verifier, 60):
            pass
        took = time.perf_counter() - start
        speeds.append(verifier.verified_bytes / took / 1e6)
        cores.append(verifier.processor_s / took)
        verifier.close()
    return {"megabytes_per_s": round(statistics.median(speeds)), "core": round(statistics.median(cores), 3)}


def vocabulary(dataset: Dataset, rounds: int) -> dict[str, Any]:
    stream, rows, seconds = TextStream({"a": (dataset, "train", 1.0)}, 0, 4096, False), 64, []
    batch = np.random.default_rng(0).integers(0, VOCAB, (rows, 4097), np.uint32)
    looks = []
    for number in range(rounds):
        start = time.perf_counter()
        stream.rows(number * rows, rows)
        seconds.append(time.perf_counter() - start)
        batch[0, 0] = number % VOCAB  # in the cache, as after reading
        start = time.perf_counter()
        batch.max()
        looks.append(time.perf_counter() - start)
    batch_s, look_s = statistics.median(seconds), statistics.median(looks)
    return {
        "batch_us": round(batch_s * 1e6, 1),
        "look_us": round(look_s * 1e6, 1),
        "share_of_reading": round(look_s / batch_s, 4),
        "ns_per_token": round(look_s / rows / 4096 * 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that it works")
    parser.add_argument("--threads", default="1,2", help="numbers of torch threads, a run for each")
    parser.add_argument("--turns", type=int, default=40, help="turns of each kind")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--folder", type=Path, help="where to write the tokens; default: the system's temporary folder")
    options = parser.parse_args()
    shape, turns = (QUICK, 4) if options.quick else (SHAPE, options.turns)
    result: dict[str, Any] = {"machine": machine(), "shape": shape, "steps_a_turn": STEPS_A_TURN, "training": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        dataset = corpus(Path(folder) / "corpus")
        result["hashing"] = hashing(dataset, 3 if options.quick else 10)
        print(f"hashing alone: {result['hashing']}", flush=True)
        torch.set_num_threads(1)
        result["vocabulary"] = vocabulary(dataset, 20 if options.quick else 500)
        print(f"vocabulary: {result['vocabulary']}", flush=True)
        for threads in map(int, options.threads.split(",")):
            row = training(dataset, shape, turns, threads)
            result["training"].append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "ratios"}), flush=True)
            print(
                f"  ratio {row['ratio']:.4f} (target {TARGET}), of {row['ratios'][0]} to {row['ratios'][-1]}",
                flush=True,
            )
            save(result, options.json)


if __name__ == "__main__":
    main()
