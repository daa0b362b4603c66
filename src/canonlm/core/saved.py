"""Checks that a folder's weights fit its configuration, before transformers reads them: transformers would fill in
random numbers for missing ones, and cast integers."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from canonlm.core import weights
from canonlm.core.errors import InvalidSetting, brief, expected
from canonlm.core.limits import check_memory, few_modules
from canonlm.core.untrusted import path_inside, read_object

LAYERS = ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks")
"""Other names of `num_hidden_layers` in configurations."""

LAYER_COUNTS = {"num_hidden_layers", *LAYERS, "encoder_layers", "num_encoder_layers"}

MAX_LABELS = 100_000
"""Max classes of a classifier in a configuration: the library makes a table of them."""

MAX_PACKED = 16
"""Max parameters of a model per number in its files, which may be quantized."""


NOT_ITS_OWN = "a canonized model's: import canonlm, then AutoModelForCausalLM.from_pretrained"
"""In a canonized folder, in the field that names the file of weights, which only loading reads: a class without Canon
layers fails there and shows this text. It reads the folder's configuration without an error, as PEFT and others do."""

_OTHER_FILES = ("transformers_weights", "configuration_files")
"""Keys that name files which the library then reads in place of those that we check."""

_FLASH = ("flash_attn", "flash_attn_interface", "flash_attn_4")
_EXPERTS_OF_THE_HUB = ("sonicmoe", "deepgemm")


def check_saved(model_class: Any, name_or_path: str | os.PathLike | None, options: Mapping[str, Any]) -> None:
    """ValueError unless the folder holds the tensors of the model, with their shapes, and the machine has the memory.

    options: those of `from_pretrained`. Nothing is checked for a name on the Hub, for tensors that the caller passes,
    and for a folder without a configuration or weights, which the library refuses.
    """
    folder = Path(name_or_path or "", options.get("subfolder") or "")
    if name_or_path is None or options.get("state_dict") is not None or not (folder / "config.json").exists():
        return
    saved = read_settings(folder)
    if (file := weights.weights_of(folder, options.get("variant"))) is None:
        return
    held = weights.headers(file)
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
    if saved.get("quantization_config"):  # the library's quantizers keep linear layers in tensors of their own
        linear = tuple(f"{path}." for path, part in model.named_modules() if isinstance(part, nn.Linear))
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(linear)}
        held = {name: header for name, header in held.items() if not name.startswith(linear)}
    may_lack = set(model.all_tied_weights_keys if config.tie_word_embeddings else ())
    if (new_head := getattr(model_class, "new_head", None)) is not None:
        held = {name: one for name, one in held.items() if not name.startswith("lm_head.")}
        may_lack |= {name for name in shapes if name.startswith(new_head)}
    weights.check(held, shapes, str(file), may_lack=may_lack)
    check_memory(str(folder), sum(p.numel() * p.element_size() for p in model.parameters()))


def check_fits(
    folder: Path, config: Mapping[str, Any], build: Callable[[], Any] | None, variant: str | None = None
) -> None:
    """ValueError unless the weights in a folder can be those of the model that `build` builds, and the machine has the
    memory. config: its settings. build None: of code that should run only once. variant: as in `from_pretrained`."""
    if (file := weights.weights_of(folder, variant)) is None:
        raise ValueError(f"{folder}: expected weights, {' or '.join(weights.names_of(variant))}")
    held = weights.headers(file)
    if "quantization_config" not in config and (complaint := weights.not_floats(held)):
        raise ValueError(f"{file}: {complaint}")
    check_labels(config, f"{folder / 'config.json'}: ")
    for key, value in _integers(config):
        name = key.rpartition(".")[2]
        if name in LAYER_COUNTS and value > len(held):
            raise expected(
                f"{folder / 'config.json'}: {key}", f"at most {len(held):,}, the tensors in {file.name}", value
            )
        if abs(value) >= 2**62:
            raise expected(f"{folder / 'config.json'}: {key}", "a size that a model can have", value)
    if build is None:
        return
    try:
        with torch.device("meta"), few_modules():
            model = build()
    except Exception as error:
        raise cannot_be_loaded(str(folder), error) from None
    needed, stored = sum(p.numel() for p in model.parameters()), sum(math.prod(one.shape) for one in held.values())
    if needed > MAX_PACKED * stored:
        what = f"a model of the {stored:,} numbers in {file.name}"
        raise expected(str(folder / "config.json"), what, f"one of {needed:,}")
    check_memory(str(folder), 2 * needed)  # at least half precision


def check_labels(config: Mapping[str, Any], place: str = "") -> None:
    """ValueError for more classes than a classifier has. place: begins the message."""
    for key, value in _integers(config):
        if key.rpartition(".")[2] == "num_labels" and not 0 <= value <= MAX_LABELS:
            raise expected(f"{place}{key}", f"an integer from 0 to {MAX_LABELS:,}", value)


def _integers(config: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """All integers of a configuration, by their dotted keys."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _integers(value, f"{prefix}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def cannot_be_loaded(name: str, error: Exception) -> ValueError:
    if isinstance(error, InvalidSetting):
        return error
    return ValueError(f"{name}: not a causal language model that can be loaded ({reason_of(error)})")


def reason_of(error: BaseException) -> str:
    """The first line of a library's error message, as one sentence."""
    text = " ".join(str(error).strip().partition("\n")[0].split()) or type(error).__name__
    return brief(re.split(r"(?<=[a-z)])\. ", text, maxsplit=1)[0].rstrip("."), 300)


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. ValueError if it, or another settings file of the library, cannot be read."""
    files = [path_inside(folder, name, str(folder)) for name in ("config.json", "generation_config.json")]
    config, *_ = [read_object(file) if file.exists() else {} for file in files]
    check_references(str(files[0]), config)
    return _with_special_floats(config)


def _with_special_floats(value: Any) -> Any:
    """The library writes infinity, which JSON lacks, as `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        number = value.get("__float__")
        if len(value) == 1 and number in ("Infinity", "-Infinity", "NaN"):
            return float(number)
        return {key: _with_special_floats(each) for key, each in value.items()}
    return list(map(_with_special_floats, value)) if isinstance(value, list) else value


def check_references(place: str, config: Mapping[str, Any]) -> None:
    """ValueError for a configuration that names other files than the usual ones, or a kernel for which the library
    would download and run a program: one of the Hub, or flash attention where it is not installed."""
    groups: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    while groups:
        above, group = groups.pop()
        for key, value in group.items():
            path = f"{above}.{key}".lstrip(".")
            if key in _OTHER_FILES and value is not None:
                if path != "transformers_weights" or value != NOT_ITS_OWN or config.get("model_type") != "canon_host":
                    raise expected(f"{place}: {path}", "none, as only the usual files are read", value)
            elif isinstance(value, dict):
                groups.append((path, value))
            elif isinstance(value, str) and re.search("(attn|experts)_implementation", path):
                missing = value.startswith("flash_attention") and not any(map(find_spec, _FLASH))
                if missing or not re.fullmatch(r"\w+", value) or value in _EXPERTS_OF_THE_HUB:
                    raise expected(f"{place}: {path}", "the name of an installed kernel, such as sdpa", value)


def check_loaded(place: str, model: Any, info: Mapping[str, Any], mismatched: bool = False) -> None:
    """ValueError that names the tensors that the library has skipped or made up. `info`: its loading info. mismatched:
    tensors of another shape may be new."""
    head = () if hasattr(model, "lm_head") else ("lm_head.",)  # a model without one leaves it out
    kinds = {
        "missing": [name for name in info["missing_keys"] if not name.startswith(getattr(model, "new_head", ()))],
        "unknown": [name for name in info["unexpected_keys"] if not name.startswith(head)],
        "of another shape": [] if mismatched else [entry[0] for entry in info["mismatched_keys"]],
    }
    complaints = [f"{kind}: {weights.listed(sorted(map(str, names)))}" for kind, names in kinds.items() if names]
    if complaints:
        raise ValueError(f"{place}: the weights do not fit the configuration; {'; '.join(complaints)}")
