"""Puts Canon layers into a host: subclasses for its blocks, and hooks on the inputs and outputs of their parts.

A block's class is replaced by a subclass, so that the layout of the tokens is one of the block's arguments: a block
that is recomputed in the backward pass gets the same one. Parts keep their classes and get hooks.
"""

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.layer import kernel_size_of
from canonlm.canonize import canon_cache
from canonlm.canonize.derived import Derived, change_class, derived, plain_class
from canonlm.canonize.fused_projections import Channels
from canonlm.canonize.token_layout import HostLayout, layout_of
from canonlm.core.errors import InvalidSetting, expected

_THREAD = threading.local()
"""`call`: the innermost running call in this thread. Nothing about a call is kept on a module: calls in other threads,
nested calls and recomputed blocks use the same modules."""
_THREAD.call = None


class Call:
    """A running forward: of a decoder (owner: its `Hosted`), or of a block (owner: the block), with its cache and the
    beginning of its keys in it. From `begin` to `end`, it is the innermost call of its thread."""

    def __init__(self, owner: Any, layout: HostLayout | None = None, cache: Cache | None = None, key: str = "") -> None:
        self.owner, self.layout, self.cache, self.key = owner, layout, cache, key
        self.outer: Call | None = None

    def begin(self) -> None:
        self.outer = getattr(_THREAD, "call", None)
        _THREAD.call = self

    def end(self) -> None:
        _THREAD.call = self.outer

    def key_of(self, name: str, canon: Any) -> str:
        """The key of a Canon layer's state in the cache."""
        return f"{self.key}.{name}:{kernel_size_of(canon)}"


def running(owner: Any) -> Call | None:
    """The innermost running call of a `Hosted` or a block in this thread."""
    call: Call | None = getattr(_THREAD, "call", None)
    while call is not None and call.owner is not owner:
        call = call.outer
    return call


class Hosted:
    """A canonized model's decoder, and the hooks on it."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: the module that takes `input_ids`."""
        self.decoder, self.names = decoder, tuple(inspect.signature(decoder.forward).parameters)
        self.handles = [
            decoder.register_forward_pre_hook(self.begin, with_kwargs=True),
            decoder.register_forward_hook(self.end, with_kwargs=True, always_call=True),
        ]

    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the decoder's forward."""
        call = Call(self)
        call.begin()
        call.layout = layout_of(decoder, {**dict(zip(self.names, args, strict=False)), **kwargs})  # type: ignore[arg-type]

    def end(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """After it, also if it has raised an error."""
        if (call := running(self)) is not None:
            call.end()
        if not torch.compiler.is_compiling():
            canon_cache.settle(next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None))

    def layout_for(self, x: Any) -> HostLayout:
        """The layout of the running forward. A block that is recomputed after it, from outside, is recognised by the
        memory of its input `x`, which stays the same if `x` is detached."""
        call = running(self)
        if call is not None and call.layout is not None:
            if isinstance(x, Tensor) and not torch.compiler.is_compiling():
                _remember(x, call.layout)
            return call.layout
        what = "a call of the whole model, which reads padding and documents, not of a block alone"
        if torch._C._current_graph_task_id() != -1:  # in a backward pass
            if isinstance(layout := _layouts(x).get(_place(x)), HostLayout):
                return layout
            what = "to recompute a block from the tensor that it read, which one forward only has used"
        raise expected("forward", what, type(self.decoder).__name__)


def _remember(x: Tensor, layout: HostLayout) -> None:
    """Note the layout of a block's input with its memory, which is freed with it."""
    layouts, place = _layouts(x), _place(x)
    seen = layouts.get(place, layout)
    layouts[place] = layout if seen is layout or (seen is not None and seen.equals(layout)) else None


def _layouts(x: Any) -> dict[Any, HostLayout | None]:
    """HostLayouts by place in the memory of `x`; None: of several forwards."""
    try:
        return x.untyped_storage().__dict__.setdefault("canon_layouts", {})
    except (AttributeError, RuntimeError, NotImplementedError):  # a kind of tensor without memory of its own
        return {}


def _place(x: Tensor) -> tuple[Any, torch.Size]:
    return x.storage_offset(), x.shape


class CanonBlock(Derived):
    """A mixin, placed before the class of a block."""

    canon_host: Hosted
    canon_index: int
    canon_bound: "list[Site]"
    canon_ends: dict[str, list[str]]  # names of the layers on the block's own "input" and "output"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("canon_layout") is None:  # plans repeat a call with the arguments that they have noted
            kwargs["canon_layout"] = self.canon_host.layout_for(args[0] if args else kwargs.get("hidden_states"))
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, canon_layout: HostLayout | None = None, **kwargs: Any) -> Any:
        layout, key = canon_layout, ""
        cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, Cache)), None)
        if cache is not None and layout is not None:
            canon_cache.adopt(cache)
            visit = layout.visits.get(self.canon_index, 0)
            layout.visits[self.canon_index] = visit + 1
            key = f"{self.canon_index}" if visit == 0 else f"{self.canon_index}/{visit}"
        for site in self.canon_bound:
            site.check()
        call = Call(self, layout, cache, key)
        call.begin()
        try:
            block: Any = self
            for name in self.canon_ends["input"]:
                args, kwargs = InputHook(block, name)(block, args, kwargs)
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
            for name in self.canon_ends["output"]:
                output = OutputHook(block, name)(block, args, output)
            return output
        finally:
            call.end()


def run(block: nn.Module, name: str, x: Tensor, mixer_input: Tensor | None = None) -> Tensor:
    """The Canon layer of that name on `[B, T, C]`, or on all tokens in one list, `[B * T, C]`."""
    call = running(block)
    if call is None or (layout := call.layout) is None:
        innermost: Any = getattr(_THREAD, "call", None)
        if getattr(innermost and innermost.owner, "_is_replica", False):  # while its hooks know the original alone
            raise InvalidSetting("forward", "forward: nn.DataParallel is not supported; use torchrun")
        raise InvalidSetting("forward", f"forward: {name} runs outside its block, where padding is not known")
    shape = x.shape
    if x.ndim == 2 and shape[0] == layout.batch * layout.time:
        x = x.unflatten(0, (layout.batch, layout.time))
    if x.ndim != 3 or x.shape[1] != layout.time or x.shape[0] != layout.batch:
        what = f"the input [{layout.batch}, {layout.time}, channels] of {name}"
        raise InvalidSetting("forward", f"forward: expected {what}, got {list(shape)}")
    canon = getattr(block, name)  # by name: training adapters may have replaced the module
    options: dict[str, Any] = {"layout": layout.tokens}
    if mixer_input is not None:
        options["mixer_input"] = mixer_input
    if (cache := call.cache) is None:
        y = canon(x, **options)
    else:
        key = call.key_of(name, canon)
        past = canon_cache.read(cache, key, kernel_size_of(canon))
        if past is not None and past.device != x.device:
            past = past.to(x.device)
        y, state = canon(x, state=past, return_state=True, **options)
        canon_cache.write(cache, key, state, x, layout.tokens.attention_mask)
    return y if y.shape == shape else y.reshape(shape)


class InputHook:
    """Before a module's forward: a Canon layer on its input."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block, self.name = block, name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with the hidden states replaced, everywhere."""
        x = next((value for value in args if isinstance(value, Tensor)), None)
        if x is None:
            x = kwargs.get("hidden_states")
        if x is None:
            x = next(value for value in kwargs.values() if isinstance(value, Tensor) and value.is_floating_point())
        y = run(self.block, self.name, x)
        return tuple(y if value is x else value for value in args), {k: y if v is x else v for k, v in kwargs.items()}


class OutputHook:
    """After a module's forward: a Canon layer on its output, or on some channels of it."""

    def __init__(
        self, block: nn.Module, name: str, channels: Channels | None = None, takes_input: bool = False
    ) -> None:
        self.block, self.name, self.channels, self.takes_input = block, name, channels, takes_input

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        source = args[0] if self.takes_input else None
        if (channels := self.channels) is None:
            y = run(self.block, self.name, x, source)
        else:
            parts = x.unflatten(-1, (channels.groups, -1))
            selected = run(self.block, self.name, parts[..., channels.first : channels.end].flatten(-2), source)
            selected = selected.unflatten(-1, (channels.groups, -1))
            y = torch.cat([parts[..., : channels.first], selected, parts[..., channels.end :]], dim=-1).flatten(-2)
        return (y, *output[1:]) if isinstance(output, tuple) else y


class Site:
    """A hook on the module at a path in a block, also after the module is replaced, as training adapters, quantisation
    and some hosts do."""

    def __init__(self, block: nn.Module, path: str, hook: InputHook | OutputHook) -> None:
        self.block, self.path, self.hook = block, path.split("."), hook
        self.bound: nn.Module | None = None
        self.bind()

    def check(self) -> None:
        if part_at(self.block, self.path) is not self.bound:
            self.bind()

    @torch.compiler.disable
    def bind(self) -> None:
        self.remove()
        self.bound = module = part_at(self.block, self.path)
        if isinstance(self.hook, InputHook):
            module.register_forward_pre_hook(self.hook, with_kwargs=True)
        else:
            module.register_forward_hook(self.hook)

    def remove(self) -> None:
        """Remove the hook, also from a module that has replaced the bound one and brought its hooks along."""
        for module in {self.bound, dict(self.block.named_modules()).get(".".join(self.path))} - {None}:
            part: Any = module
            for hooks, options in (
                (part._forward_pre_hooks, part._forward_pre_hooks_with_kwargs),
                (part._forward_hooks, part._forward_hooks_with_kwargs),
            ):
                for key in [key for key, hook in hooks.items() if hook is self.hook]:
                    del hooks[key]
                    options.pop(key, None)


def part_at(block: nn.Module, path: Sequence[str]) -> nn.Module:
    module: Any = block
    for name in path:
        module = module._modules.get(name)
        if module is None:
            what = f"{'.'.join(path)} in {type(block).__name__}, which has a Canon layer"
            raise InvalidSetting("model", f"model: expected {what}; {name} was removed")
    return module


def wrap_block(block: nn.Module, host: Hosted, index: int) -> None:
    if "forward" in vars(block) and "_old_forward" not in vars(block):  # the latter is accelerate's, which calls ours
        what = "blocks whose forward nothing has replaced: canonize the model first"
        raise InvalidSetting("model", f"model: expected {what}, got a {type(block).__name__} with another forward")
    part: Any = block
    change_class(part, derived(CanonBlock, part.__class__))
    part.canon_host, part.canon_index, part.canon_bound = host, index, []
    part.canon_ends = {"input": [], "output": []}


def unwrap_block(block: nn.Module) -> None:
    for name in [name for name in block._modules if name.startswith("canon_")]:
        delattr(block, name)
    change_class(block, plain_class(type(block)))
    for site in block.canon_bound:  # type: ignore[union-attr]
        site.remove()
    for name in ("canon_host", "canon_index", "canon_bound", "canon_ends"):
        delattr(block, name)
