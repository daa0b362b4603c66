"""Initial weights as a function of (seed, parameter name): the same on any machine, device or world size.

They are drawn on the CPU in float32 and written with transformers' own functions, which leave loaded weights alone.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization

from canonlm.canon.layer import CanonLayer
from canonlm.models.norm import RMSNorm
from canonlm.models.settings import Config

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

Fill = Callable[[Tensor, torch.Generator], object]
"""Fills a float32 tensor in place from a generator. Those that a module keeps (`start_with`) can be pickled."""


def canonical_name(name: str) -> str:
    """The name of a parameter in the bare decoder, without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("model.")


def generator_for(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{canonical_name(name)}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def init_parameters(module: nn.Module, module_name: str, config: Config) -> None:
    """Initialise the parameters that `module` itself holds (not its children's)."""
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            continue
        name = canonical_name(f"{module_name}.{leaf}" if module_name else leaf)
        fill = getattr(module, "initial", {}).get(leaf) or usual(module, name, config)
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        fill(values, generator_for(config.init_seed, name))
        initialization.copy_(parameter, values)


def usual(module: nn.Module, name: str, config: Config) -> Fill:
    """The usual initial values of a parameter, by the class of its module and `config.initializer`."""
    if isinstance(module, CanonLayer):
        return partial(module.fill, name.rpartition(".")[2])
    if isinstance(module, RMSNorm):
        return ones
    if name.endswith("bias"):
        return zeros
    embeds = isinstance(module, nn.Embedding)
    if config.initializer == "truncated":
        return _truncated(name, config, in_layer=not embeds and not name.startswith("lm_head"))
    if config.initializer == "fan_in" and not embeds:
        return lambda x, generator: x.uniform_(-(x.shape[-1] ** -0.5), x.shape[-1] ** -0.5, generator=generator)
    return normal(config.initializer_range)


def _truncated(name: str, config: Config, in_layer: bool) -> Fill:
    """As in Meta lingua: projections into the residual stream (the mixer's and the MLP's last) are scaled down by
    depth."""
    std = config.hidden_size**-0.5
    if not in_layer:
        return truncated_normal(std, 3 * std)
    from_mlp = ".mlp." in name and "down_proj" in name
    if from_mlp:
        std = config.intermediate_size**-0.5
    if config.init_base_std is not None:
        std = config.init_base_std
    if not from_mlp and not name.endswith(("o_proj.weight", "out_proj.weight")):
        return truncated_normal(std, 3 * std)
    depth = int(name.split(".")[1])
    divisor = {
        "disabled": 1.0,
        "current_depth": math.sqrt(2 * (depth + 1)),
        "global_depth": math.sqrt(2 * (config.num_hidden_layers + 1)),
        "dim_ratio": config.hidden_size / 4096,
    }[config.init_std_factor]
    # As in lingua, the mixer's is truncated where it would be without the divisor.
    return truncated_normal(std / divisor, 3 * (std / divisor if from_mlp else std))


def start_with(module: nn.Module, **fills: Fill) -> None:
    """Replace the usual initial values of parameters of `module`, by their names in it."""
    module.initial = {**getattr(module, "initial", {}), **fills}  # type: ignore[assignment]


def add_parameters(module: nn.Module, **starts: tuple[Any, ...]) -> None:
    """Give `module` parameters, by name: (initial values, size, …). One that it already has is replaced."""
    for name, (_, *shape) in starts.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape)))
    start_with(module, **{name: fill for name, (fill, *_) in starts.items()})


def ones(x: Tensor, generator: torch.Generator) -> None:
    x.fill_(1)


def zeros(x: Tensor, generator: torch.Generator) -> None:
    x.zero_()


def constant(value: float) -> Fill:
    return partial(_constant, value)


def _constant(value: float, x: Tensor, generator: torch.Generator) -> None:
    x.fill_(value)


def normal(std: float) -> Fill:
    return partial(_normal, std)


def _normal(std: float, x: Tensor, generator: torch.Generator) -> None:
    x.normal_(0.0, std, generator=generator)


def truncated_normal(std: float, cut: float) -> Fill:
    return lambda x, generator: nn.init.trunc_normal_(x, 0.0, std, -cut, cut, generator=generator)


def log_of_uniform(low: float, high: float) -> Fill:
    return partial(_log_of_uniform, low, high)


def _log_of_uniform(low: float, high: float, x: Tensor, generator: torch.Generator) -> None:
    x.uniform_(low, high, generator=generator).clamp_(min=torch.finfo(x.dtype).tiny).log_()


def bias_of_time_steps(x: Tensor, generator: torch.Generator) -> None:
    """softplus of the result, a time step of Mamba2 and Gated DeltaNet, is log-uniform in [0.001, 0.1]."""
    steps = x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    x.copy_(steps + torch.log(-torch.expm1(-steps)))
