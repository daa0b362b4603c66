"""Runs that start from a saved model (`model.weights`): its architecture and sizes, and its tensors.

The folder decides the architecture and the sizes, which the run's configuration then holds like any others, so a run
can be evaluated and exported without the folder. Of the run's parameters, only those of added Canon layers and the rows
of added tokens may be missing in it. They keep their initial values, a function of (seed, parameter name).
"""

import hashlib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from canonlm.canon.layer import CanonLayer
from canonlm.core.errors import InvalidSetting, expected
from canonlm.core.files import Stamp
from canonlm.core.saved import cannot_be_loaded, read_settings
from canonlm.core.untrusted import own_file
from canonlm.core.user_folders import expanded
from canonlm.core.weights import listed
from canonlm.data.tokenizers import from_file
from canonlm.models.decoder import fields_of as decoder_fields
from canonlm.models.hf_small_configs import fields_of as library_fields
from canonlm.models.interface import LanguageModel, Sizes
from canonlm.models.names import name_of
from canonlm.models.saved_model import kind_of, quiet, saved_model
from canonlm.train.build import sizes_of, with_complete_name
from canonlm.train.checkpoint import load_weights, newest
from canonlm.train.config import RunConfig
from canonlm.train.load_config import load as load_config

_FILES = ("*.safetensors", "*.bin", "*.pth", "*.index.json")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")


def completed(raw: dict[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """The settings of a run with `model.weights`, with that model's architecture and sizes instead of the recipe's.

    typed: the keys on the command line. Of the model's settings, these may be fields, and `arch=+canon=SITES`, which
    adds Canon layers. InvalidSetting for others, and for a folder without a model that can be trained.
    """
    model = raw.get("model")
    if not isinstance(model, dict) or model.get("weights") is None or "weights_sha256" in model:
        return raw
    if not isinstance(model["weights"], str):
        raise expected("model.weights", "a folder with a saved model", model["weights"])
    for key in (*_SIZES, "vocab_size"):
        if f"model.{key}" in typed:
            raise expected(f"model.{key}", "no value, as model.weights has its own", model[key])
    added = raw.get("arch") if str(raw.get("arch")).startswith("+") else ""
    if "arch" in typed and not added:
        raise expected("arch", "no value, as model.weights has its own, or +canon=SITES to add layers", raw["arch"])
    folder = expanded(model["weights"])
    try:
        if not folder.is_dir():
            raise expected("model.weights", "a folder with a saved model", model["weights"])
        arch, sizes = _saved(folder)
        own = {key: getattr(sizes, key) for key in _SIZES}
        own |= {} if raw.get("task") else {"vocab_size": sizes.vocab_size}
        if added and "+canon" in arch:
            raise expected("arch", f"no value, as {folder} has Canon layers ({arch})", added)
        changes = {key: value for key, value in (model.get("fields") or {}).items() if f"model.fields.{key}" in typed}
        own |= {"fields": {**sizes.fields, **changes}, "weights": model["weights"], "weights_sha256": sha256(folder)}
    except InvalidSetting:
        raise
    except (ValueError, OSError) as error:
        raise InvalidSetting("model.weights", f"model.weights: {error}") from None
    return {**raw, "arch": f"{arch}{added}", "model": own}


def _saved(folder: Path) -> tuple[str, Sizes]:
    """The architecture's name and the sizes of a saved model."""
    if (folder / "config.yaml").is_file():
        run = with_complete_name(load_config(folder / "config.yaml"), saved=True)
        return run.arch, sizes_of(run)
    if kind_of(str(folder), folder) == "published":
        config: Any = saved_model(str(folder), folder)[0].config
    else:
        read_settings(folder)
        try:
            with quiet():
                config = AutoConfig.from_pretrained(str(folder))
        except Exception as error:  # whatever the library raises
            raise cannot_be_loaded(str(folder), error) from None
    if config.model_type == "canonlm":
        arch = name_of(config)
        return arch, decoder_fields(config, arch)
    host, sites = (config.host, config.sites) if config.model_type == "canon_host" else (config, "")
    sizes = library_fields(host, f"hf:{host.model_type}")
    return f"hf:{host.model_type}" + (f"+canon={sites}" if sites else ""), sizes


def sha256(folder: Path) -> str:
    """Identifies the weights in a folder: of the names and contents of its files of weights; of a run's newest
    checkpoint."""
    if (folder / "config.yaml").is_file():
        files = [newest(folder) / "manifest.json"]  # has the sha256 of every other file
    else:
        places = ([file for pattern in _FILES for file in folder.glob(below + pattern)] for below in ("", "*/"))
        files = sorted(next(filter(None, places), []))  # published checkpoints may lie one folder down
    if not files:
        raise ValueError(f"{folder}: it has no weights ({', '.join(_FILES[:3])})")
    about = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _digest(str(folder), tuple(about))


@cache
def _digest(folder: str, files: tuple[tuple[str, int, int], ...]) -> str:
    lines = [f"{Path(file).relative_to(folder)} {Stamp.of(Path(file)).sha256}" for file, *_ in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def other_tokenizer(run: RunConfig, text: Path) -> str:
    """A note if tokens of the weights stand for other text than those of the prepared `text`; "" if they do not, or if
    the folder of the weights has no tokenizer."""
    folder = expanded(str(run.model.weights))
    try:
        saved, own = (from_file(own_file(place / "tokenizer.json")).get_vocab() for place in (folder, text))
    except Exception:  # no such file, or a damaged one, for which the library raises nothing narrower
        return ""
    names = {number: token for token, number in saved.items()}
    known = {token: number for token, number in own.items() if number in names}
    if not (wrong := [token for token, number in known.items() if names[number] != token]):
        return ""
    return (
        f"{len(wrong):,} of {len(known):,} tokens of {text} are others in {folder}: model.weights has another tokenizer"
    )


class Weights:
    """The tensors from which a run starts."""

    def __init__(self, run: RunConfig, model: LanguageModel) -> None:
        """model: the run's, perhaps on the meta device. InvalidSetting: the folder has changed, or has other tensors
        than the model."""
        folder = expanded(str(run.model.weights))
        if not folder.is_dir() or (now := sha256(folder)) != run.model.weights_sha256:
            known = str(run.model.weights_sha256)[:12]
            what = f"the weights from which this run began (sha256 {known}…)"
            raise expected("model.weights", what, f"{folder}, which has {'none' if not folder.is_dir() else now[:12]}")
        self._values: Mapping[str, Tensor]
        if (folder / "config.yaml").is_file():
            self._values = load_weights(newest(folder))
        else:
            self._values = saved_model(str(folder), folder)[0].state_dict()
        self._check(str(run.model.weights), model)

    def _check(self, folder: str, model: LanguageModel) -> None:
        module = model.module
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        canon = {
            f"{path}.{name}"
            for path, part in module.named_modules()
            if isinstance(part, CanonLayer)
            for name in part.state_dict()
        }
        ends = (module.get_input_embeddings(), module.get_output_embeddings())
        tokens = {id(tensor) for end in ends if end is not None for tensor in end.parameters()}
        of_tokens = {name for name, x in module.named_parameters(remove_duplicate=False) if id(x) in tokens}

        def differs(name: str) -> bool:
            there = tuple(self._values[name].shape)
            return there[1:] != shapes[name][1:] or (there != shapes[name] and name not in of_tokens)

        wrong = {
            "missing": sorted(shapes.keys() - self._values.keys() - canon),
            "not in the model": sorted(self._values.keys() - shapes.keys()),
            "of another shape": sorted(name for name in shapes.keys() & self._values.keys() if differs(name)),
        }
        if complaints := [f"{kind}: {listed(names)}" for kind, names in wrong.items() if names]:
            raise InvalidSetting("model.weights", f"model.weights: {folder} does not fit; {'; '.join(complaints)}")

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite initial values, by name. Of a vocabulary of another size, the first rows."""
        for name, tensor in tensors.items():
            if (value := self._values.get(name)) is not None:
                if tensor.shape != value.shape:
                    rows = min(len(tensor), len(value))
                    tensor, value = tensor[:rows], value[:rows]
                tensor.copy_(value)
