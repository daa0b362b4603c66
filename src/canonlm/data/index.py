"""What a folder of prepared text holds: `index.json`, written last, so that a folder that has one is whole.

    {
     "format": "canonlm tokens", "version": 1,
     "vocab_size": 258, "dtype": "uint16",              # of the tokens, little-endian
     "tokenizer": {"name": "tokenizer.json", "sha256": "…"},
     "bos_id": 256, "eos_id": 257,                      # what starts and ends every document; null: nothing does
     "splits": {"train": [{"name": "train-00000.ds", "tokens": 1200, "documents": 3, "bytes": 5000, "sha256": "…",
                           "ends_sha256": "…"}, …], "valid": […]},
     "inputs": [{"name": "a.jsonl", "bytes": 5100}, …], "bad_lines": 0, "command": {…}
    }

A shard is two files. `NAME` is its tokens and nothing else; `NAME.index` holds a little-endian uint64 per document: the
number of tokens of the shard up to and including that document (so the last one is `tokens`). `bytes` counts the text
in UTF-8. Shards stand in the order of the documents, and none is empty; a split that got no document has none.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canonlm.files import write_json

NAME = "index.json"
FORMAT = "canonlm tokens"
VERSION = 1


@dataclass(frozen=True)
class Shard:
    """`tokens` tokens of `documents` documents, `bytes` bytes as text."""

    name: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    ends_sha256: str

    @property
    def ends(self) -> str:
        """The file of document ends."""
        return f"{self.name}.index"


@dataclass(frozen=True)
class Index:
    """`dtype` is "uint16" or "uint32"; `splits` has "train" and "valid", either may be empty."""

    vocab_size: int
    dtype: str
    tokenizer: dict[str, str]
    bos_id: int | None
    eos_id: int | None
    splits: dict[str, tuple[Shard, ...]]
    inputs: tuple[dict[str, Any], ...]
    bad_lines: int
    command: dict[str, Any]


def write(folder: Path, index: Index) -> None:
    write_json(folder / NAME, {"format": FORMAT, "version": VERSION, **asdict(index)})


def read(folder: Path) -> Index:
    """ValueError: the folder is none, is not finished, or is of another version."""
    try:
        found = json.loads((folder / NAME).read_text("utf-8"))
        if (found.pop("format"), found.pop("version")) != (FORMAT, VERSION):
            raise ValueError
        splits = {split: tuple(Shard(**shard) for shard in shards) for split, shards in found.pop("splits").items()}
        return Index(splits=splits, inputs=tuple(found.pop("inputs")), **found)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder}: expected a folder that `canonlm data prepare` finished; no {NAME} there") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise ValueError(f"{folder / NAME}: expected what `canonlm data prepare` writes, version {VERSION}") from None


def check(folder: Path) -> Index:
    """Read every file again. ValueError names the first whose sha256 is not that of the index."""
    index = read(folder)
    files = {index.tokenizer["name"]: index.tokenizer["sha256"]}
    for shards in index.splits.values():
        for shard in shards:
            files |= {shard.name: shard.sha256, shard.ends: shard.ends_sha256}
    for name, sha256 in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing")
        if file_sha256(folder / name) != sha256:
            raise ValueError(f"{folder / name}: damaged: its sha256 is not the one in {NAME}")
    return index


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
