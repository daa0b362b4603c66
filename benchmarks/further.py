"""Do Canon layers help a trained model that is trained further? Perplexity on held-out text, paired by document.

    python benchmarks/further.py [--out runs/further]     20 minutes on one idle core; can be run again

The text is the docstrings of Python's standard library, a document per module, byte by byte; every fifth module is held
out. A Qwen3 with random weights is trained on it, and then further, with Canon layers that start as the identity and
without: the same steps, rate and data order for each seed; once more, Canon layers have ten times the rate. Every step
is a command of canonlm. Writes benchmarks/results/further.csv; docs/experiments/canon.md shows it.
"""

import argparse
import ast
import csv
import json
import sys
import sysconfig
from pathlib import Path

import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from canonlm.cli import main
from canonlm.runs.answers import read_answers
from canonlm.runs.documents import Difference, differences

RESULTS = Path(__file__).parent / "results" / "further.csv"
NO_DOCS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
HOST_STEPS, STEPS, SEEDS, CONTEXT = 600, 300, 3, 256
LETTERS = 4_000  # of a held-out document
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}  # fmt: skip
RECIPE = {
    "arch": "hf:qwen3",
    "model": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4},
    "data": {"seq_len": CONTEXT},
    "train": {"steps": STEPS, "batch_size": 8, "eval_every": 100, "eval_size": 32, "checkpoint_every": STEPS,
              "optim": {"lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 30}},
}  # fmt: skip


def run(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    texts = docstrings()
    for name, chosen in (("train", [t for i, t in enumerate(texts) if i % 5]), ("held-out", texts[::5])):
        lines = [json.dumps({"text": text if name == "train" else text[:LETTERS]}) for text in chosen]
        (out / f"{name}.jsonl").write_text("\n".join(lines))
    recipe = RECIPE | {"text": {"sources": {"docs": {"path": str((out / "corpus").absolute())}}}}
    (out / "further.yaml").write_text(yaml.safe_dump(recipe))
    if not (out / "corpus").exists():
        canonlm(
            "data prepare",
            out / "corpus",
            "--input",
            out / "train.jsonl",
            "--tokenizer bytes --workers 1 --validation 0.02",
        )
    if not (out / "random").exists():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(vocab_size=258, **SIZES)).save_pretrained(out / "random")

    train(out, "random", "trained", f"train.steps={HOST_STEPS}")
    if not (out / "host").exists():
        canonlm("export", out / "trained", out / "host")
        canonlm("canonize", out / "host", out / "canonized", "--sites ABCD")
    rows = compare(out, "start", "host", "canonized")
    for seed in range(1, SEEDS + 1):
        settings = f"train.seed={seed}", f"data.seed={seed}"
        train(out, "host", f"host-{seed}", *settings)
        train(out, "canonized", f"canonized-{seed}", *settings)
        rows += compare(out, f"seed {seed}", f"host-{seed}", f"canonized-{seed}")
        train(out, "canonized", f"faster-{seed}", *settings, 'train.optim.lr_scale={"*canon*":10}')
        rows += compare(out, f"seed {seed}, Canon at ten times the rate", f"host-{seed}", f"faster-{seed}")
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"numbers: {RESULTS}")
    return 0


def docstrings() -> list[str]:
    """The docstrings of each module of the standard library that has more than 500 letters of them, in order."""
    root, texts = Path(sysconfig.get_path("stdlib")), []
    for file in sorted(root.rglob("*.py")):
        if not NO_DOCS & set(file.relative_to(root).parts):
            nodes = ast.walk(ast.parse(file.read_bytes()))
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            text = "\n\n".join(filter(None, (ast.get_docstring(n) for n in nodes if isinstance(n, documented))))
            texts += [text] if len(text) > 500 else []
    return texts


def train(out: Path, start: str, name: str, *settings: str) -> None:
    canonlm("train", out / "further.yaml", f"model.weights={out / start}", *settings, "--out", out / name)


def compare(out: Path, name: str, base: str, canon: str) -> list[dict[str, object]]:
    """Rows of the paired differences on the held-out documents: canon minus base, and both models' own numbers."""
    canonlm(
        "eval",
        out / base,
        out / canon,
        "--suite text",
        out / "held-out.jsonl",
        f"context={CONTEXT}",
        "--out",
        out / "evals" / name,
    )
    folders = sorted((out / "evals" / name).iterdir())
    entries = [json.loads((folder / "results.json").read_text())["results"][0] for folder in folders]
    answers = [read_answers(folder, entry) for folder, entry in zip(folders, entries, strict=True)]
    bits, *_ = differences(*answers, same_tokens=False)
    return [{"models": name, **numbers_of(entries), **of_difference(bits)}]


def numbers_of(entries: list[dict]) -> dict[str, float]:
    values = [{s["measure"]: s["value"] for s in entry["scores"] if not s["slice"]} for entry in entries]
    return {
        f"{measure} {who}": round(each[measure], 5)
        for measure in ("perplexity", "bits_per_byte")
        for who, each in zip(("without", "with"), values, strict=True)
    }


def of_difference(bits: Difference) -> dict[str, object]:
    assert bits.interval is not None
    ends = {"difference": bits.mean, "low": bits.interval.low, "high": bits.interval.high}
    return {key: round(value, 5) for key, value in ends.items()} | {"documents": bits.documents}


def canonlm(command: str, *words: object) -> None:
    """Run a command; SystemExit with its code if it fails."""
    arguments = [
        part for word in (command, *words) for part in (str(word).split() if isinstance(word, str) else [str(word)])
    ]
    if code := main(arguments):
        sys.exit(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/further"), help="folder of texts, models and runs")
    sys.exit(run(parser.parse_args().out))
