"""Published checkpoints as files: a folder, or a repository on the Hugging Face Hub, in; a folder out."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from canonlm.errors import unknown
from canonlm.models.config import CanonLMConfig
from canonlm.models.modeling import CanonLMForCausalLM
from canonlm.models.published.checkpoint import build, export, to_llama

_LAYOUTS = (
    ("config.json", ("model.safetensors", "model.safetensors.index.json"), "model*.safetensors*"),
    ("config.json", ("pytorch_model.bin", "pytorch_model.bin.index.json"), "pytorch_model*.bin*"),
    ("params.json", ("consolidated.pth",), "consolidated.pth"),
)
"""The configuration; the file of weights, or which says where each tensor is; what to download. The first that is
there counts."""

_PARAMS = ("config.json", "params.json")
_WANTED = "config.json with model.safetensors or pytorch_model.bin, or params.json with consolidated.pth"


def load_published(
    source: str | Path,
    variant: str | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
    local_files_only: bool = False,
) -> CanonLMForCausalLM:
    """Our model for a published checkpoint.

    Args:
        source: a folder, or the name of a repository on the Hugging Face Hub: `params.json` with `consolidated.pth` as
            the training runs wrote them, or the `config.json` with `model.safetensors` or `pytorch_model.bin` (sharded
            or not) of the release's transformers classes. A folder that `save_pretrained` wrote for our model will do.
        variant: which sub-folder, where there are several.
        revision, token, cache_dir, local_files_only: of the Hub, as in `huggingface_hub.snapshot_download`.
        dtype: default: as stored.

    ValueError in one line for anything that is missing, damaged or not a checkpoint we can compute. Nothing in the
    files is executed.
    """
    hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    root = _fetch(source, [*_PARAMS, *(f"*/{name}" for name in _PARAMS)], **hub)  # small: which variants there are
    folder = _choose(root, variant)
    for params_name, weights_names, pattern in _LAYOUTS:
        if (folder / params_name).exists():
            _fetch(source, [str(folder.relative_to(root) / pattern)], **hub)
            if weights := next((folder / name for name in weights_names if (folder / name).exists()), None):
                return _read(folder / params_name, weights, dtype)
    raise ValueError(
        f"{folder}: expected {_WANTED}; it has {', '.join(sorted(file.name for file in folder.iterdir()))}"
    )


def save_published(model: CanonLMForCausalLM, folder: Path, to: str = "canonlm") -> None:
    """Write `config.json` or `params.json` and weights into `folder`. `to` is one of `TARGETS`."""
    if to not in TARGETS:
        raise unknown("target", to, TARGETS)
    TARGETS[to](model, folder)


def _save_hf(model: CanonLMForCausalLM, folder: Path) -> None:
    params, state = export(model)
    (folder / "config.json").write_text(json.dumps(params, indent=1) + "\n")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _save_lingua(model: CanonLMForCausalLM, folder: Path) -> None:
    params, state = export(model, lingua=True)
    (folder / "params.json").write_text(json.dumps({"model": params}, indent=1) + "\n")
    torch.save({"model": state}, folder / "consolidated.pth")


TARGETS = {
    "canonlm": lambda model, folder: model.save_pretrained(folder),
    "hf": _save_hf,
    "lingua": _save_lingua,
    "llama": lambda model, folder: to_llama(model).save_pretrained(folder),
}
"""Ours, the release's two, and transformers' own Llama (for models without Canon layers)."""


def _fetch(source: str | Path, patterns: list[str], **hub: Any) -> Path:
    """The folder, or where the Hub's files that match are on this machine."""
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(huggingface_hub.snapshot_download(str(source), allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f'source: expected a folder or a repository on the Hub, got "{source}" ({reason})') from None


def _choose(folder: Path, variant: str | None) -> Path:
    variants = sorted({file.parent.name for name in _PARAMS for file in folder.glob(f"*/{name}")})
    if variant is not None:
        if variant not in variants:
            raise unknown("variant", variant, variants)
        return folder / variant
    if any((folder / name).exists() for name in _PARAMS):
        return folder
    if len(variants) == 1:
        return folder / variants[0]
    if variants:
        raise ValueError(f"variant: expected one of {', '.join(variants)}  (in {folder})")
    raise ValueError(f"{folder}: expected {_WANTED}")


def _read(params_file: Path, weights_file: Path, dtype: torch.dtype | None) -> CanonLMForCausalLM:
    params = _json(params_file)
    ours = params.get("model_type") == CanonLMConfig.model_type
    state = _sharded(weights_file) if weights_file.suffix == ".json" else _tensors(weights_file)
    try:
        if ours:
            return CanonLMForCausalLM.from_pretrained(params_file.parent, dtype=dtype or "auto").eval()
        return build(params, state, dtype)
    except ValueError as error:
        raise ValueError(f"{error}  (in {params_file.parent})") from None


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        reason = re.sub(r"\s+", " ", str(error)).partition(". ")[0]
        raise ValueError(f"{file}: not a whole file of tensors and nothing else ({reason})") from None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):  # beside an optimizer's state, say
        content = content["model"]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{file}: expected tensors by name")
    return content


def _sharded(index: Path) -> Mapping[str, Tensor]:
    places = _json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index}: expected a weight_map")
    state: dict[str, Tensor] = {}
    for name in sorted({str(place) for place in places.values()}):
        state |= _tensors(index.parent / name)
    return state
