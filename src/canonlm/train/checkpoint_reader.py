"""A safe reader of checkpoints that somebody else may have written, on top of torch's reader.

torch reads `.metadata` with `pickle.load`, which runs any code in the file, and some entries with pickle, too. It opens
any file that an entry names, and numbers that no chunk of a tensor covers are left as uninitialized memory. This
reader's unpickler only accepts the classes of such a file. Every entry must be a tensor of numbers, tiled by its
chunks, which must be in files of the checkpoint's own folder. A manifest with checksums does not help here: the author
of the files also writes the manifest.
"""

import io
import itertools
import math
import pickle
import warnings
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from canonlm.core.untrusted import read_bytes

METADATA = ".metadata"
DTYPES = {f"torch.{name}": getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}

_CLASSES = {
    "torch": ("Size", *(name.removeprefix("torch.") for name in DTYPES)),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
}
"""The classes in `.metadata`, by module."""

_PATHS = {("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")}
"""The checkpoint's former path: not used, so it is read as a string."""


class Reader(FileSystemReader):
    """Reads the checkpoint in `folder`. ValueError, in one line, for anything that our training does not write."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.folder / METADATA
        content = read_bytes(path)
        try:
            metadata = _checked(_Unpickler(io.BytesIO(content)).load(), self.folder)
        except _Refused as error:
            raise ValueError(f"{path}: {error}") from None
        except Exception as error:  # junk makes the unpickler raise nearly anything
            raise ValueError(f"{path}: not the metadata of a checkpoint ({type(error).__name__})") from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].relative_path)
        for name, requests in itertools.groupby(
            items, lambda item: self.storage_data[item.storage_index].relative_path
        ):
            path = self.folder / name
            with path.open("rb") as file:
                for request in requests:
                    tensor = _tensor(
                        file, self.storage_data[request.storage_index], f"{path}: {request.storage_index.fqn}"
                    )
                    part = narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)
                    target = planner.resolve_tensor(request).detach()
                    target.copy_(part)
                    planner.commit_tensor(request, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Stored(_StorageInfo):
    """The place of a chunk, and its expected size and dtype."""

    size: tuple[int, ...]
    dtype: torch.dtype


class _Refused(Exception):
    pass


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler, as the one in C allocates a table of any length that the file demands."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return lambda *parts: "/".join(map(str, parts))
        if name not in _CLASSES.get(module, ()):
            raise _Refused(f"it refers to {module}.{name}, which no checkpoint needs; none of it was run")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("it has references to other objects")


def _checked(metadata: Any, folder: Path) -> Metadata:
    """The metadata, rebuilt from checked parts."""
    sizes = {
        file.name: file.stat().st_size for file in folder.glob("*.distcp") if file.is_file() and not file.is_symlink()
    }
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) is not TensorStorageMetadata:
            raise _Refused(f"{str(name)[:100]!r} is not a tensor")
        dtype, size = entry.properties.dtype, _whole_numbers(entry.size)
        if str(dtype) not in DTYPES:
            raise _Refused(f"{name}: expected numbers of {', '.join(DTYPES)}, got {dtype}")
        chunks = [(_whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)) for chunk in entry.chunks]
        if not _tile(size, chunks):
            raise _Refused(f"{name}: its chunks do not make up a tensor of shape {tuple(size)}")
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(size),
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(chunk)) for offsets, chunk in chunks],
        )
        for offsets, chunk in chunks:
            index = MetadataIndex(name, offsets)
            if math.prod(chunk):
                places[index] = _place(metadata.storage_data[index], sizes, chunk, dtype, name)
    return Metadata(entries, storage_data=places)


def _whole_numbers(size: Iterable[Any]) -> tuple[int, ...]:
    numbers = tuple(size)
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise _Refused(f"{str(numbers)[:100]} is not a shape")
    return numbers


def _tile(size: tuple[int, ...], chunks: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether the chunks cover the tensor, each number once. They form a grid: every dimension is cut in one way."""
    full = [(offsets, sizes) for offsets, sizes in chunks if math.prod(sizes)]
    if any(len(offsets) != len(size) or len(sizes) != len(size) for offsets, sizes in full):
        return False
    cuts = []
    for dimension, length in enumerate(size):
        parts = sorted({(offsets[dimension], sizes[dimension]) for offsets, sizes in full})
        ends = [0, *itertools.accumulate(part for _, part in parts)]
        if [start for start, _ in parts] != ends[:-1] or ends[-1] != length:
            return False
        cuts.append(len(parts))
    return len({offsets for offsets, _ in full}) == len(full) == (math.prod(cuts) if math.prod(size) else 0)


def _place(info: Any, sizes: dict[str, int], size: tuple[int, ...], dtype: torch.dtype, name: str) -> _Stored:
    if type(info) is not _StorageInfo or getattr(info, "transform_descriptors", None):
        raise _Refused(f"{name}: its place is not that of a plain tensor")
    file, offset, length = info.relative_path, info.offset, info.length
    if type(file) is not str or file not in sizes:
        raise _Refused(f"{name}: expected a *.distcp file beside it, got {str(file)[:100]!r}")
    if type(offset) is not int or type(length) is not int or not 0 <= offset < offset + length <= sizes[file]:
        raise _Refused(f"{name}: its place is outside {file}")
    place = _Stored(file, offset, length)
    place.size, place.dtype = size, dtype
    return place


def _tensor(file: Any, place: _Stored, name: str) -> Tensor:
    """A chunk: a tensor as `torch.save` writes it, with nothing else in it."""
    file.seek(place.offset)
    content = io.BytesIO(file.read(place.length))
    try:
        with zipfile.ZipFile(content) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed")
        content.seek(0)
        with warnings.catch_warnings(action="ignore"):
            tensor = torch.load(content, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError("it is not a tensor")
        if (tuple(tensor.shape), tensor.dtype) != (place.size, place.dtype):
            raise ValueError(f"expected {place.size} of {place.dtype}, got {tuple(tensor.shape)} of {tensor.dtype}")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
            raise ValueError("some of its numbers are missing")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(f"{name}: not a tensor of a checkpoint ({reason})") from None
    return tensor
