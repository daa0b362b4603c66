"""The interface of models: training, sharding, planning, evaluating and saving use nothing else.

`canonlm.models.build` makes these from names; our decoder (`decoder.py`), any causal model of transformers or
flash-linear-attention and modules from users' files (`hf.py`) implement them.

Shapes: B batch, T time, V vocabulary. Targets are what follows each token (already shifted), or -100.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from canonlm.core.borrowed import without_settings
from canonlm.core.errors import expected
from canonlm.models.state import State, bytes_after, state_of
from canonlm.ops.context_parallel import Span
from canonlm.ops.varlen import Documents

MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")
"""Names of an MLP's width in configurations."""

STATE_SIZES = ("state_size", "mamba_d_state", "linear_key_head_dim", "num_key_value_heads", "kv_lora_rank", "head_dim")
"""Names, in configurations, of what a state's bytes are proportional to; first those of recurrences."""


@dataclass(frozen=True)
class Sizes:
    """The size of a model. Everything else is in an architecture's name."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_len: int  # the longest window that it has to read
    fields: dict[str, Any] = field(default_factory=dict)  # of the model's own configuration


SMALL = Sizes(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=97, seq_len=64)
"""The size of models with random weights that commands build to check or to describe an architecture."""


class Loss(NamedTuple):
    """Scalars, in nats: the loss to differentiate, and the part that is z-loss (None if the model has none)."""

    total: Tensor
    z_loss: Tensor | None = None


class LanguageModel(ABC):
    """A causal language model. `module` holds the parameters, whose names are those of checkpoints; `arch` is the
    complete name of its architecture."""

    arch: str
    compiled_loss = False
    """Whether to compile the element-wise part of the chunked loss. Code that compiles the blocks sets it."""
    only_projections = False
    """Whether `forward_flops` counts only projections and convolutions of some layers, which are not attention."""
    span: Span | None = None
    """With context parallelism, the part of every window on which this process computes the loss."""

    def __init__(self, module: PreTrainedModel, seed: int = 0) -> None:
        self.module, self.seed = module, seed

    @property
    @abstractmethod
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by their names in `module`, in order: what is sharded, compiled and recomputed one by one."""

    @property
    def ends(self) -> list[nn.Module]:
        """The embedding and the head, if they act only when they are called and share no weights: then each can be
        sharded by itself, as blocks are."""
        return []

    @abstractmethod
    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        documents: Documents | None,
        num_targets: float | Tensor,
    ) -> Loss:
        """The sum of the targets' losses divided by `num_targets`, without holding all logits if the model can. Inputs
        are `[B, T]`; nothing crosses from one document to another. Documents that are counted on the CPU save waiting
        for a GPU, if the model's kernels read their borders. With a `span` the processes that share a window, which is
        given to all of them, return the same loss; its gradient is the mean of theirs."""

    @abstractmethod
    def logits(self, input_ids: Tensor, documents: Documents | None = None) -> Tensor:
        """`[B, T, V]`, without a cache."""

    @property
    def reads_padding(self) -> bool:
        """Whether padding on the left changes the logits: then the prompts of one call of `generate` must have one
        length. ValueError if the model cannot generate."""
        return False

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        """As `generate` of transformers, greedily unless `options` change that, whatever the model's own generation
        settings are. ValueError if the model cannot generate."""
        return without_settings(self.module).generate(input_ids, **options)  # type: ignore[operator]

    @abstractmethod
    def initialize(self, part: nn.Module, name: str) -> None:
        """Write initial weights into a part of `module` of that name: a function of (seed, parameter name) alone.
        Blocks within it are separate parts."""

    @abstractmethod
    def forward_flops(self, seq_len: int) -> dict[str, float]:
        """FLOPs of one token in a window of `seq_len`, by part: `linear`, `attention`, `recurrence`, `conv`, `head`. A
        multiply-add counts as two operations; element-wise work does not count."""

    def state(self, num_tokens: int) -> State | None:
        """Bytes of state of one sequence after `num_tokens` tokens; None if the model keeps none and reads all tokens
        again for each new one, or if its code cannot be counted."""
        return state_of(self.bytes_after, num_tokens)

    def bytes_after(self, num_tokens: int) -> int | None:
        """The bytes of the cache of one sequence after `num_tokens` tokens, counted in a forward; None: no cache."""
        return bytes_after(self.module, num_tokens)

    def extra_memory(self, block: nn.Module, seq_len: int) -> float:
        """Bytes that a GPU keeps for the backward pass of `block` on a window, beyond those that a CPU keeps."""
        return 0.0

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as data."""
        return self.module.config.to_dict()

    @property
    def mlp_widths(self) -> dict[str, int]:
        """The fields of the configuration for the MLP's width, with their values."""
        return self._numbers(MLP_WIDTHS)

    @property
    def state_sizes(self) -> dict[str, int]:
        """The fields of the configuration for the state's size, with their values, in the order to try them."""
        return self._numbers(STATE_SIZES)

    def _numbers(self, keys: Iterable[str]) -> dict[str, int]:
        values = {key: getattr(self.module.config.get_text_config(), key, None) for key in keys}
        return {key: value for key, value in values.items() if isinstance(value, int) and value > 0}

    @property
    def context_length(self) -> int | None:
        """The max number of tokens that the model reads at once; None without a limit."""
        config = self.module.config.get_text_config()
        limits = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
        return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)

    def check_tensor_parallel(self, size: int) -> None:
        """InvalidSetting if `size` devices cannot share every layer."""
        if size > 1:
            raise expected("parallel.tp", f"1 with {self.arch}: only our decoder supports tensor parallelism", size)

    def check_context_parallel(self, size: int, tp: int) -> None:
        """InvalidSetting if `size` devices cannot share every window, where `tp` devices share every layer."""
        if size > 1:
            raise expected("parallel.cp", f"1 with {self.arch}: only our decoder supports context parallelism", size)

    def part_of(self, size: int) -> "LanguageModel":
        """The part of the model on one of `size` devices that share every layer, to count its memory."""
        return self

    def split_block(self, block: nn.Module, mesh: DeviceMesh) -> None:
        """Split a block that is complete on every device of `mesh` into the devices' parts."""
        raise NotImplementedError

    def split_ends(self, mesh: DeviceMesh) -> None:
        """Split the embedding and the head."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def num_parameters(self) -> int:
        return self.module.num_parameters()

    @property
    def num_trained(self) -> int:
        """The parameters that have gradients and averages of AdamW: without frozen ones."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)


def learns_positions(model: PreTrainedModel) -> bool:
    """Whether the model has a learned table of positions, so that longer inputs are impossible."""
    tables = (name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    return any("wpe" in name or "pos" in name for name in tables)
