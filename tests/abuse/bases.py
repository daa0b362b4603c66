"""The folders to damage: one small folder of each kind that may be untrusted, made once by our commands."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import yaml

from canonlm.cli import main

BASES: dict[str, Callable[[Path], None]] = {}

TRAIN = {
    "steps": 6, "batch_size": 2, "num_threads": 1, "log_every": 1, "eval_every": 3, "eval_size": 2,
    "checkpoint_every": 2, "optim": {"lr": 3e-3, "warmup_steps": 2},
}  # fmt: skip
RUN = {
    "arch": "llama+canon",
    "task": {"name": "copying", "N": 8, "min_items": 2},
    "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
    "data": {"seq_len": 18, "loss_on": "answer", "workers": 0},
    "train": TRAIN,
}
ONE_STEP = """\
arch: llama
task: {name: copying, N: 8, min_items: 2}
model: {num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 2}
data: {seq_len: 18, loss_on: answer}
train: {steps: 1, batch_size: 2, eval_every: 1, eval_size: 2, checkpoint_every: 1, optim: {lr: 0.01}, num_threads: 1}
"""
"""The text of a recipe."""

PLAY = (
    "play copying train.steps=4 train.batch_size=2 train.eval_every=2 train.eval_size=4 train.checkpoint_every=2 "
    "model.num_hidden_layers=1 model.hidden_size=16 model.num_attention_heads=2 --seeds 1 --lr 1e-3 --jobs 1 --out play"
)


def base(make: Callable[[Path], None]) -> Callable[[Path], None]:
    BASES[make.__name__] = make
    return make


def canonlm(*args: object) -> None:
    if code := main([str(arg) for arg in args]):
        raise RuntimeError(f"canonlm {args}: exit code {code}")


def write(path: Path, run: dict) -> None:
    path.write_text(yaml.safe_dump(run, sort_keys=False))


def text(path: Path, count: int = 40) -> None:
    lines = [{"text": f"The cat number {number} sat on {number % 7} mats.", "id": number} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@base
def recipe(folder: Path) -> None:
    write(folder / "run.yaml", RUN)


@base
def finished(folder: Path) -> None:
    """A run on a task, with the results of `canonlm eval` and `canonlm probe`."""
    write(folder / "run.yaml", RUN)
    canonlm("train", "run.yaml", "--out", "run")
    canonlm("eval", "run", "--suite", "playground")


@base
def stopped(folder: Path) -> None:
    """The same run before its last checkpoint."""
    write(folder / "run.yaml", RUN)
    canonlm("train", "run.yaml", "--out", "run")
    (folder / "run" / "result.json").unlink()
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000006")


@base
def grammar(folder: Path) -> None:
    changes = {"task": {"name": "lano", "grammar": "small"}, "data": {"seq_len": 128, "loss_on": "all", "workers": 0}}
    write(folder / "run.yaml", {**RUN, **changes})
    canonlm("train", "run.yaml", "--out", "run")


@base
def prepared(folder: Path) -> None:
    text(folder / "a.jsonl")
    canonlm("data", "prepare", "data", "--input", "a.jsonl", "--tokenizer", "bytes", "--validation", "0.2",
            "--workers", "1")  # fmt: skip


@base
def half_done(folder: Path) -> None:
    """Prepared text whose index is not written yet."""
    from canonlm.data import prepare

    text(folder / "a.jsonl")
    with patch.object(prepare, "finish", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        prepare.prepare(Path("data"), ["a.jsonl"], tokenizer="bytes", validation=0.2, workers=1)


@base
def text_run(folder: Path) -> None:
    prepared(folder)
    changes = {"task": None, "text": {"sources": {"web": {"path": "data"}}}, "data": {"seq_len": 16, "workers": 0}}
    write(folder / "run.yaml", {**RUN, **changes})
    canonlm("train", "run.yaml", "--out", "run")


@base
def exported(folder: Path) -> None:
    """A folder of `save_pretrained` with a tokenizer, and nothing of the run."""
    text_run(folder)
    canonlm("export", "run", "model")
    for name in ("run", "data"):
        shutil.rmtree(folder / name)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "id": 1}) + "\n" for p in ("Cats", "A mat")))
    (folder / "text.txt").write_text("Nothing happened in the morning. It rained later. " * 5)
    fact = {"input": "John went to the hallway. Mary moved to the bathroom.", "question": "Where is John?"}
    (folder / "qa1.jsonl").write_text(json.dumps({**fact, "target": "hallway"}) + "\n")


@base
def play(folder: Path) -> None:
    canonlm(*PLAY.split())
    (folder / "play" / "report.html").unlink()


@base
def queue(folder: Path) -> None:
    """A queue of one finished run and one that has failed twice, with a lease for each."""
    write(folder / "run.yaml", RUN)
    canonlm("train", "run.yaml", "--out", "queue/runs/a")
    (folder / "queue" / "runs" / "b").mkdir()
    write(folder / "queue" / "runs" / "b" / "config.yaml", RUN)
    (folder / "queue" / "leases").mkdir()
    for name in "ab":
        owner = {"id": name, "host": "there", "pid": 7, "start": 1.5, "interval": 20.0}
        (folder / "queue" / "leases" / f"{name}.1.json").write_text(json.dumps(owner))
    failures = [{"host": "there", "message": "no memory"}] * 2
    (folder / "queue" / "leases" / "b.failures.json").write_text(json.dumps(failures))


@base
def finished_queue(folder: Path) -> None:
    queue(folder)
    shutil.rmtree(folder / "queue" / "runs" / "b")


@base
def kept_rows(folder: Path) -> None:
    """Rows of finished runs, as `canonlm replicate --export` writes them."""
    from canonlm.experiments.ledger import OWN_RESULTS

    (folder / "kept").mkdir()
    shutil.copy(OWN_RESULTS / "copying-micro.csv", folder / "kept")


@base
def experiment(folder: Path) -> None:
    canonlm("new", "experiment", "mine.yaml")


def _published(folder: Path, to: str) -> None:
    import torch

    from canonlm import CanonLMConfig, CanonLMForCausalLM
    from canonlm.models.published import save_published

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CanonLMForCausalLM(CanonLMConfig(**sizes, mixers=["attention"], canon_set="ABCD"))
    (folder / "model").mkdir()
    save_published(model, folder / "model", to)


@base
def published_hf(folder: Path) -> None:
    _published(folder, "hf")


@base
def published_lingua(folder: Path) -> None:
    _published(folder, "lingua")


@base
def answers(folder: Path) -> None:
    """Correct answers to samples of every task, in the format in which an untrusted model gives them to a grader."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from canonlm import tasks
    from canonlm.launch.recipes import load_preset
    from canonlm.tasks.rows import spans

    for name in tasks.names():
        task = tasks.get(**load_preset(name, "tiny").run["task"])
        rows = []
        for index in range(4):
            sample = task.sample("train", 0, index)
            result = [sample.tokens[start:stop].tolist() for start, stop in spans(sample)]
            rows.append({"index": index, "answers": result})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


@base
def inputs(folder: Path) -> None:
    """Text in every format that `canonlm data prepare` reads, and a tokenizer."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    from canonlm.data.tokenizers import bytes_tokenizer

    text(folder / "a.jsonl")
    content = (folder / "a.jsonl").read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(content))
    (folder / "c.txt").write_text("A document.\nOf two lines.\n")
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in content.splitlines()]), folder / "d.parquet")
    bytes_tokenizer().save(str(folder / "tokenizer.json"))


def describe(folder: Path) -> list[str]:
    """The names of the files in a base, to choose which one to damage."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
