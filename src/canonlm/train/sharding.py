"""One model on many devices, with PyTorch's FSDP2, tensor parallelism and DTensor, applied from outside the model.

    devices = dp_replicate x dp_shard x tp

The devices of a tensor-parallel group (tp) work on the same windows and share every layer. Weights, gradients and
optimizer state are sharded over dp_shard such groups (FSDP), and replicated dp_replicate times (HSDP). `parallel.cp` of
these groups, neighbours in dp_shard, read the same windows, each a part of their tokens
(`canonlm.ops.context_parallel`). Parameters keep their names in any layout, so a checkpoint fits all of them.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from canonlm.core.distributed import World
from canonlm.models.interface import LanguageModel
from canonlm.ops.context_parallel import Span
from canonlm.train.config import RunConfig
from canonlm.train.initial_weights import InitialWeights
from canonlm.train.recompute import kept_share, recomputed
from canonlm.train.weights import Weights


def parallelize(
    make: Callable[[str], LanguageModel],
    config: RunConfig,
    world: World,
    weights: Weights | None = None,
    *,
    resumed: bool = False,
) -> LanguageModel:
    """The model that `make(device)` builds ("cpu", or "meta" without values), spread over the devices of a run, with
    the weights that a single process would start from. weights, resumed: as in `InitialWeights`.

    Each block gets its weights in full on this device, then is sharded, so that no device ever holds more than its part
    and one block (or the embeddings and the head). Gradients are averaged over data-parallel processes. With
    `train.precision` bf16, blocks are gathered and computed in bfloat16 and gradients summed in float32; without a
    mesh, autocast is used.

    ValueError: the model cannot be split into `parallel.tp` parts, or its windows into `parallel.cp`.
    """
    parallel, mesh = config.parallel, world.mesh
    # One object for all blocks: compiled code tells meshes apart by identity.
    split = mesh["tp"] if mesh is not None and parallel.tp > 1 else None
    on_meta = mesh is not None or resumed
    model = make("meta" if on_meta else "cpu")
    model.check_tensor_parallel(parallel.tp)
    model.check_context_parallel(parallel.cp, parallel.tp)
    model.span = None if parallel.cp == 1 else Span(world.cp_rank, world.cp, world.cp_group)
    if config.train.compile:  # blocks that differ, and those of attention residuals do, are graphs of their own
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, len(model.blocks) + 1)
        functorch: Any = torch._functorch.config
        functorch.activation_memory_budget = kept_share(parallel.activation_checkpointing)
    model.compiled_loss = config.train.compile and world.device.type == "cuda"  # a CPU gains nothing from it
    initial = InitialWeights(model, world, weights, resumed) if on_meta else None
    if initial is None:
        if weights is not None:
            weights.write(model.module.state_dict(keep_vars=True))
        model.module.to(world.device)  # type: ignore[arg-type]  # the library's wrapper confuses the checker
    for name, block in model.blocks.items():
        if initial is not None:
            initial.place(name)
        if parallel.float8:
            _to_float8(block)
        if split is not None:
            model.split_block(block, split)
        # Set on the instance: a wrapper would change the parameters' names. FSDP's hooks stay outside.
        if parallel.activation_checkpointing in ("selective", "full"):
            block.forward = recomputed(block.forward, selective=parallel.activation_checkpointing == "selective")
        if config.train.compile:
            block.forward = torch.compile(block.forward)
        if mesh is not None:
            _shard(block, config, mesh)
    if initial is not None:
        initial.place("")
        if split is not None:
            model.split_ends(split)
        model.module.tie_weights()
    if mesh is not None:
        if model.ends:
            embedding, head = model.ends
            _shard(embedding, config, mesh)
            cast(FSDPModule, embedding).set_unshard_in_backward(False)  # its gradient does not depend on its weights
            if parallel.tp == 1:  # with tensor parallelism, the loss reads the head's weight without a call
                _shard(head, config, mesh, kept=True)  # its backward follows at once
        _shard(model.module, config, mesh)
    return model


def _shard(module: nn.Module, config: RunConfig, mesh: DeviceMesh, kept: bool = False) -> None:
    """kept: the whole weights stay between forward and backward; those of the root module always do."""
    dims = ("dp_replicate", "dp_shard") if config.parallel.dp_replicate > 1 else ("dp_shard",)
    policy = MixedPrecisionPolicy()
    if config.train.precision == "bf16":
        # Inputs stay as they are: rotary tables are float32, the residual stream is bfloat16 from the embedding on.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh[dims], mp_policy=policy, reshard_after_forward=False if kept else None)


def _to_float8(layer: nn.Module) -> None:
    from torchao.float8 import convert_to_float8_training

    def fits(linear: nn.Linear, name: str) -> bool:
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0  # the hardware requires it

    convert_to_float8_training(layer, module_filter_fn=fits)


def last_micro_batch(model: nn.Module, last: bool) -> None:
    """Called before each micro-batch of a step; `last`: whether it is the last. Each one reduces its gradients to
    shards, so that no device holds a whole gradient; only the last one sums them over copies of the model."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
