"""The overhead of `canonlm data prepare` over its tokenizer: beside `encode_batch` on the same documents.

    python benchmarks/prepare.py [--megabytes 100] [--out benchmarks/results/prepare-cpu.json]

The documents are generated prose (words made of random letters, by Zipf's law) and the source of Python's standard
library, as JSON lines; the tokenizer is a byte-level BPE of 8192 tokens, trained here on a part of both. `encode_batch`
gets texts that are already in memory, about a megabyte at a time, and its result is discarded; `prepare` starts from
the files and ends with shards and their checksums on disk. With one thread both take turns, a tenth of the documents
each, so that other work on the machine affects both. CPU seconds count all processes.
"""

import argparse
import json
import os
import platform
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import canonlm
from canonlm.data.prepare import LEFT_OUT, prepare
from canonlm.data.reading import find

VOCAB_SIZE = 8192
PARTS = 10
BATCH = 2**20  # characters per encode_batch


def prose(rng: random.Random, size: int) -> Iterator[str]:
    """Documents of some 3000 characters, `size` in all."""
    words = ["".join(rng.choices("etaoinshrdlucmwfgypbvk", k=rng.randint(2, 9))) for _ in range(30_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    while size > 0:
        text = " ".join(rng.choices(words, weights, k=rng.randint(100, 1000))).capitalize() + ".\n"
        size -= len(text)
        yield text


def documents(megabytes: int) -> list[str]:
    import sysconfig

    files = find([sysconfig.get_path("stdlib")], "*.py", LEFT_OUT)
    sources = [Path(file.path).read_text("utf-8") for file in files]
    rng = random.Random(0)
    texts = sources + list(prose(rng, megabytes * 10**6 - sum(map(len, sources))))
    rng.shuffle(texts)
    return texts


def train(texts: list[str], path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def encode(tokenizer: Tokenizer, texts: list[str]) -> int:
    """The number of tokens."""
    tokens, batch, length = 0, [], 0
    for text in [*texts, None]:
        if text is not None:
            batch.append(text)
            length += len(text)
        if length >= BATCH or text is None:
            tokens += sum(len(encoding) for encoding in tokenizer.encode_batch(batch, add_special_tokens=False))
            batch, length = [], 0
    return tokens


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, seconds, CPU seconds of this process and its children)."""
    wall, cpu = time.perf_counter(), _cpu()
    result = work()
    return result, time.perf_counter() - wall, _cpu() - cpu


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def compare(folder: Path, texts: list[str], parts: int, threads: int) -> dict[str, float]:
    """Seconds of both on all texts, in turn for each part."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    encode(tokenizer, texts[:300])  # warm up
    sums = dict.fromkeys(["encode_batch_s", "encode_batch_cpu_s", "prepare_s", "prepare_cpu_s"], 0.0)
    for part in range(parts):
        own = texts[part::parts]
        path, out = folder / f"{threads}-{part}.jsonl", folder / f"{threads}-{part}"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in own), encoding="utf-8")
        tokens, seconds, cpu = timed(lambda own=own: encode(tokenizer, own))
        sums["encode_batch_s"] += seconds
        sums["encode_batch_cpu_s"] += cpu
        options = {"tokenizer": folder / "tokenizer.json", "workers": threads}
        index, seconds, cpu = timed(lambda path=path, out=out, options=options: prepare(out, [str(path)], **options))
        sums["prepare_s"] += seconds
        sums["prepare_cpu_s"] += cpu
        assert sum(shard.tokens - 2 * shard.documents for shard in index.splits["train"]) == tokens
    sums["ratio"] = sums["prepare_s"] / sums["encode_batch_s"]
    sums["cpu_ratio"] = sums["prepare_cpu_s"] / sums["encode_batch_cpu_s"]
    return {name: round(value, 3) for name, value in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    texts = documents(options.megabytes)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(texts[: len(texts) // 20], folder / "tokenizer.json")
        result = {
            "one thread": compare(folder, texts, PARTS, 1),
            f"{cores} threads, {cores} processes": compare(folder, texts, 1, cores),
            "bytes": sum(len(text.encode("utf-8")) for text in texts),
            "documents": len(texts),
            "load_at_end": round(os.getloadavg()[0], 1),
            "machine": _machine(),
            "versions": {
                "canonlm": canonlm.__version__,
                "tokenizers": tokenizers.__version__,
                "python": platform.python_version(),
            },
        }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _machine() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or platform.processor()}, {platform.system()} {platform.machine()}"


if __name__ == "__main__":
    main()
