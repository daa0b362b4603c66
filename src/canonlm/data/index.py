"""`index.json` of a folder of prepared text. It is written last, so a folder with an index is complete.

    {
     "format": "canonlm tokens", "version": 1,
     "vocab_size": 258, "dtype": "uint16",              # of the tokens, little-endian
     "tokenizer": {"name": "tokenizer.json", "sha256": "…"},
     "bos_id": 256, "eos_id": 257,                      # first and last token of every document; null: none
     "splits": {"train": [{"name": "train-00000.ds", "tokens": 1200, "documents": 3, "bytes": 5000, "sha256": "…",
                           "ends_sha256": "…"}, …], "valid": […]},
     "inputs": [{"name": "a.jsonl", "bytes": 5100}, …], "bad_lines": 0, "command": {…}
    }

A shard is two files. `NAME` is its tokens and nothing else; `NAME.index` holds a little-endian uint64 per document: the
number of tokens of the shard up to and including that document (so the last one is `tokens`). `bytes` counts the text
in UTF-8. Shards are in the order of the documents, and none is empty; a split without documents has no shards.

A folder may come from somebody else, so `read` checks the type and the bounds of every value.
"""

import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from canonlm.core.errors import expected
from canonlm.core.files import write_text
from canonlm.core.untrusted import open_regular, path_inside, read_object

NAME = "index.json"
FORMAT = "canonlm tokens"
VERSION = 1

MAX_INDEX = 2**27
"""Max bytes of an index.json: some 400,000 shards, or a million inputs."""

MAX_SHARD = 320
"""Max bytes of a shard in an index.json."""

MAX_VOCAB = 2**24
"""Max tokens of a vocabulary; the largest in use have some 2**18."""

Split = Literal["train", "valid"]
SPLITS: tuple[Split, ...] = ("train", "valid")

_Text = Annotated[str, Field(strict=True)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**48)]
_Size = Annotated[int, Field(strict=True, gt=0, lt=2**48)]
_Sha256 = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Shard:
    """`tokens` tokens of `documents` documents, `bytes` bytes as text."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: _Text
    tokens: _Size
    documents: _Size
    bytes: _Count
    sha256: _Sha256
    ends_sha256: _Sha256

    @property
    def ends(self) -> str:
        """The file of document ends."""
        return f"{self.name}.index"


@with_config(ConfigDict(extra="forbid"))
class TokenizerFile(TypedDict):
    name: _Text
    sha256: _Sha256


@dataclass(frozen=True)
class Index:
    """The keys of `index.json` besides format and version; of the splits, either may be empty."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    vocab_size: Annotated[int, Field(strict=True, gt=0, le=MAX_VOCAB)]
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerFile
    bos_id: _Count | None
    eos_id: _Count | None
    splits: dict[Split, tuple[Shard, ...]]
    inputs: tuple[dict[str, Any], ...]
    bad_lines: _Count
    command: dict[str, Any]


_SHARD, _INDEX = TypeAdapter(Shard), TypeAdapter(Index)


def write(folder: Path, index: Index) -> None:
    write_text(folder / NAME, encoded(index))


def encoded(index: Index) -> str:
    """The content of `index.json`, in ASCII."""
    return json.dumps({"format": FORMAT, "version": VERSION, **asdict(index)}, indent=1) + "\n"


def read(folder: Path) -> Index:
    """The index of a folder. ValueError: no folder, an unfinished one, another version, or a value out of bounds."""
    path = folder / NAME
    if not path.is_file() and not path.exists():
        raise ValueError(f"{folder}: expected a folder that `canonlm data prepare` finished; it has no {NAME}")
    content = read_object(path, MAX_INDEX)
    if (content.pop("format", None), content.pop("version", None)) != (FORMAT, VERSION):
        raise ValueError(f"{path}: expected what `canonlm data prepare` writes, version {VERSION}")
    try:
        index = _INDEX.validate_python(content)
    except ValidationError as error:
        raise _refused(error, str(path)) from None
    _check_ids(index, path)
    path_inside(folder, index.tokenizer["name"], f"{path}: tokenizer.name")
    for split, shards in index.splits.items():
        for number, one in enumerate(shards):
            _check_names(folder, one, f"{path}: splits.{split}.{number}")
    return index


def shard(folder: Path, values: Any, place: str) -> Shard:
    """A shard in `folder`, from its JSON values; error messages begin with `place`."""
    try:
        one = _SHARD.validate_python(values)
    except ValidationError as error:
        raise _refused(error, place) from None
    _check_names(folder, one, place)
    return one


def _check_names(folder: Path, shard: Shard, place: str) -> None:
    for name in (shard.name, shard.ends):
        path_inside(folder, name, f"{place}.name")


def check(folder: Path) -> Index:
    """Read every file and compare its sha256 with the index. ValueError names the first that differs."""
    index = read(folder)
    check_sha256(folder / index.tokenizer["name"], index.tokenizer["sha256"])
    for shards in index.splits.values():
        for shard in shards:
            check_sha256(folder / shard.name, shard.sha256)
            check_sha256(folder / shard.ends, shard.ends_sha256)
    check_sizes(folder, index)  # the index's own numbers
    return index


def check_sizes(folder: Path, index: Index) -> None:
    """ValueError if a file is missing, or has not the size of as many tokens or documents as the index says."""
    token_size = 2 if index.dtype == "uint16" else 4
    for shards in index.splits.values():
        for shard in shards:
            check_size(folder / shard.name, shard.tokens * token_size)
            check_size(folder / shard.ends, shard.documents * 8)


def check_sha256(path: Path, sha256: str) -> None:
    """ValueError if there is no such file, or its content has another sha256."""
    if not path.exists():
        raise ValueError(f"{path}: missing")
    if file_sha256(path) != sha256:
        raise damaged(path)


def damaged(path: Path | str) -> ValueError:
    return ValueError(f"{path}: damaged: its sha256 is not the one in {NAME}")


def file_sha256(path: Path) -> str:
    """The sha256 of a file. ValueError: it cannot be read, or is not a regular file."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise cannot_be_read(path, error) from None


def check_size(path: Path, size: int) -> None:
    """ValueError unless it is a regular file of `size` bytes."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise cannot_be_read(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: cannot be read: not a regular file")
    if status.st_size != size:
        raise wrong_size(path, status.st_size, size)


def wrong_size(path: Path | str, actual: int, size: int) -> ValueError:
    return ValueError(f"{path}: damaged: {actual:,} bytes, where {NAME} says {size:,}")


def cannot_be_read(path: Path | str, error: Exception) -> ValueError:
    return ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _check_ids(file: Index, path: Path) -> None:
    if file.dtype == "uint16" and file.vocab_size > 2**16:
        raise expected(f"{path}: vocab_size", "at most 65,536 with dtype uint16", file.vocab_size)
    for key, id in (("bos_id", file.bos_id), ("eos_id", file.eos_id)):
        if id is not None and id >= file.vocab_size:
            raise expected(f"{path}: {key}", f"null or a token below vocab_size = {file.vocab_size}", id)


def _refused(error: ValidationError, place: str) -> ValueError:
    """The first complaint, in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    key = ": ".join(filter(None, (place, ".".join(str(part)[:60] for part in first["loc"]))))
    if first["type"] == "missing":
        return ValueError(f"{key}: missing")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return ValueError(f"{key}: unknown key")
    if first["type"] == "string_pattern_mismatch":
        return expected(key, "a sha256 of 64 hexadecimal digits", first["input"])
    return expected(key, _KINDS.get(first["type"]) or first["msg"].removeprefix("Input should be "), first["input"])


_KINDS = {
    "int_type": "an integer",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
