"""The total norm of a gradient that may be spread over devices, and clipping by it."""

import math
from collections import defaultdict
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canonlm.core.distributed import World


def clip_grad_norm(model: nn.Module, max_norm: float, world: World) -> Tensor:
    """Clip gradients to a total norm of `max_norm`; returns the norm before clipping, a scalar on the device."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if world.mesh is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    # Squares are summed here, then over all devices in one message; torch's own function sends several per parameter.
    local_gradients: defaultdict[int, list[Tensor]] = defaultdict(list)  # by the number of devices that hold the same
    for gradient in (cast(DTensor, p.grad) for p in parameters):
        layout = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        parts = math.prod(size for size, placement in layout if not placement.is_replicate())
        local_gradients[world.size // parts].append(gradient.to_local())
    shares = [nn.utils.get_total_norm(part).double().square() / copies for copies, part in local_gradients.items()]
    dist.all_reduce(square := torch.stack(shares).sum())
    norm = square.sqrt().to(parameters[0].dtype)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
