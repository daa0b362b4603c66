"""Canon states in a host's own cache: operations that move the cache's keys and values also move them.

A cache is adopted by changing its class to a subclass of the same name. Nothing in it is replaced, and its layers,
which some hosts inspect, do not change.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache

from canonlm.canonize.derived import Derived, derived
from canonlm.core.cache_name import CACHE
from canonlm.core.errors import unsupported


def _last_real(state: Tensor, kernel: int) -> Tensor:
    """The last columns of a recorded past without those of padding; zeros where a row has fewer."""
    real = ~state[:, :1].isnan()
    order = real.int().argsort(dim=-1, stable=True)[..., -kernel:]
    return state.gather(2, order.expand(-1, state.shape[1], -1)).masked_fill(~real.gather(2, order), 0)


class CanonCache(Derived):
    """A mixin, placed before the class of a cache. A state is `[B, C, K]`: the last K inputs of a Canon layer, time
    last; longer while the past is recorded.

    canon_packed: in a static cache, the states of a block side by side, by the block's key; canon_parts: the place of
    each state, (block, first channel, end). A compiled step checks every tensor that it gets, so a few large ones are
    faster than many small ones.
    """

    canon_states: dict[str, Tensor]
    canon_packed: dict[str, Tensor]
    canon_parts: dict[str, tuple[str, int, int]]
    canon_records: bool
    canon_static: bool

    def pack_canon(self) -> None:
        """After the first forward of a static cache: from then on, states do not move in memory."""
        blocks: dict[str, list[str]] = {}
        for key, state in self.canon_states.items():
            block = f"{key.partition('.')[0]} {state.shape[-1]} {state.dtype} {state.device}"
            blocks.setdefault(block, []).append(key)
        for block, keys in blocks.items():
            states, first = [self.canon_states.pop(key) for key in keys], 0
            self.canon_packed[block] = torch.cat(states, dim=1)
            for key, state in zip(keys, states, strict=True):
                self.canon_parts[key] = block, first, first + state.shape[1]
                first += state.shape[1]

    def unpack_canon(self) -> None:
        """Before rows move: make every state a separate tensor again."""
        for key, (block, first, end) in self.canon_parts.items():
            self.canon_states[key] = self.canon_packed[block][:, first:end].clone()
        self.canon_packed.clear()
        self.canon_parts.clear()

    def activate_past_recording(self) -> None:
        super().activate_past_recording()  # type: ignore[misc]
        self.unpack_canon()
        self.canon_records = True

    def crop(self, tokens_to_remove: int) -> None:
        removed = -tokens_to_remove
        if tokens_to_remove > 0:  # the older meaning: the number of tokens to keep
            removed = max(0, int(self.get_seq_length()) - tokens_to_remove)  # type: ignore[attr-defined]
        if removed and self.canon_states and not self.canon_records:
            raise unsupported(CACHE, "activate_past_recording() before reading tokens that crop() removes", self)
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if self.canon_records:
            for key, kernel in self.canon_kernels.items():
                state = self.canon_states[key]
                if state.shape[-1] - removed < kernel:
                    raise unsupported(
                        "tokens_to_remove", "tokens that were read since recording began", tokens_to_remove
                    )
                self.canon_states[key] = _last_real(state[..., : state.shape[-1] - removed], kernel)

    @property
    def canon_kernels(self) -> dict[str, int]:
        return {key: int(key.rpartition(":")[2]) for key in self.canon_states}

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        for packed in self.canon_packed.values():
            packed.zero_()
        for key, kernel in self.canon_kernels.items():
            state = self.canon_states[key]
            if self.canon_static:
                state.zero_()
            else:
                self.canon_states[key] = torch.zeros_like(state[..., :kernel])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.unpack_canon()
        for key, state in self.canon_states.items():
            self.canon_states[key] = state.index_select(0, beam_idx.to(state.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.unpack_canon()
        for key, state in self.canon_states.items():
            self.canon_states[key] = state.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.unpack_canon()
        for key, state in self.canon_states.items():
            self.canon_states[key] = state[indices, ...]


_MOVING = (
    "activate_past_recording",
    "crop",
    "reset",
    "reorder_cache",
    "batch_repeat_interleave",
    "batch_select_indices",
)


def watch_caches() -> None:
    """Patch the methods of `Cache` that move its rows or tokens, to adopt a cache that a compiled forward has made, and
    to mark one that records before a model sees it: the library marks only layers that can forget."""
    for name in _MOVING:
        plain = getattr(Cache, name)
        if not getattr(plain, "knows_canon", False):
            setattr(Cache, name, _watched(name, plain))


def _watched(name: str, plain: Any) -> Any:
    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "canon_states" in vars(self) and not hasattr(self, "unpack_canon"):
            adopt(self)
            return getattr(self, name)(*args, **kwargs)
        result = plain(self, *args, **kwargs)
        if name == "activate_past_recording":
            self.canon_records = True
        return result

    method.knows_canon = True  # type: ignore[attr-defined]
    return method


def adopt(cache: Any) -> None:
    """Make room for Canon states in a cache, unless it has been adopted already."""
    if isinstance(cache, CanonCache):
        return
    # Inside a graph a class cannot change: the states are kept, and the methods are added in the next call outside.
    if "canon_states" not in vars(cache):
        cache.canon_states, cache.canon_packed, cache.canon_parts = {}, {}, {}
        cache.canon_records = getattr(cache, "canon_records", False)
        cache.canon_static = isinstance(cache, StaticCache)
    if not torch.compiler.is_compiling():
        plain: Any = type(cache)
        cache.__class__ = derived(CanonCache, plain)


def holds_any(cache: Any) -> bool:
    return bool(cache.canon_states or cache.canon_parts)


def read(cache: Any, key: str, kernel: int) -> Tensor | None:
    if key in cache.canon_parts:
        block, first, end = cache.canon_parts[key]
        return cache.canon_packed[block][:, first:end]
    state = cache.canon_states.get(key)
    return state if state is None or not cache.canon_records else _last_real(state, kernel)


def write(cache: Any, key: str, state: Tensor, inputs_BTC: Tensor, real_BT: Tensor | None) -> None:
    """Store the state after these inputs. real_BT: False at padding."""
    if key in cache.canon_parts:
        block, first, end = cache.canon_parts[key]
        if not state.requires_grad:
            cache.canon_packed[block][:, first:end].copy_(state)
            return
        CanonCache.unpack_canon(cache)
    old = cache.canon_states.get(key)
    if cache.canon_records:
        # Tokens may be removed again (prompt lookup): every input is kept until `crop` shortens the state. Padding
        # has a column, too, of NaN: drafts may contain the padding token, which the library then masks.
        past = torch.zeros_like(state) if old is None else old
        new = inputs_BTC if real_BT is None else inputs_BTC.masked_fill(~real_BT[..., None], torch.nan)
        cache.canon_states[key] = torch.cat([past, new.transpose(1, 2)], dim=-1)
    elif cache.canon_static and old is not None and not state.requires_grad:
        old.copy_(state)  # in place: a CUDA graph reads it from the same address every time
    else:
        cache.canon_states[key] = state


def settle(cache: Cache | None) -> None:
    """After a forward pass: give the states of a static cache their final place in memory."""
    if not isinstance(cache, CanonCache) or not cache.canon_static or cache.canon_records:
        return
    if not any(state.requires_grad for state in cache.canon_states.values()):
        cache.pack_canon()
