"""Estimates the peak memory of one device in a training step, by part, before anything is started.

Weights, gradients and optimizer state are counted as `canonlm.train.sharding` divides them. Activations do not come
from a formula: one block of every kind runs on fake tensors (without contents), at its full size and, with
`train.compile`, split into forward and backward by the compiler. The sizes of the tensors that its graph keeps for the
backward are added up. Canon layers are counted as our kernels, unless the run is for a CPU.

Left out: temporary tensors of a block's forward and backward, an evaluation, masks of isolated documents, copies in
float8, communication buffers, fragmentation, the CUDA context. Recurrences are counted in their PyTorch form, which
keeps a state for every chunk; the kernels of flash-linear-attention recompute those in the backward pass.
"""

import copy
import logging
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canonlm.models.interface import LanguageModel
from canonlm.models.loss import chunk_bytes
from canonlm.ops.kernels.api import assumed
from canonlm.train.config import RunConfig
from canonlm.train.mesh import uses_mesh_of_one
from canonlm.train.recompute import kept_by_selective, kept_share


@dataclass(frozen=True)
class Memory:
    """The parts, in bytes."""

    parameters: float  # in float32, this device's shard
    gradients: float  # the same, of parameters that train
    optimizer: float  # AdamW's two averages of these
    gathered: float  # in the precision of the forward pass: head, three blocks; a block's gradient in transit
    activations: float  # kept for the backward pass
    logits: float  # a chunk of them, the gradients of the head and of its input

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


class Device:
    """One of the `devices` that train a model: `Device(model, run, devices).memory(micro_batch=4)`.

    model: on the meta device."""

    def __init__(self, model: LanguageModel, run: RunConfig, devices: int) -> None:
        self.run, self.unsharded = run, devices == 1 and not uses_mesh_of_one(run)
        self.model = model.part_of(run.parallel.tp)
        self.shards = devices // (run.parallel.tp * run.parallel.dp_replicate)
        self.windows = run.train.batch_size * run.parallel.tp * run.parallel.cp // devices  # per step
        self.itemsize = 2 if run.train.precision == "bf16" else 4
        self.kept: dict[str, tuple[float, float]] = {}

    def memory(self, micro_batch: int) -> Memory:
        """The memory with `micro_batch` windows at a time."""
        kinds, blocks, cp = kinds_of_blocks(self.model), self.model.blocks, self.run.parallel.cp
        sizes = {name: sum(p.numel() for p in blocks[name].parameters()) for name in kinds}
        head_weight: Any = self.model.module.get_output_embeddings().weight
        head, parameters = head_weight.numel(), self.model.num_parameters
        ends = parameters - sum(kinds[name] * sizes[name] for name in kinds)
        if self.model.ends:  # the embedding is freed before the first block
            ends -= sum(p.numel() for p in self.model.ends[0].parameters())
        trained = 4 * self.model.num_trained / self.shards
        block = max(sizes.values())
        if not self.unsharded:
            gathered = self.itemsize * (ends + 3 * block) + 4 * block  # gradients are reduced in float32
        else:
            gathered = self.itemsize * parameters if self.itemsize < 4 else 0  # autocast's copies
        if not self.kept:
            self.kept = _kept(self.model, list(kinds), self.run, self.unsharded)
        activations = sum(kinds[name] * kept for name, (kept, _) in self.kept.items())
        if self.run.parallel.activation_checkpointing != "none":  # one block has recomputed its own
            activations += max(everything for _, everything in self.kept.values())
        tokens, (vocab_size, hidden_size) = micro_batch * self.run.data.seq_len / cp, head_weight.shape
        # A chunk's logits in float32 and, before or after, in the precision of the matrix products.
        logits = min(tokens * 4 * vocab_size, chunk_bytes(self.run.train.device)) * (1 + self.itemsize / 4)
        return Memory(
            parameters=4 * parameters / self.shards,
            gradients=trained,
            optimizer=2 * trained,
            gathered=gathered,
            activations=micro_batch * activations / cp,
            logits=logits + 4 * head * head_weight.requires_grad + 2 * self.itemsize * tokens * hidden_size,
        )


def kinds_of_blocks(model: LanguageModel) -> dict[str, int]:
    """The name of the first block of every kind, and the number of blocks of that kind."""
    first: dict[Any, str] = {}
    counts: dict[str, int] = {}
    for name, block in model.blocks.items():
        kind = (repr(block), tuple(p.shape for p in block.parameters()))
        name = first.setdefault(kind, name)
        counts[name] = counts.get(name, 0) + 1
    return counts


def _kept(model: LanguageModel, names: list[str], run: RunConfig, unsharded: bool) -> dict[str, tuple[float, float]]:
    """Bytes that each of these blocks keeps per window for the backward pass: (with the run's activation checkpointing,
    without)."""
    half, seq_len, mode = run.train.precision == "bf16", run.data.seq_len, run.parallel.activation_checkpointing
    kept, module = {}, copy.deepcopy(model.module)
    kernels = nullcontext() if run.train.device == "cpu" else assumed("cpu")  # the fake tensors' type
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what is raised below
    with kernels, FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        # Autocast leaves the embedding in float32, and with it the stream; FSDP gathers it in bfloat16.
        _fill(module, torch.bfloat16 if half and not unsharded else torch.float32)
        for name in model.blocks:
            _fill(module.get_submodule(name), torch.bfloat16 if half else torch.float32)
        try:
            calls = _calls(module, names, seq_len)
            counts = budgeted = _of_blocks(module, calls, run, 1.0)
            if (share := kept_share(mode)) < 1:
                budgeted = _of_blocks(module, calls, run, share)
        except Exception as error:  # other people's code, on fake tensors
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            where = "train.precision=bf16" if not half else "another precision"
            raise ValueError(
                f"memory: the blocks of {model.arch} cannot be counted without contents ({why}); try {where}"
            ) from error
        for name in names:
            stream, made, selective, saved = counts[name]
            extra = model.extra_memory(model.blocks[name], seq_len)
            by_mode = {"none": saved + extra, "full": made, "selective": stream + selective}
            kept[name] = by_mode[mode] if isinstance(mode, str) else budgeted[name][3] + extra, saved + extra
    return kept


def _fill(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the module's tensors by fake ones (in a FakeTensorMode)."""

    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device="cpu")

    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = fake(buffer)


_Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""Arguments by the name of a block."""


class _AllCalled(Exception):
    """Raised at the call of the last block: the rest of the forward pass is not needed."""


@torch.no_grad()
def _calls(module: nn.Module, names: list[str], seq_len: int) -> _Calls:
    """The arguments with which the model calls these blocks for a window."""
    calls: _Calls = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[name] = args, kwargs
        if len(calls) == len(names):
            raise _AllCalled

    hooks = [
        module.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
        )
        for name in names
    ]
    with suppress(_AllCalled):
        module(torch.zeros(1, seq_len, dtype=torch.long), use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _of_blocks(module: nn.Module, calls: _Calls, run: RunConfig, share: float) -> dict[str, tuple[int, int, int, int]]:
    """`_of_block` by name. share: of activations that the compiler may keep."""
    torch.compiler.reset()  # the share is not part of its key, and it gives up on the ninth kind of block
    with torch._functorch.config.patch(activation_memory_budget=share):
        return {name: _of_block(module.get_submodule(name), *calls[name], run) for name in calls}


def _of_block(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: RunConfig
) -> tuple[int, int, int, int]:
    """Bytes of the block's input, of what it returns for later blocks, of the tensors that selective checkpointing also
    keeps, and of all saved tensors."""
    counted = _SavedBytes()
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    stream = next(x for x in tensors if x.is_floating_point()).requires_grad_()
    if run.parallel.activation_checkpointing == "selective":
        with counted:
            block(*args, **kwargs)
    counted.ignore(*block.parameters(), *(x for x in tensors if x is not stream))
    if run.train.compile:
        block.compile(backend="aot_eager_decomp_partition")  # the compiler without its generated code
    with torch.autograd.graph.saved_tensors_hooks(counted.save, lambda x: x):
        returned = tree_leaves(block(*args, **kwargs))
    made = {x.untyped_storage()._cdata: x.nbytes for x in returned if isinstance(x, Tensor) and x.shape == stream.shape}
    for x in tensors:
        made.pop(x.untyped_storage()._cdata, None)
    return stream.nbytes, max(stream.nbytes, sum(made.values())), counted.selective, counted.saved


class _SavedBytes(TorchDispatchMode):
    """Counts bytes that autograd saves, each storage once; as a mode, also those that selective checkpointing would."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = self.selective = 0
        self.seen: dict[int, Tensor] = {}  # keeps the tensors alive, as ids of freed storages are reused

    def ignore(self, *tensors: Tensor) -> None:
        self.seen |= {x.untyped_storage()._cdata: x for x in tensors}

    def save(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = x
            self.saved += storage.nbytes()
        return x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if kept_by_selective(func):
            self.selective += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))
        return out
