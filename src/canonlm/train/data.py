"""The training and evaluation data of a run: windows of a task, or of prepared text."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from canonlm.core.distributed import World
from canonlm.core.errors import InvalidSetting, expected
from canonlm.core.untrusted import read_object
from canonlm.core.user_folders import expanded
from canonlm.data.index import Shard
from canonlm.data.shards import Dataset, OnOpen
from canonlm.data.text import TextStream
from canonlm.data.windows import Stream, WindowStream
from canonlm.runs.folder import has_trained
from canonlm.train import evals
from canonlm.train.config import RunConfig, Text
from canonlm.train.evals.text import TextEval
from canonlm.train.verification import Verification

STDLIB = "python-stdlib"
"""Text that every machine has: the source of its own Python standard library, prepared when it is first used."""

_datasets: ContextVar[dict[Path, Dataset] | None] = ContextVar("datasets", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """Within this context, the index of a folder is read, and the sizes of its files are checked, when the folder is
    first used, and not again: with many shards and processes, a file system would get millions of requests."""
    if _datasets.get() is not None:
        yield
        return
    token = _datasets.set({})
    try:
        yield
    finally:
        _datasets.reset(token)


def _ignore_opened(folder: Path, shard: Shard) -> None:
    """The default of `on_open`."""


@read_once()
def complete(run: RunConfig) -> RunConfig:
    """The run with settings that come from its text: the size of the vocabulary, the ids of its special tokens.

    InvalidSetting for folders that are not prepared text, or do not fit each other or `model.vocab_size`.
    """
    if run.text is None:
        return run
    datasets = {key: _open(key, path) for key, path in run.text.folders.items()}
    first_key, first = next(iter(datasets.items()))
    for key, dataset in datasets.items():
        if dataset.index.tokenizer["sha256"] != first.index.tokenizer["sha256"]:
            raise expected(key, f"text made by the same tokenizer as {first_key}", str(dataset.folder))
        if dataset.vocab_size != first.vocab_size:
            what = f"text with a vocabulary of {first.vocab_size} tokens, as in {first_key}"
            raise expected(key, what, f"{dataset.folder}, with {dataset.vocab_size}")
    for dataset, split in [*((datasets[f"text.sources.{name}.path"], "train") for name in run.text.sources),
                           *validation(run.text).values()]:  # fmt: skip
        if (tokens := dataset.num_tokens(split)) <= run.data.seq_len:
            what = f"less than the {tokens:,} tokens that {dataset.folder} has in its split {split}"
            raise expected("data.seq_len", what, run.data.seq_len)
    vocab_size = first.vocab_size
    if run.model.weights is not None:  # a saved model may have more tokens, and is given those that it lacks
        vocab_size = max(vocab_size, run.model.vocab_size or 0)
    elif run.model.vocab_size not in (None, first.vocab_size):
        what = f"{first.vocab_size}, the vocabulary size of {first.folder}"
        raise expected("model.vocab_size", what, run.model.vocab_size)
    ids = {"bos_token_id": first.bos_token_id, "eos_token_id": first.eos_token_id}
    model = run.model.model_copy(update={"vocab_size": vocab_size, "fields": {**ids, **run.model.fields}})
    return run.model_copy(update={"model": model})


def verification(run: RunConfig, folder: Path, world: World) -> Verification:
    """The verification of the shards that the run in `folder` reads; its `opened` must be called with each. All
    processes call this.

    ValueError, in every process: the list of unverified shards in `folder` is damaged.
    """
    texts = run.text.folders if run.text is not None and run.data.verify else {}
    with world.all_or_none():
        datasets = {key: _open(key, path) for key, path in texts.items()}
    return Verification(datasets, folder, world, once=run.data.verify == "once")


def stream(run: RunConfig, on_open: OnOpen = _ignore_opened) -> Stream:
    """The training windows. `on_open(folder, shard)` is called with every shard of text that is read."""
    if run.text is None:
        return _task_windows(run, "train", run.data_seed)
    sources = {
        name: (_open(f"text.sources.{name}.path", source.path, on_open), "train", source.weight)
        for name, source in run.text.sources.items()
    }
    return TextStream(
        sources, seed=run.data_seed, seq_len=run.data.seq_len, isolate_documents=run.data.isolate_documents
    )


def evaluation(run: RunConfig, world: World, on_open: OnOpen = _ignore_opened) -> evals.Evaluation | None:
    """The evaluation of a run; None for text without a held-out part. `on_open`: as for `stream`."""
    size, batch_size = run.train.eval_size, run.train.batch_size
    if run.text is None:
        return evals.build(_task_windows(run, run.train.eval_split, run.eval_seed), size, batch_size)
    if not (sets := validation(run.text, on_open)):
        return None
    rows = run.parallel.micro_batch_size or batch_size // world.dp_size
    return TextEval(
        sets, size, rows, world, seq_len=run.data.seq_len, isolate_documents=run.data.isolate_documents,
        skip=size if run.train.eval_split == "validation" else 0, beyond=run.train.eval_beyond or 0,
    )  # fmt: skip


def folders(run: RunConfig) -> list[Path]:
    """The folders of the run's texts; all have the same tokenizer."""
    return [] if run.text is None else [_open(key, path).folder for key, path in run.text.folders.items()]


def trained_on(run: RunConfig) -> list[str]:
    """The validation texts of a run of which it evaluates windows that it also trains on."""
    if run.text is None:
        return []
    sources = {_open(f"text.sources.{name}.path", each.path).fingerprint for name, each in run.text.sources.items()}
    texts = validation(run.text)
    return [name for name, (text, split) in texts.items() if split == "train" and text.fingerprint in sources]


def check_unchanged(run: RunConfig, folder: Path) -> dict[str, Any]:
    """The text that the run reads, for `data.json`: by key, a folder and the sha256 of its index. {} for a task.

    InvalidSetting if the run in `folder` was trained on another text. The same text may have moved.
    """
    if run.text is None:
        return {}
    datasets = {key: _open(key, path) for key, path in run.text.folders.items()}
    current = {
        key: {"folder": str(text.folder.resolve()), "sha256": text.fingerprint} for key, text in datasets.items()
    }
    noted = folder / "data.json"
    previous = read_object(noted) if noted.exists() and has_trained(folder) else {}
    for key, text in current.items():
        if (began := previous.get(key)) is None:
            continue
        if not isinstance(began, dict) or not all(isinstance(began.get(name), str) for name in text):
            raise expected(f"{noted}: {key}", "a folder and its sha256", began)
        if began["sha256"] != text["sha256"]:
            what = f"the text that the run in {folder} began with, then in {began['folder'][:200]}"
            raise expected(key, what, f"{text['folder']} (its index.json has another sha256)")
    return current


def _task_windows(run: RunConfig, split: str, seed: int) -> WindowStream:
    assert run.built_task is not None
    data = run.data
    return WindowStream(run.built_task, split, seed, data.seq_len, data.loss_on, data.isolate_documents)


def validation(text: Text, on_open: OnOpen = _ignore_opened) -> dict[str, tuple[Dataset, str]]:
    """The texts that are evaluated, and their splits; {} if none has a held-out part."""
    paths = text.validation or {name: source.path for name, source in text.sources.items()}
    texts = {name: _open(f"text.validation.{name}", path, on_open) for name, path in paths.items()}
    held_out = {name for name, dataset in texts.items() if dataset.num_tokens("valid")}
    chosen = texts if text.validation else [name for name in texts if name in held_out]
    return {name: (texts[name], "valid" if name in held_out else "train") for name in chosen}


@cache
def _stdlib() -> Path:
    from canonlm.data.prepare import prepare_stdlib

    return prepare_stdlib()[0]


def _open(key: str, path: str, on_open: OnOpen = _ignore_opened) -> Dataset:
    datasets = _datasets.get()
    try:
        folder = _stdlib() if path == STDLIB else expanded(path)
        dataset = (datasets or {}).get(folder) or Dataset(folder)
    except ValueError as error:
        raise InvalidSetting(key, f"{key}: {error}") from None
    if datasets is not None:
        datasets[folder] = dataset
    dataset = copy.copy(dataset)
    dataset.on_open = on_open
    return dataset
