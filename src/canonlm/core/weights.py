"""Reads files of weights: their headers and their tensors. Nothing in a file runs, and no file outside the folder is
read."""

import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from canonlm.core.errors import brief
from canonlm.core.untrusted import open_regular, path_inside, read_object

T = TypeVar("T")

NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of weights in a folder of transformers; the first that exists counts."""

LISTED = 4
"""Max number of tensors named in an error."""

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Header:
    """The shape and dtype of a tensor. dtype: its name in safetensors or torch."""

    shape: tuple[int, ...]
    dtype: str
    is_float: bool


def names_of(variant: str | None = None) -> list[str]:
    """Names of weights in a folder of transformers: `NAMES`, or those that were saved with this `variant`."""
    return [name if variant is None else f".{variant}.".join(name.rsplit(".", 1)) for name in NAMES]


def weights_of(folder: Path, variant: str | None = None) -> Path | None:
    """The file of weights in a folder of transformers, or the index of several files. ValueError if an adapter lies
    there, for which the library would read the weights of another folder."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder}: expected a complete model, got an adapter (adapter_config.json)")
    there = (name for name in names_of(variant) if (folder / name).exists())
    return next((path_inside(folder, name, str(folder)) for name in there), None)


def headers(file: Path) -> dict[str, Header]:
    """The headers of all tensors in a file, or in all files of an index. ValueError: not weights."""
    if file.suffix == ".json":
        return _merged(file, {name: headers(name) for name in _files(file)})
    if file.suffix != ".safetensors":
        return {name: header(tensor) for name, tensor in tensors(file, verify=False).items()}
    try:
        open_regular(file).close()
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it has no iterator
            return {
                name: Header(tuple(part.get_shape()), part.get_dtype(), part.get_dtype() in _FLOATS)
                for name, part in slices.items()
            }
    except Exception as error:  # junk makes these readers raise nearly anything
        raise _damaged(file, error) from None


def tensors(file: Path, verify: bool = True) -> dict[str, Tensor]:
    """The tensors of a file, or of all files of an index. ValueError for anything but a complete file of tensors.
    verify: compare the checksums that a `.pth` or `.bin` file holds, which torch does not."""
    if file.suffix == ".json":
        return _merged(file, {name: tensors(name, verify) for name in _files(file)})
    try:
        open_regular(file).close()
        if file.suffix == ".safetensors":
            return load_file(file)
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
            if verify and (entry := archive.testzip()) is not None:
                raise ValueError(f"the checksum of its entry {brief(entry)} differs")
        with warnings.catch_warnings(action="ignore"):  # for an old pickle, for example: problems raise an error
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if isinstance(content, dict) and isinstance(content.get("model"), dict):  # with other state
            content = content["model"]
        if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
            raise ValueError("expected tensors by name")
        for name, tensor in content.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
                raise ValueError(f"{brief(name)} is not a plain tensor")
            if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
                raise ValueError(f"{brief(name)} has fewer numbers than its shape {tuple(tensor.shape)}")
        return content
    except Exception as error:  # junk makes these readers raise nearly anything
        raise _damaged(file, error) from None


def check(
    headers: Mapping[str, Header], shapes: Mapping[str, Iterable[int]], place: str, may_lack: Iterable[str] = ()
) -> None:
    """ValueError unless these are the tensors of a model, with their shapes, of floating-point numbers; it names the
    others. may_lack: names of tensors that are tied to others."""
    wrong = {
        "missing": sorted(shapes.keys() - headers.keys() - set(may_lack)),
        "unknown": sorted(headers.keys() - shapes.keys()),
        "of another shape": [
            f"{name} {headers[name].shape} instead of {tuple(shape)}"
            for name, shape in shapes.items()
            if name in headers and headers[name].shape != tuple(shape)
        ],
    }
    complaints = [f"{kind}: {listed(names)}" for kind, names in wrong.items() if names]
    complaints += [complaint] if (complaint := not_floats(headers)) else []
    if complaints:
        raise ValueError(f"{place}: the weights do not fit the configuration; {'; '.join(complaints)}")


def not_floats(headers: Mapping[str, Header]) -> str | None:
    """A description of the tensors that are not floating-point numbers, or None."""
    names = sorted(f"{name} ({header.dtype})" for name, header in headers.items() if not header.is_float)
    return f"no floating-point numbers: {listed(names)}" if names else None


def listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(brief(name) for name in names[:LISTED]) + more


def header(tensor: Tensor) -> Header:
    """The header of a tensor in memory."""
    return Header(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.dtype in _FLOATS.values())


def _files(index: Path) -> list[Path]:
    """The files that an index names."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{index}: expected a weight_map of names and files")
    files = [path_inside(index.parent, name, str(index)) for name in sorted(set(places.values()))]
    for file in files:
        if file.suffix not in (".safetensors", ".bin"):
            raise ValueError(f"{index}: expected files of weights, .safetensors or .bin, got {brief(file.name)!r}")
    return files


def _merged(index: Path, parts: Mapping[Path, Mapping[str, T]]) -> dict[str, T]:
    """The union of an index's files. ValueError unless each tensor is in the file that the index names, and only
    there."""
    named = {name: index.parent / place for name, place in read_object(index)["weight_map"].items()}
    held = {(name, file) for file, part in parts.items() for name in part}
    if differing := sorted({name for name, _ in held ^ set(named.items())}):
        raise ValueError(f"{index}: its files do not hold the tensors that it lists: {listed(differing)}")
    return {name: value for part in parts.values() for name, value in part.items()}


def _damaged(file: Path, error: BaseException) -> ValueError:
    reason = re.sub(r"\s+", " ", str(error) or type(error).__name__).partition(". ")[0]
    return ValueError(f"{file}: not a whole file of tensors and nothing else ({brief(reason)})")
