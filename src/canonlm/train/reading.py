"""What a run reads and what it is asked: windows of a task, or of prepared text."""

from functools import cache
from pathlib import Path
from typing import Any

from canonlm import evals
from canonlm.data.index import Shard
from canonlm.data.shards import Dataset, OnOpen
from canonlm.data.text import TextStream
from canonlm.data.windows import Stream, WindowStream
from canonlm.errors import InvalidSetting, expected
from canonlm.evals.text import TextEval
from canonlm.train.config import RunConfig, Text
from canonlm.train.verification import Verification
from canonlm.untrusted import read_object
from canonlm.world import World

STDLIB = "python-stdlib"
"""Text that every machine has: the source of its own Python standard library, prepared where it is asked for."""


def _nothing(folder: Path, shard: Shard) -> None:
    """Nobody wants to know which shards are opened."""


def complete(run: RunConfig) -> RunConfig:
    """The run with what only its text can tell: the size of the vocabulary, the ids of its special tokens.

    InvalidSetting for folders that are no prepared text, or that do not fit together or to `model.vocab_size`.
    """
    if run.text is None:
        return run
    found = {key: _open(key, path) for key, path in run.text.folders.items()}
    first_key, first = next(iter(found.items()))
    for key, dataset in found.items():
        if dataset.index.tokenizer["sha256"] != first.index.tokenizer["sha256"]:
            raise expected(key, f"text with the tokens of {first_key}: another tokenizer made it", str(dataset.folder))
        if dataset.vocab_size != first.vocab_size:
            what = f"text with a vocabulary of {first.vocab_size} tokens, as that of {first_key}"
            raise expected(key, what, f"{dataset.folder}, with {dataset.vocab_size}")
    for dataset, split in [*((found[f"text.sources.{name}.path"], "train") for name in run.text.sources),
                           *_validation(run.text).values()]:  # fmt: skip
        if (tokens := dataset.num_tokens(split)) <= run.data.seq_len:
            what = f"less than the {tokens:,} tokens that {dataset.folder} has in its split {split}"
            raise expected("data.seq_len", what, run.data.seq_len)
    if run.model.vocab_size not in (None, first.vocab_size):
        what = f"{first.vocab_size}, as the tokenizer of {first.folder} has"
        raise expected("model.vocab_size", what, run.model.vocab_size)
    ids = {"bos_token_id": first.bos_token_id, "eos_token_id": first.eos_token_id}
    model = run.model.model_copy(update={"vocab_size": first.vocab_size, "fields": {**ids, **run.model.fields}})
    return run.model_copy(update={"model": model})


def verification(run: RunConfig, folder: Path, world: World) -> Verification:
    """Of the shards that the run in `folder` reads: its `opened` is to be told of them. All processes call this.

    ValueError, in every process: the list of what is not verified yet, in `folder`, is damaged.
    """
    texts = run.text.folders if run.text is not None and run.data.verify else {}
    with world.all_or_none():
        found = {key: _open(key, path) for key, path in texts.items()}
    return Verification(found, folder, world)


def stream(run: RunConfig, on_open: OnOpen = _nothing) -> Stream:
    """The training windows. `on_open(folder, shard)` is told of every shard of text that is read."""
    if run.text is None:
        return _task_windows(run, "train")
    sources = {
        name: (_open(f"text.sources.{name}.path", source.path, on_open), "train", source.weight)
        for name, source in run.text.sources.items()
    }
    return TextStream(
        sources, seed=run.train.seed, seq_len=run.data.seq_len, isolate_documents=run.data.isolate_documents
    )


def evaluation(run: RunConfig, world: World, on_open: OnOpen = _nothing) -> evals.Evaluation | None:
    """What the model is asked every now and then; None for text of which nothing is held out. `on_open`: as for
    `stream`."""
    size, batch_size = run.train.eval_size, run.train.batch_size
    if run.text is None:
        return evals.build(_task_windows(run, "test"), size, batch_size)
    if not (sets := _validation(run.text, on_open)):
        return None
    rows = run.parallel.micro_batch_size or batch_size // world.dp_size
    return TextEval(sets, size, rows, world, seq_len=run.data.seq_len, isolate_documents=run.data.isolate_documents)


def check_unchanged(run: RunConfig, folder: Path) -> dict[str, Any]:
    """Which text the run reads, for `data.json`: a folder and the sha256 of its index by key. {} for a task.

    InvalidSetting when it is another text than the run in `folder` began with. The same one may have moved.
    """
    if run.text is None:
        return {}
    found = {key: _open(key, path) for key, path in run.text.folders.items()}
    here = {key: {"folder": str(text.folder.resolve()), "sha256": text.fingerprint} for key, text in found.items()}
    there = read_object(folder / "data.json") if (folder / "data.json").exists() else {}
    for key, text in here.items():
        if (noted := there.get(key)) is None:
            continue
        if not isinstance(noted, dict) or not all(isinstance(noted.get(name), str) for name in text):
            raise expected(f"{folder / 'data.json'}: {key}", "a folder and its sha256", noted)
        if noted["sha256"] != text["sha256"]:
            what = f"the text that the run in {folder} began with, once in {noted['folder'][:200]}"
            raise expected(key, what, f"{text['folder']} (its index.json has another sha256)")
    return here


def _task_windows(run: RunConfig, split: str) -> WindowStream:
    assert run.built_task is not None
    data = run.data
    return WindowStream(run.built_task, split, run.train.seed, data.seq_len, data.loss_on, data.isolate_documents)


def _validation(text: Text, on_open: OnOpen = _nothing) -> dict[str, tuple[Dataset, str]]:
    """Which split of which text is evaluated."""
    paths = text.validation or {name: source.path for name, source in text.sources.items()}
    texts = {name: _open(f"text.validation.{name}", path, on_open) for name, path in paths.items()}
    held_out = {name for name, found in texts.items() if found.num_tokens("valid")}
    chosen = texts if text.validation else [name for name in texts if name in held_out]
    return {name: (texts[name], "valid" if name in held_out else "train") for name in chosen}


@cache
def _stdlib() -> Path:
    from canonlm.data.prepare import prepare_stdlib

    return prepare_stdlib()[0]


def _open(key: str, path: str, on_open: OnOpen = _nothing) -> Dataset:
    try:
        return Dataset(_stdlib() if path == STDLIB else Path(path).expanduser(), on_open)
    except ValueError as error:
        raise InvalidSetting(key, f"{key}: {error}") from None
