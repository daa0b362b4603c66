"""One run on many devices: PyTorch's own engine (FSDP2, tensor parallel, DTensor), put around the model from outside.

    devices = dp_replicate x dp_shard x tp

Every tensor-parallel group (tp) works on the same windows and shares every layer; dp_shard such groups share the
storage of the weights, gradients and optimizer state (FSDP); dp_replicate copies of that hold the same (HSDP). The
model keeps its parameters' names whatever is put around it, so a checkpoint fits any layout.
"""

import functools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from canonlm.errors import expected
from canonlm.models import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.initialize import init_parameters
from canonlm.train import tensor_parallel
from canonlm.train.build import pick_device
from canonlm.train.config import RunConfig

TIMEOUT = timedelta(minutes=30)
"""For how long a process waits for the others before it gives up."""


@dataclass(frozen=True)
class World:
    """This process among all of them. Its methods talk through the CPU: they neither use the device nor wait for it."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine
    tp: int = 1
    mesh: DeviceMesh | None = None  # dp_replicate x dp_shard x tp; None in a single process

    @property
    def main(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which share of a batch is read here: neighbours form a tensor-parallel group and read the same."""
        return self.rank // self.tp

    @property
    def dp_size(self) -> int:
        return self.size // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    def sum(self, numbers: list[float]) -> list[float]:
        """Each number's sum (in float64) over the data-parallel processes, whose tensor-parallel ones are alike."""
        if self.size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64) * (self.tp_rank == 0)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        if self.size == 1:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def share(self, value: Any) -> Any:
        """What the main process has, everywhere; anything that can be pickled."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def agree(self, error: BaseException | None) -> None:
        """Raise in all processes if one has failed: its own error here, else the first one's kind and message."""
        errors: list[Any] = [None if error is None else (type(error), str(error))]
        if self.size > 1:
            errors *= self.size
            dist.all_gather_object(errors, errors[self.rank])
        if error is not None:
            raise error
        for kind, message in filter(None, errors):
            twin = kind.__new__(kind)  # not kind(message): some take more than a message
            twin.args = (message,)
            raise twin

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes get past this block or none does."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(error)


@contextmanager
def world_of(config: RunConfig) -> Iterator[World]:
    """Join the processes that `torchrun`, or whatever sets its variables, has started; leave them at the end.

    ValueError, in every process: the layout does not suit the number of processes, a device is not there or cannot do
    what is asked.
    """
    rank, size, local_rank = (
        int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    check_layout(config, size)
    device = torch.device(pick_device(config.train.device))
    if size == 1:
        _check_device(device, config)
        yield World(device)
        return
    if device.index is not None:
        raise expected("train.device", "auto, cuda or cpu, with several processes", config.train.device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        with World(device, rank, size).together():  # one machine may have fewer devices than another
            if device.type == "cuda":
                device = torch.device(pick_device(f"cuda:{local_rank}"))
                torch.cuda.set_device(device)
            _check_device(device, config)
        tp, copies = config.parallel.tp, config.parallel.dp_replicate
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh(device.type, (copies, size // (tp * copies), tp), mesh_dim_names=names)
        yield World(device, rank, size, local_rank, tp, mesh)
    except (RuntimeError, OSError):
        # This process alone may have failed (memory, a disk), the others are waiting for it within NCCL, and to leave
        # the group is to wait for them: only the end of this process ends theirs.
        if device.type != "cuda":
            dist.destroy_process_group()
        raise
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def check_layout(config: RunConfig, processes: int) -> None:
    """InvalidSetting where so many processes cannot share the work as `config.parallel` says."""
    parallel, batch_size = config.parallel, config.train.batch_size
    if processes % parallel.tp:
        what = f"a divisor of {processes}, the number of processes (torchrun starts several)"
        raise expected("parallel.tp", what, parallel.tp)
    data_parallel = processes // parallel.tp
    if data_parallel % parallel.dp_replicate:
        what = f"a divisor of {data_parallel}, the number of processes / parallel.tp"
        raise expected("parallel.dp_replicate", what, parallel.dp_replicate)
    if batch_size % data_parallel:
        what = f"a multiple of {data_parallel}, the number of processes / parallel.tp"
        raise expected("train.batch_size", what, batch_size)
    share, micro = batch_size // data_parallel, parallel.micro_batch_size
    if micro is not None and share % micro:
        what = f"a divisor of {share}, a device's share of train.batch_size = {batch_size}"
        raise expected("parallel.micro_batch_size", what, micro)
    if parallel.float8 and parallel.tp > 1:
        raise expected("parallel.float8", "false with parallel.tp > 1", True)


def _check_device(device: torch.device, config: RunConfig) -> None:
    if not config.parallel.float8:
        return
    if find_spec("torchao") is None:
        raise expected("parallel.float8", "false, as torchao is not installed", True)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        what = "false: only GPUs of compute capability 8.9 and later multiply in float8"
        raise expected("parallel.float8", what, True)


def parallelize(model_config: CanonLMConfig, config: RunConfig, world: World) -> CanonLMForCausalLM:
    """The model of a run, spread over its devices, with the weights that a single process would start from.

    Block by block: drawn whole on this device, then cut, so that no device ever holds more than its part and one block
    (or the embeddings and the head). Gradients are averaged over data-parallel processes. With `train.precision` bf16
    blocks are gathered and computed in bfloat16 and gradients summed in float32; a single process has autocast instead.

    ValueError: the model cannot be cut into `parallel.tp` parts.
    """
    parallel, mesh = config.parallel, world.mesh
    if parallel.tp > 1:
        tensor_parallel.check(model_config, parallel.tp)
    with torch.device("cpu" if mesh is None else "meta"):
        model = CanonLMForCausalLM(model_config)
    if mesh is not None:
        model.initialize_weights()  # which transformers leaves out on the meta device: it freezes what is to be frozen
    else:
        model.to(world.device)  # type: ignore[arg-type]  # the library's wrapper confuses the checker
    for name, layer in model.model.layers.named_children():
        if mesh is not None:
            _draw(layer, f"model.layers.{name}", model_config, world.device)
        if parallel.float8:
            _to_float8(layer)
        if mesh is not None and parallel.tp > 1:
            tensor_parallel.split_layer(layer, mesh["tp"])
        # Set on the instance: no wrapper that would change the parameters' names, and FSDP's hooks stay outside.
        if parallel.activation_checkpointing != "none":
            layer.forward = recomputed(layer.forward, selective=parallel.activation_checkpointing == "selective")
        if config.train.compile:
            layer.forward = torch.compile(layer.forward)
        if mesh is not None:
            _shard(layer, config, mesh)
    if mesh is not None:
        for name in ("model.embed_tokens", "model.norm", "lm_head"):
            _draw(model.get_submodule(name), name, model_config, world.device)
        if parallel.tp > 1:
            tensor_parallel.split_ends(model, mesh["tp"])
        model.tie_weights()
        _shard(model, config, mesh)
    return model


def _draw(module: nn.Module, name: str, model_config: CanonLMConfig, device: torch.device) -> None:
    """Memory and initial weights for a module on the meta device, whose name in the model is `name`."""
    module.to_empty(device=device)
    for path, part in module.named_modules(prefix=name):
        init_parameters(part, path, model_config)


def _shard(module: nn.Module, config: RunConfig, mesh: DeviceMesh) -> None:
    dims = ("dp_replicate", "dp_shard") if config.parallel.dp_replicate > 1 else ("dp_shard",)
    policy = MixedPrecisionPolicy()
    if config.train.precision == "bf16":
        # Inputs stay as they are: rotary tables are float32, and the stream is bfloat16 from the embedding on.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh[dims], mp_policy=policy)


def _to_float8(layer: nn.Module) -> None:
    from torchao.float8 import convert_to_float8_training

    def fits(linear: nn.Linear, name: str) -> bool:
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0  # what the hardware asks for

    convert_to_float8_training(layer, module_filter_fn=fits)


_aten = torch.ops.aten
KEPT_BY_SELECTIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What selective activation checkpointing keeps: results of linear layers and of attention."""


def recomputed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    """`forward`, whose inner results backward makes again instead of finding them in memory."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if selective:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _what_to_keep)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs_of_forward: Any) -> Any:
        return checkpoint(forward, *args, **kwargs, **kwargs_of_forward)

    return run


def _what_to_keep(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE


def last_micro_batch(model: nn.Module, last: bool) -> None:
    """Say before each micro-batch of a step whether it is the last: gradients travel once, after that one.

    Until then a device holds the whole gradient (of its tensor-parallel part), in at least float32.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def uncompiled() -> AbstractContextManager[None]:
    """In it the blocks run as they are written: evaluations bring shapes that are not worth compiling for."""
    return torch.compiler.set_stance("force_eager")


def clip_grad_norm(model: nn.Module, max_norm: float, world: World) -> Tensor:
    """Scale all gradients down to a total norm of `max_norm`; returns the norm before, a scalar on the device."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if world.mesh is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    # Squares are summed here, then over all devices in one message; torch's own function sends some per parameter.
    here: defaultdict[int, list[Tensor]] = defaultdict(list)  # by the number of devices that hold the same
    for gradient in (cast(DTensor, p.grad) for p in parameters):
        layout = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        parts = math.prod(size for size, placement in layout if not placement.is_replicate())
        here[world.size // parts].append(gradient.to_local())
    shares = [nn.utils.get_total_norm(part).double().square() / copies for copies, part in here.items()]
    dist.all_reduce(square := torch.stack(shares).sum())
    norm = square.sqrt().to(parameters[0].dtype)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
