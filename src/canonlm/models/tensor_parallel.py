"""Tensor parallelism: the devices of a group share every layer; each has some of the heads and of the MLP's channels.

Projections that make channels (q, k, v, gate, up) are split by outputs, those that read them (o, down) by inputs, and
the results are summed over the group (Megatron-LM, arXiv 1909.08053, Section 3). Canon is depthwise: B and D are split
with their channels; A, C and the norms are complete on every device, as is the residual stream. Embedding and head are
split by tokens of the vocabulary.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from canonlm.canon.layer import CanonLayer, on_this_device
from canonlm.core.distributed import sum_over
from canonlm.core.errors import expected
from canonlm.models.config import CanonLMConfig
from canonlm.models.mixers.base import MIXERS, Mixer, SumOfGradients
from canonlm.models.mixers.recurrent import LowRank
from canonlm.models.modeling import CanonLMForCausalLM
from canonlm.models.norm import RMSNorm

MLP = {"gate_proj": "columns", "up_proj": "columns", "down_proj": "rows"}
"""How each part of an MLP is split; for the parts of a mixer, see `Mixer.tensor_parallel`.

columns: by outputs (of a map of low rank, the second factor); rows: by inputs, results are summed over the group;
channels: with the channels that are split elsewhere, as are Canon layers inside mixers and MLPs; heads: the same, of
parameters whose second dimension is heads; norm: the same, but its mean is over the entire group; head_norm: a norm of
each head, whose weight all heads share; complete: the same on every device, with the same gradient (`Mixer.shared`)."""


def check(config: CanonLMConfig, tp: int) -> None:
    """InvalidSetting if a model cannot be split into `tp` parts."""
    if tp == 1:
        return
    for mixer in dict.fromkeys(config.mixers):
        if not vars(MIXERS[mixer]).get("tensor_parallel"):  # not inherited: a subclass may have further parts
            raise expected("parallel.tp", f"1 with {mixer}: its layers are not split by heads", tp)
    if config.mlp == "moe":
        raise expected("parallel.tp", "1 with experts", tp)
    if config.attention_residuals:
        raise expected("parallel.tp", "1 with attention residuals", tp)
    if config.alibi is not None or config.rope_heads != config.num_attention_heads:
        raise expected("parallel.tp", "1 where heads differ (alibi, rope_heads)", tp)
    if config.attention_dropout:
        raise expected("parallel.tp", "1 with attention_dropout", tp)
    sizes: dict[str, int] = {}
    for mixer in config.mixers:
        options = config.mixer_options.get(mixer, {})
        for key in MIXERS[mixer].tensor_parallel_divides:
            size = options.get(key) or getattr(config, key)
            if (key, size) != ("n_groups", 1):  # which is for all heads
                sizes[f"{mixer}'s {key}" if key in options else key] = size
    sizes |= {key: getattr(config, key) for key in ("intermediate_size", "vocab_size")}
    for key, size in sizes.items():
        if size % tp:
            raise expected("parallel.tp", f"a divisor of {key} = {size}", tp)


def split_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split a decoder layer that is complete, and the same, on every device of `mesh`; without communication."""
    replicated = Replicate()
    for part in layer.children():
        if isinstance(part, CanonLayer | RMSNorm):
            parallelize_module(part, mesh, OnThisDevice(replicated), src_data_rank=None)
            continue
        _split(part, part.tensor_parallel if isinstance(part, Mixer) else MLP, mesh)
        if isinstance(part, Mixer):
            part.group = mesh.get_group()
        # Once for all projections that read it, so that its gradients are summed over the group only once.
        arguments = (replicated, *[None] * (4 if isinstance(part, Mixer) else 2))
        reads = PrepareModuleInput(input_layouts=arguments, desired_input_layouts=arguments)
        parallelize_module(part, mesh, reads, src_data_rank=None)


def _split(module: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> None:
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "columns": ColwiseParallel,
        "rows": RowwiseParallel,
        "channels": lambda: OnThisDevice(Shard(0)),
        "complete": lambda: OnThisDevice(Replicate()),
    }
    norms: dict[str, Callable[[RMSNorm, DeviceMesh], RMSNorm]] = {"norm": ShardedRMSNorm, "head_norm": HeadRMSNorm}
    placements: dict[str, Placement] = {"channels": Shard(0), "heads": Shard(1), "complete": Replicate()}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name in plan:
            module.register_parameter(name, spread(parameter, mesh, placements[plan[name]]))
    for name, part in list(module.named_children()):
        if (how := plan.get(name, "channels" if isinstance(part, CanonLayer) else None)) in norms:
            module.add_module(name, norms[how](cast(RMSNorm, part), mesh))
        elif isinstance(part, LowRank):
            _split(part, {"0": "complete", "1": "columns"}, mesh)
        elif how is not None:
            parallelize_module(part, mesh, styles[how](), src_data_rank=None)


def split_ends(model: CanonLMForCausalLM, mesh: DeviceMesh) -> None:
    """Split the embedding and the head."""
    complete = [name for name, part in model.model.named_children() if isinstance(part, CanonLayer | RMSNorm)]
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"model.{name}": OnThisDevice(Replicate()) for name in complete},
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    # The sum over devices may still be under way, in an asynchronous tensor, for which compiled blocks return a wrong
    # gradient to the embedding. A copy is complete.
    model.get_submodule("model.embed_tokens").register_forward_hook(lambda module, inputs, h: h.clone())


class OnThisDevice(ParallelStyle):
    """Parameters split over the devices, or complete on each; the module computes with this device's part
    (`on_this_device`), on this device's channels. A linear layer, always complete, returns a plain tensor."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, spread(parameter, device_mesh, self.placement))
        if isinstance(module, CanonLayer) and isinstance(self.placement, Shard):
            module.hidden_size //= device_mesh.size()
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: _replicated(inputs[0], device_mesh))
            module.register_forward_hook(lambda module, inputs, y: y.to_local())
        return module


def _replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def spread(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A DTensor of a tensor that every device of `mesh` has in full."""
    spread = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


class ShardedRMSNorm(RMSNorm):
    """RMSNorm of vectors whose channels are spread over a group: the mean of squares is over all of them."""

    def __init__(self, norm: RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__(len(norm.weight), norm.eps)
        self.weight, self.group = spread(norm.weight, mesh, Shard(0)), mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)
        wide, weight = x.to(compute), on_this_device(self.weight).to(compute)
        mean = _SumOverGroup.apply(wide.square().sum(-1, keepdim=True), self.group) / self.weight.shape[0]
        return (wide * torch.rsqrt(mean + self.eps) * weight).to(x.dtype)


class HeadRMSNorm(RMSNorm):
    """RMSNorm of each head, with one weight for those of all devices."""

    def __init__(self, norm: RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__(len(norm.weight), norm.eps)
        self.weight, self.group = spread(norm.weight, mesh, Replicate()), mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        return self.of_weight(x, SumOfGradients.apply(on_this_device(self.weight), self.group))


class _SumOverGroup(torch.autograd.Function):
    """The sum over a group. Every device's further results depend on it, so its gradient is also summed."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_over(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return _SumOverGroup.apply(dy, ctx.group), None  # so that it can be differentiated again
