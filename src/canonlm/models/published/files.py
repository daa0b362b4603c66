"""Published checkpoints as files: a folder, or a repository on the Hugging Face Hub, in; a folder out."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors.torch import save_file

from canonlm.core import weights
from canonlm.core.errors import expected, unknown
from canonlm.core.files import check_manifest
from canonlm.core.untrusted import path_inside, read_object
from canonlm.models.config import CanonLMConfig
from canonlm.models.modeling import CanonLMForCausalLM
from canonlm.models.published.checkpoint import build, export, to_llama

_LAYOUTS = (
    ("config.json", ("model.safetensors", "model.safetensors.index.json"), "model*.safetensors*"),
    ("config.json", ("pytorch_model.bin", "pytorch_model.bin.index.json"), "pytorch_model*.bin*"),
    ("params.json", ("consolidated.pth",), "consolidated.pth"),
)
"""The configuration; the file of weights, or the index of several; what to download. The first layout that exists
counts."""

_CONFIGS = ("config.json", "params.json")
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
            or not) of the release's transformers classes; or a folder that `save_pretrained` wrote for our model.
        variant: which sub-folder, where there are several.
        revision, token, cache_dir, local_files_only: of the Hub, as in `huggingface_hub.snapshot_download`.
        dtype: default: as stored.

    One-line ValueError for anything that is missing, damaged or not a checkpoint that we can compute. Nothing in the
    files is executed.
    """
    hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    root = _fetch(source, [*_CONFIGS, *(f"*/{name}" for name in _CONFIGS)], **hub)  # small files, to list the variants
    folder = _choose(root, variant)
    check_manifest(folder)
    for params_name, weights_names, pattern in _LAYOUTS:
        if (folder / params_name).exists():
            _fetch(source, [str(folder.relative_to(root) / pattern)], **hub)
            for name in weights_names:
                if (folder / name).exists():
                    params, file = (path_inside(folder, each, str(folder)) for each in (params_name, name))
                    return _read(params, file, dtype)
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
    text = json.dumps(params, indent=2, sort_keys=True)  # as the library writes it
    (folder / "config.json").write_text(text + "\n")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _save_lingua(model: CanonLMForCausalLM, folder: Path) -> None:
    params, state = export(model, lingua=True)
    first = getattr(model.config, "published", None)  # where the file may have more than the model, or nothing else
    content = params if isinstance(first, dict) and first.get("params") == params else {"model": params}
    (folder / "params.json").write_text(json.dumps(content, indent=1) + "\n")
    torch.save({"model": state}, folder / "consolidated.pth")


TARGETS = {
    "canonlm": lambda model, folder: model.save_pretrained(folder),
    "hf": _save_hf,
    "lingua": _save_lingua,
    "llama": lambda model, folder: to_llama(model).save_pretrained(folder),
}
"""Ours, the release's two, and transformers' own Llama (for models without Canon layers)."""


def _fetch(source: str | Path, patterns: list[str], **hub: Any) -> Path:
    """The folder itself, or the local folder of the Hub's files that match."""
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(huggingface_hub.snapshot_download(str(source), allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f'source: expected a folder or a repository on the Hub, got "{source}" ({reason})') from None


def has_config(folder: Path) -> bool:
    return any((folder / name).exists() for name in _CONFIGS)


def variants_in(folder: Path) -> list[Path]:
    """The sub-folders that have a model."""
    return sorted({file.parent for name in _CONFIGS for file in folder.glob(f"*/{name}")})


def _choose(folder: Path, variant: str | None) -> Path:
    variants = [place.name for place in variants_in(folder)]
    if variant is not None:
        if variant not in variants:
            raise unknown("variant", variant, variants)
        return folder / variant
    if has_config(folder):
        return folder
    if len(variants) == 1:
        return folder / variants[0]
    if variants:
        raise ValueError(f"variant: expected one of {', '.join(variants)}  (in {folder})")
    raise ValueError(f"{folder}: expected {_WANTED}")


def _read(params_file: Path, weights_file: Path, dtype: torch.dtype | None) -> CanonLMForCausalLM:
    params = read_object(params_file)
    if not isinstance(model_type := params.get("model_type", ""), str):
        raise expected(f"{params_file}: model_type", "a string", model_type)
    ours = params.get("model_type") == CanonLMConfig.model_type
    state = {} if ours else weights.tensors(weights_file)
    try:
        if ours:
            model = CanonLMForCausalLM.from_pretrained(params_file.parent, dtype=dtype or "auto")
            if dtype is None and len({header.dtype for header in weights.headers(weights_file).values()}) > 1:
                model.load_state_dict(weights.tensors(weights_file), strict=False, assign=True)  # each as stored
                model.tie_weights()
            return model.eval()
        return build(params, state, dtype)
    except ValueError as error:
        raise ValueError(f"{error}  (in {params_file.parent})") from None
