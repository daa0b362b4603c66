"""Creates the Canon layers of a host and binds them to its parts; removes them again."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from canonlm.canon.sites import SITES
from canonlm.canon.variants import make_canon
from canonlm.canonize import canon_cache
from canonlm.canonize.fused_mlp import GatedSite
from canonlm.canonize.hooks import Hosted, InputHook, OutputHook, Site, unwrap_block, wrap_block
from canonlm.canonize.placement import Place
from canonlm.core.errors import expected


def install(model: PreTrainedModel, places: list[Place]) -> None:
    """Create the layers, on the devices of the blocks, and bind them."""
    canon_cache.watch_caches()
    host = Hosted(_decoder(model, places[0].block))
    paths = list(dict.fromkeys(one.block for one in places))
    for index, path in enumerate(paths):
        wrap_block(model.get_submodule(path), host, index)
    gates: dict[tuple[str, str], str] = {}
    for one in places:
        block = model.get_submodule(one.block)
        device, dtype = _device(block), _dtype(block, model)
        canon = make_canon(
            one.variant, one.channels, head_dim=one.head_dim, input_size=one.input_size, device=device, dtype=dtype
        )
        if canon.frozen:
            canon.requires_grad_(False)
        block.add_module(one.name, canon)
        ends: Any = block.canon_ends
        bound: Any = block.canon_bound
        mlp, _, projection = one.module.rpartition(".")
        in_mlp = SITES[one.letters[0]].part == "mlp" and SITES[one.letters[0]].side == "inside"
        if not one.module:
            ends[one.side].append(one.name)
        elif in_mlp and projection == "gate_proj":
            gates[one.block, mlp] = one.name  # bound together with that of up_proj, which comes next
        elif in_mlp and (one.block, mlp) in gates:
            bound.append(GatedSite(block, mlp, (gates[one.block, mlp], one.name)))
        else:
            hook: Any = InputHook(block, one.name)
            if one.side == "output":
                hook = OutputHook(block, one.name, one.part, one.variant.form == "dynamic")
            bound.append(Site(block, one.module, hook))
    model.canon_host = host  # type: ignore[assignment]


def remove(model: PreTrainedModel) -> None:
    host: Any = model.canon_host
    for handle in host.handles:
        handle.remove()
    for block in [part for part in model.modules() if "canon_index" in vars(part)]:
        unwrap_block(block)
    del model.canon_host


def _decoder(model: PreTrainedModel, block: str) -> nn.Module:
    """The innermost module around the blocks that takes `input_ids`: padding and documents are known there."""
    parts = block.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        if "input_ids" in inspect.signature(module.forward).parameters:
            return module
    raise expected("model", "a model that takes input_ids", type(model).__name__)


def _device(block: nn.Module) -> torch.device:
    hooks = (getattr(part, "_hf_hook", None) for part in block.modules())  # of accelerate: weights may be elsewhere
    places = [getattr(hook, "execution_device", None) for hook in hooks]
    where = next((place for place in places if place is not None), None)
    return next(block.parameters()).device if where is None else torch.device(where)


def _dtype(block: nn.Module, model: PreTrainedModel) -> torch.dtype:
    own = (parameter.dtype for parameter in block.parameters() if parameter.is_floating_point())
    return next((dtype for dtype in own if dtype.itemsize > 1), model.dtype)
