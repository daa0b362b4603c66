"""Bytes of state: what a model keeps of one sequence to continue it, counted in the cache that its forward returns.

Attention keeps keys and values for every token, or for a window of them; recurrences and convolutions keep states of a
fixed size. The count is of the real cache, on the device of the model (on the meta device: of its shapes), so it holds
for a model from outside, too.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from canonlm.core.borrowed import keeping_modes
from canonlm.core.cache_name import CACHE_NAMES

MAX_DEPTH = 8  # of objects in a cache


class State(NamedTuple):
    """Bytes of state of one sequence after `tokens` tokens, in the dtype of the weights.

    per_token: how many more with one more token. The rest is `fixed`: states of recurrences and convolutions, and
    windows of attention that are full.
    """

    tokens: int
    total: int
    per_token: int

    @property
    def fixed(self) -> int:
        return self.total - self.per_token * self.tokens


def state_of(bytes_after: Callable[[int], int | None], num_tokens: int) -> State | None:
    """The state by its bytes after `num_tokens` tokens and after one less (of one token: one more); None if there are
    none."""
    near = num_tokens - 1 or 2
    total, other = bytes_after(num_tokens), bytes_after(near)
    if total is None or other is None:
        return None
    more = (total - other) // (num_tokens - near)
    return State(num_tokens, total, max(0, more))  # it is negative where a cache has just compressed its tokens


@torch.no_grad()
def bytes_after(module: PreTrainedModel, num_tokens: int) -> int | None:
    """The bytes of all different floating-point tensors in the cache of one sequence; None if the model returns no
    cache. Other tensors, such as counters, are not state."""
    device = next(module.parameters()).device
    # torch has no grouped products of float32 on the meta device.
    experts: dict[str, Any] = getattr(module, "get_experts_implementation", dict)() if device.type == "meta" else {}
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    try:
        if experts:
            module.set_experts_implementation({key: "batched_mm" for key, kind in experts.items() if kind is not None})
        with keeping_modes(module):
            output = module.eval()(input_ids=ids, use_cache=True)
    finally:
        if experts:
            module.set_experts_implementation(experts)
    cache = next((each for name in CACHE_NAMES if (each := getattr(output, name, None)) is not None), None)
    tensors = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x for x in _tensors(cache, set(), 0)}
    return None if cache is None else sum(x.nbytes for x in tensors.values() if x.is_floating_point())


def _tensors(part: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif id(part) not in seen and depth < MAX_DEPTH and not isinstance(part, nn.Module | PreTrainedConfig):
        seen.add(id(part))
        inside = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else None
        for each in getattr(part, "__dict__", {}).values() if inside is None else inside:
            yield from _tensors(each, seen, depth + 1)
