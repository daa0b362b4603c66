"""Does a tiny model learn to find a birth year in a text? Llama with and without Canon layers, on the same texts.

    python benchmarks/multihop.py [--out runs/multihop]     about 40 minutes on two cores; can be interrupted

The steps are those of a user: texts by `canonlm data multihop`, a tokenizer of 4096 byte pairs (trained here), shards
by `canonlm data prepare`, two runs of `canonlm train debug` that differ in `arch` only (one core each), `canonlm eval`.
Writes benchmarks/results/multihop-cpu.json; docs/multihop.md shows its numbers.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from canonlm.core.files import write_json
from canonlm.suites.multihop import MultiHop, MultiHopSettings

RESULTS = Path(__file__).parent / "results" / "multihop-cpu.json"
ARCHS = ("llama", "llama+canon")
PEOPLE, TEXTS, QUESTIONS = 3, 100_000, 1000
VOCAB_SIZE = 4096  # so that every name, year and word is one token
TRAINING = {
    "model.num_hidden_layers": 2,
    "model.hidden_size": 128,
    "model.num_attention_heads": 2,
    "model.fields.tie_word_embeddings": "true",  # so that copying is the same for all names
    "data.seq_len": 128,
    "data.isolate_documents": "true",
    "train.steps": 4000,
    "train.batch_size": 32,
    "train.num_threads": 1,
    "train.eval_every": 250,
    "train.eval_size": 32,
    "train.checkpoint_every": 500,
    "train.optim.lr": "3e-3",
    "train.optim.schedule": "constant",
    "train.optim.warmup_steps": 80,
}


def canonlm(*words: object) -> None:
    command = [sys.executable, "-m", "canonlm", *map(str, words)]
    print(f"$ canonlm {shlex.join(command[3:])}", flush=True)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def train_tokenizer(texts: Path, out: Path) -> None:
    """Train byte pairs on a tenth of the texts. A text is encoded as if after a space, so that its first name has the
    same tokens as in the question."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    with texts.open(encoding="utf-8") as lines:
        read = [json.loads(line)["text"] for line in islice(lines, TEXTS // 10)]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(read, trainer)
    tokenizer.save(str(out))


def prepare(out: Path) -> None:
    texts, tokenizer = out / "texts.jsonl", out / "tokenizer.json"
    if not texts.exists():
        canonlm("data", "multihop", texts, f"people={PEOPLE}", "--n", TEXTS)
    if not tokenizer.exists():
        train_tokenizer(texts, tokenizer)
    # Questions are asked without a BOS, so there is none in training.
    options = ["--tokenizer", tokenizer, "--no-bos", "--validation", 0.01, "--workers", 1]
    canonlm("data", "prepare", out / "text", "--input", texts, *options)


def measure(out: Path, arch: str) -> dict[str, Any]:
    run, results = out / arch, out / arch / "evals"
    source = f"text={{sources: {{hops: {{path: {out / 'text'}}}}}}}"
    overrides = [f"{key}={value}" for key, value in TRAINING.items()]
    canonlm("train", "debug", f"arch={arch}", source, *overrides, "--out", run)
    settings = [f"people={PEOPLE}", f"n={QUESTIONS}"]
    canonlm("eval", run, "--suite", "multihop", *settings, "--out", results)
    [entry] = json.loads((results / "results.json").read_text("utf-8"))["results"]
    [file] = (results / "answers").glob("*.jsonl")
    answers = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "arch": arch,
        "train_s": round(max(row["elapsed_s"] for row in rows if row["kind"] == "train")),
        "held_out_loss": {row["step"]: round(row["loss"], 4) for row in rows if row["kind"] == "eval"},
        "says_a_year_of_the_text": share_stated(answers),
        "scores": [score for score in entry["scores"] if score["measure"] == "exact"],
    }


def share_stated(answers: list[dict[str, Any]]) -> float:
    """The share of answers, right or wrong, that are one of the years in the text."""
    questions = MultiHop(MultiHopSettings(people=PEOPLE, n=QUESTIONS), lambda text: 0)
    stated = [f"born in {row['output'].strip()[:4]}." in questions[row["index"]].prompt for row in answers]
    return sum(stated) / len(stated)


def machine() -> dict[str, Any]:
    with open("/proc/cpuinfo") as lines:
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": processor,
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/multihop"), help="folder of texts, shards and runs")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    prepare(out)
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(partial(measure, out), ARCHS))
    result = {
        "setting": {
            "k": 1,
            "people": PEOPLE,
            "background": 0,
            "texts": TEXTS,
            "vocab_size": VOCAB_SIZE,
            "questions": QUESTIONS,
            **TRAINING,
        },
        "chance": 1 / PEOPLE,
        "runs": runs,
        "machine": machine(),
    }
    write_json(RESULTS, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
