"""Memory of one device at the peak of a training step, by part, before anything is started.

Weights, gradients and optimizer state are counted by what `canonlm.train.sharding` does with them. Activations are not
a formula: one block of every kind runs on tensors without contents, at its full size and, with `train.compile`, cut
into forward and backward by the compiler; what its graph then holds for the backward is added up.

Left out: temporary tensors of a block's forward and backward, an evaluation, masks of isolated documents, copies in
float8, buffers of the communication, fragmentation, the CUDA context. Recurrences are counted in their PyTorch form,
which keeps a state for every chunk; the kernels of flash-linear-attention make those anew in the backward.
"""

import copy
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canonlm.models.cache import Layout
from canonlm.models.config import CanonLMConfig
from canonlm.models.loss import CHUNK_BYTES
from canonlm.models.modeling import DecoderLayer
from canonlm.models.positions import rotary_table
from canonlm.train.config import RunConfig
from canonlm.train.flops import CHUNK, kinds_of_layers
from canonlm.train.recompute import KEPT_BY_SELECTIVE

CPU_CHUNK = 32
"""Of the gated delta rule on a CPU, where the blocks are run for this; on a GPU it is CHUNK."""


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    parameters: float  # in float32, this device's shard
    gradients: float  # the same; all of them while those of several micro-batches are summed up
    optimizer: float  # AdamW's two averages
    gathered: float  # in the precision of the forward: embedding, head, two blocks; a block's gradient on its way
    activations: float  # what the forward keeps for the backward
    logits: float  # a chunk of them, the gradients of the head and of what it reads

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


class Device:
    """One of `devices` that train a model: `Device(config, run, devices).memory(micro_batch=4)`."""

    def __init__(self, config: CanonLMConfig, run: RunConfig, devices: int) -> None:
        self.run, self.config, self.alone = run, _part_of(config, run.parallel.tp), devices == 1
        self.shards = devices // (run.parallel.tp * run.parallel.dp_replicate)
        self.windows = run.train.batch_size * run.parallel.tp // devices  # per step
        self.itemsize = 2 if run.train.precision == "bf16" else 4
        with torch.device("meta"):
            blocks = {i: DecoderLayer(self.config, i) for i in kinds_of_layers(self.config)}
        self.blocks = {i: sum(p.numel() for p in block.parameters()) for i, block in blocks.items()}
        self.kept: dict[int, tuple[int, int]] = {}

    def memory(self, micro_batch: int) -> Memory:
        """With so many windows at a time."""
        c, layers = self.config, kinds_of_layers(self.config)
        head = c.hidden_size * c.vocab_size
        ends = head * (1 if c.tie_word_embeddings else 2) + c.hidden_size
        parameters = ends + sum(layers[i] * self.blocks[i] for i in layers)
        shard = 4 * parameters / self.shards
        block = max(self.blocks.values())
        if not self.alone:
            gathered = self.itemsize * (ends + 3 * block) + 4 * block  # a gradient is summed over devices in float32
        else:
            gathered = self.itemsize * parameters if self.itemsize < 4 else 0  # autocast's copies
        summed_up = 4 * parameters if micro_batch < self.windows else shard
        if not self.kept:
            self.kept = {i: _kept(c, i, self.run, self.alone) for i in layers}
        activations = sum(layers[i] * kept for i, (kept, _) in self.kept.items())
        if self.run.parallel.activation_checkpointing != "none":  # one block has made its own anew
            activations += max(everything for _, everything in self.kept.values())
        tokens = micro_batch * self.run.data.seq_len
        # Of a chunk both the float32 numbers and, before or after, those that the products read or make.
        logits = min(tokens * 4 * c.vocab_size, CHUNK_BYTES) * (1 + self.itemsize / 4)
        return Memory(
            parameters=shard,
            gradients=summed_up,
            optimizer=2 * shard,
            gathered=gathered,
            activations=micro_batch * activations,
            logits=logits + 4 * head + 2 * self.itemsize * tokens * c.hidden_size,
        )


def _part_of(config: CanonLMConfig, tp: int) -> CanonLMConfig:
    """What one of `tp` devices that share every layer has of it."""
    part = copy.copy(config)
    for key in ("num_attention_heads", "num_key_value_heads", "rope_heads", "intermediate_size", "vocab_size"):
        setattr(part, key, getattr(config, key) // tp)
    part._attn_implementation = "sdpa"
    return part


def _kept(config: CanonLMConfig, layer_idx: int, run: RunConfig, alone: bool) -> tuple[int, int]:
    """Bytes that a block keeps of one window until its backward: with the run's checkpointing, and without."""
    half, kind = run.train.precision == "bf16", run.parallel.activation_checkpointing
    # Autocast leaves the embedding in float32, and with it the stream; FSDP gathers it in bfloat16.
    stream = torch.bfloat16 if half and not alone else torch.float32
    counted, seq_len = _Counted(), run.data.seq_len
    torch.compiler.reset()  # else the ninth kind of block in a process would no longer be compiled
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
        try:
            block = DecoderLayer(config, layer_idx)
        finally:
            torch.set_default_dtype(default)
        h = torch.zeros(1, seq_len, config.hidden_size, dtype=stream, requires_grad=True)
        rotary = rotary_table(torch.arange(seq_len)[None], config.rope_dim, config.rope_theta, stream)
        if kind == "selective":
            with counted:
                block(h, Layout(), None, rotary if config.rope_dim else None)
        counted.ignore(*block.parameters(), *rotary)
        if run.train.compile:
            block.compile(backend="aot_eager_decomp_partition")  # all of the compiler but its code
        with torch.autograd.graph.saved_tensors_hooks(counted.save, lambda x: x):
            block(h, Layout(), None, rotary if config.rope_dim else None)
    everything = counted.saved + _chunks_of_a_gpu(config, layer_idx, seq_len)
    return {"none": everything, "full": h.nbytes, "selective": h.nbytes + counted.dear}[kind], everything


class _Counted(TorchDispatchMode):
    """Bytes that autograd saves, every storage once; as a mode, also those that selective checkpointing would."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = self.dear = 0
        self.seen: dict[int, Tensor] = {}  # the tensor too: storages that have gone leave their ids to others

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
        if func in KEPT_BY_SELECTIVE:
            self.dear += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


def _chunks_of_a_gpu(config: CanonLMConfig, layer_idx: int, seq_len: int) -> int:
    """What the chunks of a GPU take more than those of a CPU: larger triangles, fewer states."""
    if config.mixer(layer_idx) != "gdn":
        return 0
    state, fewer = config.linear_key_head_dim * config.linear_value_head_dim, seq_len // CPU_CHUNK - seq_len // CHUNK
    return 4 * config.linear_num_heads * (seq_len * (CHUNK - CPU_CHUNK) - fewer * state)
