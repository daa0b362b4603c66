"""Canon-D in a host's gated MLP, if its forward is the usual one: down_proj(act_fn(gate_proj(x)) * up_proj(x)).

Hooks on the two projections could not join Canon, activation and product in one kernel. So the MLP's class is replaced
by a subclass with an equivalent forward.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from canonlm.canon.apply import canon_gated
from canonlm.canonize import canon_cache
from canonlm.canonize.derived import Derived, change_class, derived, plain_class
from canonlm.canonize.hooks import OutputHook, Site, part_at, run, running
from canonlm.ops.canon_conv import State

PROJECTIONS = ("gate_proj", "up_proj")
FORWARDS = (
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
    "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\nreturn down_proj",
)


class CanonGatedMlp(Derived):
    """A mixin, placed before the class of an MLP."""

    canon_site: "GatedSite"
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        [x] = (*args, *kwargs.values())
        return self.down_proj(self.canon_site.run(self.gate_proj(x), self.up_proj(x), self.act_fn))


class GatedSite:
    """Two Canon layers of a block, on both projections of its MLP: in the MLP's forward if possible, else as two sites.
    Has the methods of a `Site`."""

    def __init__(self, block: nn.Module, path: str, names: Sequence[str]) -> None:
        """path: of the MLP; names: of the Canon layers."""
        self.block, self.path, self.names = block, path.split("."), tuple(names)
        self.bound: nn.Module | None = None
        self.hooks: list[Site] = []
        self.bind()

    def check(self) -> None:
        mlp = part_at(self.block, self.path)
        replaced = isinstance(mlp, CanonGatedMlp) and "forward" in mlp.__dict__ and "_old_forward" not in mlp.__dict__
        if mlp is not self.bound or replaced:  # accelerate's own forward calls ours, _old_forward; others do not
            self.bind()
        for site in self.hooks:
            site.check()

    @torch.compiler.disable
    def bind(self) -> None:
        self.remove()
        mlp: Any = part_at(self.block, self.path)
        self.bound = mlp
        if is_usual(mlp):
            change_class(mlp, derived(CanonGatedMlp, mlp.__class__))
            mlp.canon_site = self
        else:
            paths = (".".join([*self.path, name]) for name in PROJECTIONS)
            self.hooks = [
                Site(self.block, path, OutputHook(self.block, name))
                for path, name in zip(paths, self.names, strict=True)
            ]

    def remove(self) -> None:
        for site in self.hooks:
            site.remove()
        self.hooks, mlp = [], self.bound
        if isinstance(mlp, CanonGatedMlp):
            part: Any = mlp
            del part.canon_site
            change_class(part, plain_class(type(part)))

    def run(self, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        """act(canon(gate)) * canon(up)"""
        call = running(self.block)
        canons = [getattr(self.block, name) for name in self.names]
        layout = None if call is None else call.layout
        if call is not None and layout is not None and gate.shape[:-1] == (layout.batch, layout.time):
            cache = call.cache
            keys = [call.key_of(name, canon) for name, canon in zip(self.names, canons, strict=True)]
            if cache is None or canon_cache.read(cache, keys[0], 1) is None:
                state = State(None, cache is not None)
                y, after = canon_gated(canons, act, gate, up, layout.tokens, state)
                if cache is not None and after is not None:
                    for key, x, own in zip(keys, (gate, up), after.split(gate.shape[-1], dim=1), strict=True):
                        canon_cache.write(cache, key, own, x, layout.tokens.attention_mask)
                return y
        gate, up = (run(self.block, name, x) for name, x in zip(self.names, (gate, up), strict=True))
        return act(gate) * up


def is_usual(mlp: nn.Module) -> bool:
    """Whether the module's forward is the usual one, and nothing has replaced it."""
    parts = (*PROJECTIONS, "down_proj", "act_fn")
    return "forward" not in vars(mlp) and all(name in mlp._modules for name in parts) and _is_usual(type(mlp).forward)


@functools.cache
def _is_usual(forward: Any) -> bool:
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return False
    names = [argument.arg for argument in function.args.args]
    body = "\n".join(map(ast.unparse, function.body))
    return len(names) == 2 and re.sub(rf"\b{names[1]}\b", "x", body) in FORWARDS
