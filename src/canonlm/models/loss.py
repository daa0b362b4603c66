"""The training loss, from logits or without holding all of them.

For a labelled token with logits x, target t and Z = sum_v exp(x_v), in nats:

    l = log Z - x_t,      l + w (log Z)^2  with z_loss "logsumexp",      l + w l^2  with z_loss "squared_nll"

Shapes: B batch, T time, N = B * T tokens (of a chunk), V vocabulary, D hidden size. Targets are what follows each
token (already shifted), or -100.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canonlm.models.config import CanonLMConfig
from canonlm.ops.derivatives import by_definition, differentiated_again, first_only, gradients

CHUNK_BYTES = 2**28
"""Bytes of float32 logits at once, on a CPU: 512 tokens of a vocabulary of 128k, 2048 of one of 32k. Enough tokens for
the products to run at full speed and for the gradient of the head, read and written once per chunk, not to matter."""

GPU_CHUNK = 4  # times as many bytes: faster products need more tokens to outweigh that reading and writing

Sums = tuple[Tensor, Tensor | None]
"""Over the labelled tokens: the loss, and how much of it is z-loss (None without)."""


def mean_loss(
    config: CanonLMConfig, sums: Sums, targets_BT: Tensor, router_loss: Tensor | None, num_items: Tensor | int | None
) -> Sums:
    """Means over the labelled tokens, with the router loss of experts added to the loss.

    `num_items` replaces the count when a batch is spread over several calls (gradient accumulation).
    """
    loss, z_loss = sums
    labelled = (targets_BT != -100).sum().to(loss.device)
    with_router = loss if router_loss is None else loss + config.router_loss_weight * router_loss * labelled
    loss = with_router.where(labelled > 0, loss.detach())  # without targets, gradients would be 0 / 0
    count = labelled if num_items is None else num_items
    return loss / count, None if z_loss is None else z_loss / count


def loss_of_logits(config: CanonLMConfig, logits_BTV: Tensor, targets_BT: Tensor) -> Sums:
    """The definition, in at least float32."""
    logits_NV = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    targets_N = targets_BT.flatten().to(logits_NV.device)
    loss_N = nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
    if config.z_loss is None:
        return loss_N.sum(), None
    root_N = loss_N if config.z_loss == "squared_nll" else logits_NV.logsumexp(-1) * (targets_N != -100)
    z_loss_N = config.z_loss_weight * root_N.square()
    return (loss_N + z_loss_N).sum(), z_loss_N.sum().detach()


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within this context, calls of the module, with their hooks, run `forward`."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def chunk_bytes(device: str) -> int:
    """Max bytes of float32 logits at once, on a type of device."""
    return CHUNK_BYTES if device == "cpu" else GPU_CHUNK * CHUNK_BYTES


def loss_of_hidden(
    config: CanonLMConfig,
    h_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    compiled: bool = False,
    at_once: int | None = None,
) -> Sums:
    """The loss of the logits `h @ weight.T`, of which no more than `at_once` bytes exist at a time (by default as many
    as `chunk_bytes` says).

    The gradients are computed with the loss, chunk by chunk, so that no product is done twice; the weight's is
    accumulated in at least float32. Products are in the dtype of `h_BTD`, or autocast's. Derivatives beyond a first
    backward are those of the loss of all logits.

    `weight_VD` may be sharded by rows over a tensor-parallel group (DTensor, Shard(0)): then each rank has the logits
    of its rows only, and all get the same loss and the same gradient of `h_BTD`.

    `compiled`: if gradients are computed and the weight is not sharded, compiled code makes one pass over a chunk for
    the loss and one for the gradient, and float32 logits are never written.
    """
    group, first, rows_per_rank = None, 0, len(weight_VD)
    if isinstance(weight_VD, DTensor):
        mesh = weight_VD.device_mesh
        rows_per_rank = -(-len(weight_VD) // mesh.size())  # rows of a rank: the last may have fewer
        group, first, weight_VD = mesh.get_group(), mesh.get_local_rank() * rows_per_rank, weight_VD.to_local()
    dtype, device = h_BTD.dtype, h_BTD.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if by_definition() and group is None:
        return _of_all(config, h_BTD.flatten(0, 1), weight_VD, targets_BT.flatten().to(h_BTD.device), dtype)
    bytes_of_token = rows_per_rank * torch.promote_types(dtype, torch.float32).itemsize
    chunks = _chunks(targets_BT.numel(), bytes_of_token, at_once or chunk_bytes(device))
    targets_N, with_grad = targets_BT.flatten().to(h_BTD.device), torch.is_grad_enabled()
    compiled = compiled and with_grad and group is None
    head = weight_VD, group, first
    return _Chunks.apply(config, h_BTD.flatten(0, 1), *head, targets_N, chunks, dtype, with_grad, compiled)


def _of_all(config: CanonLMConfig, h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Sums:
    return loss_of_logits(config, (h_ND.to(dtype) @ weight_VD.to(dtype).mT)[None], targets_N[None])


class _Chunks(torch.autograd.Function):
    """`loss_of_hidden`; the head's weight has the rows `first`, `first + 1`, … of a group's."""

    @staticmethod
    def forward(ctx, config, h_ND, weight_VD, group, first, targets_N, chunks, dtype, with_grad, compiled) -> Sums:
        exact = torch.promote_types(dtype, torch.float32)
        w_VD = weight_VD.to(dtype)
        dh_ND = torch.empty_like(h_ND) if with_grad and ctx.needs_input_grad[1] else None
        dw_VD = torch.zeros_like(w_VD, dtype=exact) if with_grad and ctx.needs_input_grad[2] else None
        loss = z_loss = torch.zeros((), dtype=exact, device=h_ND.device)
        dx: Tensor | None
        for rows in chunks:
            h, target = h_ND[rows].to(dtype), targets_N[rows, None]
            if compiled:
                nll, z, dx = _compiled()(h @ w_VD.mT, target, config.z_loss, config.z_loss_weight)
            else:
                make_dx = dh_ND is not None or dw_VD is not None
                nll, z, dx = _in_place((h @ w_VD.mT).to(exact), target, config, group, first, make_dx)
            loss, z_loss = loss + nll, z_loss + z
            if dx is None:
                continue
            dx = dx.to(dtype)
            if dh_ND is not None:
                dh = dx @ w_VD
                if group is not None:
                    dist.all_reduce(dh, group=group)
                dh_ND[rows] = dh
            if dw_VD is not None:
                _add_product(dw_VD, dx, h)
        ctx.versions = [each._version for each in (dh_ND, dw_VD) if each is not None]
        ctx.save_for_backward(dh_ND, dw_VD, h_ND, weight_VD, targets_N)
        ctx.config, ctx.dtype, ctx.is_whole = config, dtype, group is None
        ctx.mark_non_differentiable(z_loss)
        return loss + z_loss, None if config.z_loss is None else z_loss

    @staticmethod
    def backward(ctx, d_loss, _):
        dh_ND, dw_VD, *inputs = ctx.saved_tensors
        if differentiated_again() and ctx.is_whole:

            def definition(h, weight, targets):
                return _of_all(ctx.config, h, weight, targets, ctx.dtype)[0]

            dh_ND, dw_VD, _ = gradients(definition, inputs, [d_loss])
        else:
            # In place, as the weight's gradient is large. torch then refuses a second backward, but not where hooks of
            # saved tensors return the tensor itself, as `save_on_cpu` does on a CPU.
            made = [each for each in (dh_ND, dw_VD) if each is not None]
            if any(each._version > version for each, version in zip(made, ctx.versions, strict=True)):
                raise RuntimeError("a first backward has modified by an inplace operation what a second one needs")
            results = (None if gradient is None else gradient.mul_(d_loss) for gradient in (dh_ND, dw_VD))
            dh_ND, dw_VD = first_only(*results)
        return None, dh_ND, dw_VD, None, None, None, None, None, None, None


def _add_product(dw_VD: Tensor, dx_NV: Tensor, h_ND: Tensor) -> None:
    """dw += dx^T h, in the precision of dw."""
    if dw_VD.dtype == dx_NV.dtype:
        dw_VD.addmm_(dx_NV.mT, h_ND)
    elif dw_VD.is_cuda:  # the product itself in float32: not rounded, nor written and read again
        torch.addmm(dw_VD, dx_NV.mT, h_ND, out_dtype=dw_VD.dtype, out=dw_VD)
    else:
        dw_VD += dx_NV.mT @ h_ND


def _terms(x_NV: Tensor, target_N1: Tensor, z_loss: str | None, z_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over a chunk of the loss and of the z-loss, and their gradient in the dtype of the logits `x_NV`. To be
    compiled: in eager mode every line would make a tensor of that size."""
    x = x_NV.to(torch.promote_types(x_NV.dtype, torch.float32))
    labelled = target_N1 != -100
    target_N1 = torch.where(labelled, target_N1, 0)
    log_z = x.logsumexp(-1, keepdim=True)
    nll = (log_z - x.gather(-1, target_N1)) * labelled
    z, up, down = _z_terms(nll, log_z * labelled, labelled, z_loss, z_weight)
    is_target = torch.arange(x.shape[1], device=x.device) == target_N1
    dx = (x - log_z).exp() * up - torch.where(is_target, down, 0)
    return nll.sum(), z, dx.to(x_NV.dtype)


def _z_terms(
    nll_N1: Tensor, log_z_N1: Tensor, labelled_N1: Tensor, z_loss: str | None, z_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the z-loss, and the factors of the gradient of the logit of v: up * exp(x_v) / Z, minus `down` if v is
    the target. nll and log Z are 0 without a label."""
    z, up = torch.zeros((), dtype=nll_N1.dtype, device=nll_N1.device), labelled_N1.to(nll_N1.dtype)
    if z_loss == "logsumexp":
        return z_weight * log_z_N1.square().sum(), up + 2 * z_weight * log_z_N1, up
    if z_loss == "squared_nll":
        z, up = z_weight * nll_N1.square().sum(), up + 2 * z_weight * nll_N1
    return z, up, up


@functools.cache  # importing the compiler takes a second
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_terms, dynamic=False)  # all chunks but the last have one length


def _in_place(
    x: Tensor, target: Tensor, config: CanonLMConfig, group: dist.ProcessGroup | None, first: int, make_dx: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `_terms`, but the gradient (or None) overwrites the logits `x`, `[N, V]`, which may be one rank's part of the
    vocabulary."""
    labelled = target != -100
    in_shard = labelled if group is None else (target >= first) & (target < first + x.shape[1])
    target = torch.where(in_shard, target - first, 0)
    top, z, x_target = _exponentiate(x, target, in_shard, group)
    log_z = z.log()
    nll = (log_z - x_target) * labelled
    z_loss, up, down = _z_terms(nll, (log_z + top) * labelled, labelled, config.z_loss, config.z_loss_weight)
    dx = x.mul_(up / z).scatter_add_(-1, target, -down * in_shard) if make_dx else None
    return nll.sum(), z_loss, dx


def _exponentiate(x_NV: Tensor, target_N1: Tensor, in_shard_N1: Tensor, group: dist.ProcessGroup | None):
    """Turns logits x into exp(x - top), in place. Returns top = max_v x_v, sum_v exp(x_v - top) and x_target - top, of
    the group's vocabulary; `in_shard_N1`: whether the target is among these logits."""
    top_N1 = x_NV.amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(top_N1, dist.ReduceOp.MAX, group)
    target_x_N1 = x_NV.sub_(top_N1).gather(-1, target_N1) * in_shard_N1
    z_N1 = x_NV.exp_().sum(-1, keepdim=True)
    if group is not None:
        sums_N2 = torch.cat([z_N1, target_x_N1], dim=-1)
        dist.all_reduce(sums_N2, group=group)
        z_N1, target_x_N1 = sums_N2.split(1, dim=-1)
    return top_N1, z_N1, target_x_N1


def _chunks(tokens: int, bytes_of_token: int, at_once: int) -> list[slice]:
    """The fewest slices of equal length, each of at most `at_once` bytes."""
    count = max(1, -(-tokens * bytes_of_token // at_once))
    size = max(1, -(-tokens // count))
    return [slice(start, start + size) for start in range(0, tokens, size)]
