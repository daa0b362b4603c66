"""One model on many devices: PyTorch's own engine (FSDP2, tensor parallel, DTensor), put around it from outside.

    devices = dp_replicate x dp_shard x tp

Every tensor-parallel group (tp) works on the same windows and shares every layer; dp_shard such groups share the
storage of the weights, gradients and optimizer state (FSDP); dp_replicate copies of that hold the same (HSDP). The
model keeps its parameters' names whatever is put around it, so a checkpoint fits any layout.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from canonlm.models import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.initialize import init_parameters
from canonlm.train import tensor_parallel
from canonlm.train.config import RunConfig
from canonlm.train.recompute import recomputed
from canonlm.world import World


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


def last_micro_batch(model: nn.Module, last: bool) -> None:
    """Say before each micro-batch of a step whether it is the last: gradients travel once, after that one.

    Until then a device holds the whole gradient (of its tensor-parallel part), in at least float32.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
