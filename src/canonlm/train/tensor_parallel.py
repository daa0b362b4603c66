"""Tensor parallel: the devices of a group share every layer, each has some of the heads and of the MLP's channels.

What makes channels (q, k, v, gate, up) is cut by its outputs, what reads them (o, down) by its inputs, and the results
are summed over the group (Megatron-LM, arXiv 1909.08053, Section 3). Canon is depthwise: B and D are cut with their
channels; A and C sit on the residual stream, which every device has whole, as have the norms. Embedding and head are
cut by tokens of the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from canonlm.canon.layer import CanonLayer, on_this_device
from canonlm.errors import expected
from canonlm.models import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.norm import RMSNorm


def check(config: CanonLMConfig, tp: int) -> None:
    """InvalidSetting where a model cannot be cut into `tp` parts."""
    if set(config.mixers) != {"attention"}:
        raise expected("parallel.tp", "1 with recurrent mixers, which are not cut by heads", tp)
    if config.mlp == "moe":
        raise expected("parallel.tp", "1 with experts", tp)
    if config.alibi is not None or config.rope_heads != config.num_attention_heads:
        raise expected("parallel.tp", "1 where heads differ (alibi, rope_heads)", tp)
    if config.attention_dropout:
        raise expected("parallel.tp", "1 with attention_dropout", tp)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, key) % tp:
            raise expected("parallel.tp", f"a divisor of {key} = {getattr(config, key)}", tp)


def split_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a decoder layer that is whole, and the same, on every device of `mesh`; nothing is sent."""
    for path, module in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in ("q_norm", "k_norm"):
            layer.get_submodule(parent).add_module(name, ShardedRMSNorm(module, mesh))
        elif (style := _style(name)) is not None:
            parallelize_module(module, mesh, style, src_data_rank=None)


def _style(name: str) -> ParallelStyle | None:
    """By the last part of a module's name."""
    whole = Replicate()
    if name in ("self_attn", "mlp"):
        # Once for all projections that read it: so its gradients are summed over the group once, too.
        arguments = (whole, *[None] * (4 if name == "self_attn" else 2))
        return PrepareModuleInput(input_layouts=arguments, desired_input_layouts=arguments)
    if name in ("o_proj", "down_proj"):
        return RowwiseParallel()
    if name.endswith("_proj"):
        return ColwiseParallel()
    if name.startswith(("canonB", "canonD")):
        return OnThisDevice(Shard(0))
    if name.startswith("canon") or name.endswith("norm"):
        return OnThisDevice(whole)
    return None


def split_ends(model: CanonLMForCausalLM, mesh: DeviceMesh) -> None:
    """Cut the embedding and the head, between which lie the layers."""
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.norm": OnThisDevice(Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    # The sum over devices may still be on its way, in a tensor of a class of its own; compiled blocks, given one, hand
    # the embedding a wrong gradient. A copy has arrived.
    model.get_submodule("model.embed_tokens").register_forward_hook(lambda module, inputs, h: h.clone())


class OnThisDevice(ParallelStyle):
    """Parameters cut, or whole on every device; the module computes with those here (`on_this_device`), on the channels
    here."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, spread(parameter, device_mesh, self.placement))
        if isinstance(module, CanonLayer):
            module.hidden_size = on_this_device(module.weight).shape[0]
        return module


def spread(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """As a DTensor, of what every device of `mesh` has whole."""
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


class _SumOverGroup(torch.autograd.Function):
    """The sum over a group, on which every device's further results depend: so its gradient is their sum."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return _summed(dy, ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total
