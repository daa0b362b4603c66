"""Canon layers in a decoder that has none: `canonize(model, "ABCD")`.

    model = AutoModelForCausalLM.from_pretrained(…)
    canonlm.canonize(model, "ABCD")          # the same model, the same outputs; its Canon layers start as the identity
    model.save_pretrained(…)                 # loads again by AutoModelForCausalLM once canonlm is imported
    canonlm.decanonize(model)

The model is still a model of transformers: it trains, generates and saves as before.
"""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from canonlm.canon import sites as site_grammar
from canonlm.canon.sites import Variant
from canonlm.canonize.canonized_model import CanonizedModel, canonized_class
from canonlm.canonize.derived import plain_class
from canonlm.canonize.install import install, remove
from canonlm.canonize.placement import Place, place
from canonlm.core.errors import expected

INITS = ("zero", "uniform")

Host = TypeVar("Host", bound=PreTrainedModel)


def canonize(model: Host, sites: str, *, init: str = "zero") -> Host:
    """Put Canon layers into a causal decoder of transformers, in place; returns it.

    sites: as in `canonlm.canon.sites`: "ABCD", "KVOM:scaled". init: the start of layers whose variant does not set
    one: "zero", the identity, so that outputs stay the same, but for :scaled, :avg, :offset, :frozen and :nores:silu;
    "uniform", random taps as in the paper.

    The model's name, which tools such as PEFT open again, becomes NAME+canon=SITES: no tool opens the host instead.

    InvalidSetting (a ValueError) if it is not such a model, already has Canon layers, or cannot have these sites.
    """
    places = describe(model, sites, init=init)
    text = site_grammar.write(_variants(sites, init))  # with the start of layers that start as the identity
    install(model, places)
    host: Any = type(model)
    model.__class__ = canonized_class(host, text)
    _rename(model, f"{model.name_or_path}+canon={text}" if model.name_or_path else "")
    return model


def describe(model: PreTrainedModel, sites: str, *, init: str = "zero") -> list[Place]:
    """The Canon layers that `canonize` would add, one `Place` each: `.block`, `.module` and `.side` say where,
    `.channels` how many, `.name` is the layer's name in its block. The model may be on the meta device."""
    if not isinstance(model, PreTrainedModel):
        of_peft = any(base.__name__ == "PeftModel" for base in type(model).__mro__)
        hint = "a model of transformers" + " (canonize it before PEFT wraps it)" * of_peft
        raise expected("model", hint, type(model).__name__)
    if isinstance(model, CanonizedModel):
        raise expected("model", "one without Canon layers (decanonize removes them)", type(model).__name__)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise expected("model", "one that is not sharded over devices yet", type(model).__name__)
    return place(model, _variants(sites, init), sites)


def decanonize(model: Host) -> Host:
    """Remove all Canon layers, in place; returns the host. InvalidSetting if it has none."""
    if not isinstance(model, CanonizedModel):
        raise expected("model", "one that canonlm.canonize was called on", type(model).__name__)
    canonized: Any = model
    ending = f"+canon={canonized.canon_sites}"
    remove(model)
    canonized.__class__ = plain_class(type(model))
    # The folder that a canonized model was loaded from does not hold the host.
    _rename(model, model.name_or_path.removesuffix(ending) if model.name_or_path.endswith(ending) else "")
    return model


def _rename(model: PreTrainedModel, name: str) -> None:
    model.name_or_path = model.config.name_or_path = name


def _variants(sites: str, init: str) -> dict[str, Variant]:
    if init not in INITS:
        raise expected("init", " or ".join(f'"{name}"' for name in INITS), init)
    parsed = site_grammar.parse(sites)
    if not parsed:
        raise expected("sites", 'letters such as "ABCD"', sites)
    return {letter: _starting(variant) for letter, variant in parsed.items()} if init == "zero" else parsed


def _starting(variant: Variant) -> Variant:
    """The variant, starting as the identity if it can."""
    if variant.start != "uniform" or variant.frozen or variant.form not in ("conv", "dynamic"):
        return variant
    if variant.residual:
        return replace(variant, start="zero")
    return variant if variant.activation else replace(variant, start="id")


class _Callable(ModuleType):
    """A package that is called as its function: `canonlm.canonize(model, "ABCD")` would otherwise be this package
    where one of its modules has been imported, and the function elsewhere."""

    __call__ = staticmethod(canonize)


sys.modules[__name__].__class__ = _Callable
