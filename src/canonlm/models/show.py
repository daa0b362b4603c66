"""`print(model)` with Canon layers where they act.

Modules are registered, and so optimized, in another order: parts first, their Canon layers last.
"""

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn


def shown(module: nn.Module, order: Iterable[str]) -> str:
    """The text of a module whose children come in the order of these names, and then the others."""
    other: Any = copy.copy(module)
    names = [name for name in order if name in module._modules]
    other._modules = {name: module._modules[name] for name in dict.fromkeys([*names, *module._modules])}
    return nn.Module.__repr__(other)


def by_projection(module: nn.Module) -> str:
    """The text of a module in which `q_norm` and `canonX_q` follow `q_proj`."""
    groups: dict[str, list[str]] = {}
    for name in module._modules:
        first, _, rest = name.partition("_")
        groups.setdefault(rest if first.startswith("canon") else first, []).append(name)
    return shown(module, (name for names in groups.values() for name in names))
