"""Checks that a folder's weights fit its configuration, before transformers reads them: transformers would fill in
random numbers for missing ones, and cast integers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from canonlm.errors import expected
from canonlm.models import weights
from canonlm.models.limits import check_memory, few_modules
from canonlm.untrusted import path_inside, read_object


def check_saved(model_class: Any, name_or_path: str | os.PathLike | None, options: Mapping[str, Any]) -> None:
    """ValueError unless the folder holds the tensors of the model, with their shapes, and the machine has the memory.

    options: those of `from_pretrained`. Nothing is checked for a name on the Hub, for tensors that the caller passes,
    and for a folder without a configuration or weights, which the library refuses.
    """
    folder = Path(name_or_path or "", options.get("subfolder") or "")
    if name_or_path is None or options.get("state_dict") is not None or not (folder / "config.json").is_file():
        return
    if (file := weights.weights_of(folder)) is None:
        return
    held = weights.headers(file)
    saved = read_settings(folder)
    if (kind := saved.get("model_type")) != model_class.config_class.model_type:
        raise expected(f"{folder / 'config.json'}: model_type", model_class.config_class.model_type, kind)
    config = options.get("config") or model_class.config_class.from_dict(saved)
    if config.num_hidden_layers > len(held):
        raise expected("num_hidden_layers", f"at most {len(held):,}, the tensors in {file}", config.num_hidden_layers)
    with torch.device("meta"), few_modules():
        model = model_class(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model_class.base_model_prefix and not hasattr(model, model_class.base_model_prefix):
        # The decoder alone, from a folder that may have been saved with the head.
        prefix = f"{model_class.base_model_prefix}."
        if any(name.startswith(prefix) for name in held):
            held = {name.removeprefix(prefix): one for name, one in held.items() if name.startswith(prefix)}
    if options.get("ignore_mismatched_sizes"):
        shapes = {name: held[name].shape if name in held else shape for name, shape in shapes.items()}
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    weights.check(held, shapes, str(file), may_lack=tied)
    check_memory(str(folder), sum(p.numel() * p.element_size() for p in model.parameters()))


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. ValueError if it, or another settings file of the library, cannot be read."""
    files = [path_inside(folder, name, str(folder)) for name in ("config.json", "generation_config.json")]
    config, *_ = [read_object(file) if file.exists() else {} for file in files]
    return config


def check_loaded(place: str, model: Any, info: Mapping[str, Any], mismatched: bool = False) -> None:
    """ValueError that names the tensors that the library has skipped or made up. `info`: its loading info. mismatched:
    tensors of another shape may be new."""
    head = () if hasattr(model, "lm_head") else ("lm_head.",)  # the decoder alone leaves it out
    kinds = {
        "missing": info["missing_keys"],
        "unknown": [name for name in info["unexpected_keys"] if not name.startswith(head)],
        "of another shape": [] if mismatched else [entry[0] for entry in info["mismatched_keys"]],
    }
    complaints = [f"{kind}: {weights.listed(sorted(map(str, names)))}" for kind, names in kinds.items() if names]
    if complaints:
        raise ValueError(f"{place}: the weights do not fit the configuration; {'; '.join(complaints)}")
