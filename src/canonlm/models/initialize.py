"""Initial weights as a function of (seed, parameter name): the same on any machine, device or world size.

Drawn on the CPU in float32 and written with transformers' own functions, which leave loaded weights alone.
"""

import hashlib

import torch
from torch import Tensor, nn
from transformers import initialization

from canonlm.canon import CanonLayer
from canonlm.models.config import CanonLMConfig
from canonlm.models.norm import RMSNorm

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical_name(name: str) -> str:
    """The name of a parameter in the bare decoder, whatever wraps it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("model.")


def generator_for(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{canonical_name(name)}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def init_parameters(module: nn.Module, module_name: str, config: CanonLMConfig) -> None:
    """Initialise the parameters that `module` itself holds (not its children's)."""
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            continue
        name = f"{module_name}.{leaf}" if module_name else leaf
        if isinstance(module, CanonLayer):
            _draw(parameter, name, config, lambda x, g, b=module.init_bound: x.uniform_(-b, b, generator=g))
        elif isinstance(module, RMSNorm):
            initialization.ones_(parameter)
        elif leaf == "bias":
            initialization.zeros_(parameter)
        else:
            _draw(parameter, name, config, lambda x, g: x.normal_(0.0, config.initializer_range, generator=g))


def _draw(parameter: Tensor, name: str, config: CanonLMConfig, fill) -> None:
    values = torch.empty(parameter.shape, dtype=torch.float32)
    fill(values, generator_for(config.init_seed, name))
    initialization.copy_(parameter, values)
