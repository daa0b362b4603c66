"""Builds models from architecture names and sizes: the only place that does.

llama+canon, gla5{num_heads=4}                our decoder (`canonlm.models.names` has the names)
hf:qwen3{num_key_value_heads=2}, fla:kda      transformers, flash-linear-attention; with Canon layers hf:qwen3+canon=AC
mine.py:Name, package.module:Name             a mixer for our decoder, or a model from outside
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from transformers import PreTrainedModel

from canonlm.core import user_code
from canonlm.core.errors import InvalidSetting
from canonlm.core.limits import few_modules
from canonlm.core.user_code import LIBRARIES, reference_of
from canonlm.models import hf
from canonlm.models.check_sites import of_saved
from canonlm.models.config import CanonLMConfig, gated_width
from canonlm.models.decoder import Decoder, config_of
from canonlm.models.fields import GROUPS
from canonlm.models.hf_small_configs import refusal
from canonlm.models.interface import LanguageModel, Sizes
from canonlm.models.mixers.base import MIXERS, Architecture, Mixer, register
from canonlm.models.modeling import CanonLMForCausalLM
from canonlm.models.user_model import place_of


@few_modules()
def build(arch: str, sizes: Sizes, seed: int = 0, *, saved: bool = False) -> LanguageModel:
    """The model of that name with its initial weights, a function of (seed, parameter name), on torch's default device
    (under `torch.device("meta")`: without values).

    One-line ValueError for an unknown architecture, for sizes that it or this machine's memory does not allow, and for
    settings of our decoder without effect, unless they are of a `saved` run.
    """
    if arch.partition(":")[0] in LIBRARIES:
        return hf.library_model(arch, sizes, seed)
    if (reference := reference_of(arch)) is not None and not _is_decoder(arch):
        return hf.outside_model(arch, _load(reference), sizes, seed)
    with _in_one_line(arch), of_saved() if saved else nullcontext():
        return Decoder(CanonLMForCausalLM(config_of(arch, sizes, seed, saved=saved)))


def wrap(module: PreTrainedModel) -> LanguageModel:
    """The interface of an existing model."""
    if isinstance(module.config, CanonLMConfig):
        return Decoder(module, trained=True)  # type: ignore[arg-type]
    sites = getattr(module, "canon_sites", "")
    return hf.ForeignModel(
        f"hf:{module.config.model_type}" + (f"+canon={sites}" if sites else ""), module, has_weights=True
    )


def complete_name(arch: str, sizes: Sizes, *, saved: bool = False) -> tuple[str, dict[str, Any]]:
    """The complete, canonical name of an architecture, and those of `sizes.fields` that are not part of it.

    Fields that modifiers can set become part of the name: `llama+canon` with the field canon_residual = false is
    `llama+canon:nores`. A default that is not what earlier versions had becomes a field; saved: of a run, which may be
    older. Names of models from outside do not change.
    """
    if arch.partition(":")[0] in LIBRARIES:
        host, canon = hf.split_canon(arch)
        return host + (f"+canon={canon}" if canon else ""), sizes.fields
    if not _is_decoder(arch):
        return arch, sizes.fields
    # Raises for an invalid combination before only half of it is used.
    with _in_one_line(arch):
        complete = config_of(arch, sizes, 0, saved=saved)
    moved = GROUPS["modifiers"]
    own_width = complete.head_dim * sizes.num_attention_heads != sizes.hidden_size
    if own_width and complete.rope_dim and ("rope_dim" in sizes.fields or "rope_dim" in arch):
        moved = moved | {"head_dim"}  # of which a name has a share in place of the number
    named = {key: value for key, value in sizes.fields.items() if key in moved}
    config = config_of(arch, replace(sizes, fields=named), 0)
    assert config.arch is not None  # `config_of` sets it
    rest = {key: value for key, value in sizes.fields.items() if key not in named}
    usual, before = (gated_width(sizes.hidden_size, rounded=rounded) for rounded in (True, False))
    if usual != before and complete.intermediate_size in (usual, before) and complete.mlp != "none":
        rest = {"intermediate_size": complete.intermediate_size, **rest}
    return config.arch, rest


def on_meta(arch: str, sizes: Sizes) -> LanguageModel:
    """The model without values."""
    with torch.device("meta"):
        return build(arch, sizes)


def _is_decoder(arch: str) -> bool:
    """Whether a name, not of a library's model, means our decoder, with a built-in mixer or one from outside."""
    if (reference := reference_of(arch)) is None:
        return True
    loaded = _load(reference)
    if isinstance(loaded, type) and issubclass(loaded, Mixer):
        _register(reference, loaded)
        return True
    return False


def _load(reference: str) -> Any:
    try:
        return user_code.load(reference).object
    except ValueError as error:
        raise InvalidSetting("arch", f"arch: {error}") from None


def _register(reference: str, mixer: type[Mixer]) -> None:
    """Register a mixer from outside under its reference, which is also its base in architecture names. A class that has
    a name, of another reference or of the package, keeps it: a subclass gets this one."""
    if (known := MIXERS.get(reference)) is None or mixer not in (known, known.__base__):
        about = next(iter(mixer.architectures.values()), Architecture("a mixer from outside"))
        if "name" in vars(mixer):
            same = ("__module__", "__qualname__", "__doc__", "tensor_parallel")
            mixer = type(mixer.__name__, (mixer,), {key: vars(mixer)[key] for key in same if key in vars(mixer)})
        mixer.architectures = {reference: about}
        register(reference)(mixer)
        if user_code.file_of(mixer) is not None:
            mixer.__reduce_ex__ = _reduce  # type: ignore[assignment]  # pickle cannot import its module


def _reduce(mixer: Mixer, _protocol: int) -> tuple[Any, ...]:
    cls = type(mixer)
    return _blank, (str(user_code.file_of(cls)), cls.__module__, cls.__qualname__, cls.name), mixer.__getstate__()


def _blank(file: str, module: str, qualname: str, reference: str) -> Mixer:
    """An instance without its state, of the class in a user's file, in any process. ValueError if it has changed."""
    if getattr(MIXERS.get(reference), "__module__", None) != module:
        _register(reference, attrgetter(qualname)(user_code.rerun(file, module)))
    return MIXERS[reference].__new__(MIXERS[reference])


@contextmanager
def _in_one_line(arch: str) -> Iterator[None]:
    """InvalidSetting for an exception of the user's mixer that `arch` names."""
    try:
        yield
    except Exception as error:
        if isinstance(error, InvalidSetting) or (reference := reference_of(arch)) is None:
            raise
        raise refusal(arch, "cannot be built", error, place_of(error, _load(reference))) from error
