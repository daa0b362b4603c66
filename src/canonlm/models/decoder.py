"""Our decoder as a `LanguageModel`, the interface for training, planning and evaluating."""

import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, get_origin

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from canonlm.canon.layer import CanonLayer
from canonlm.core import user_code
from canonlm.core.errors import InvalidSetting, expected, unknown
from canonlm.models import tensor_parallel
from canonlm.models.block import DecoderLayer
from canonlm.models.config import CanonLMConfig, gated_width
from canonlm.models.fields import GROUPS
from canonlm.models.initialize import init_parameters
from canonlm.models.interface import LanguageModel, Loss, Sizes
from canonlm.models.mixers import MIXERS
from canonlm.models.mlp import Experts
from canonlm.models.modeling import CanonLMForCausalLM
from canonlm.models.names import check_read, meaning_of, name_of, resolve
from canonlm.models.other_names import FLAT_OPTIONS
from canonlm.models.settings import check_type
from canonlm.ops.varlen import Documents

_FIELDS: dict[str, Any] = {
    name: annotation
    for name, annotation in CanonLMConfig.__annotations__.items()
    if name not in GROUPS["sizes"] | {"arch"} and get_origin(annotation) is not ClassVar
}
"""The types of `model.fields`: any field of `CanonLMConfig` that nothing else decides."""


class Decoder(LanguageModel):
    """`CanonLMForCausalLM` as a `LanguageModel`."""

    module: CanonLMForCausalLM

    def __init__(self, module: CanonLMForCausalLM, *, trained: bool = False) -> None:
        super().__init__(module, module.config.init_seed)
        self._trained = trained
        self._config = module.config
        if self.device.type == "meta":
            module.initialize_weights()  # transformers skips it on meta; it freezes what is to be frozen

    @cached_property
    def arch(self) -> str:  # type: ignore[override]  # computed on first use, as it takes a moment
        return name_of(self._config, trained=self._trained)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return {f"model.layers.{name}": layer for name, layer in self.module.model.layers.named_children()}

    @property
    def ends(self) -> list[nn.Module]:
        return [] if self._config.tie_word_embeddings else [self.module.model.embed_tokens, self.module.lm_head]

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        documents: Documents | None,
        num_targets: float | Tensor,
    ) -> Loss:
        span, time = self.span, input_ids.shape[1]
        if span is not None and (time % span.size or time // span.size < self._reach):
            span = None  # every process computes all of these windows, of an evaluation or a check
        if span is not None:
            input_ids, targets = span.cut(input_ids), span.cut(targets)
        output = self.module(
            input_ids,
            shift_labels=targets,
            doc_ids=documents,
            use_cache=False,
            loss_only=True,
            compiled_loss=self.compiled_loss,
            num_items_in_batch=num_targets,
            span=span,
        )
        if span is None:
            return Loss(output.loss, output.z_loss)
        return Loss(span.sum(output.loss), None if output.z_loss is None else span.sum(output.z_loss))

    @cached_property
    def _reach(self) -> int:
        """The number of tokens before a token that its convolutions read."""
        return max((m.kernel_size - 1 for m in self.module.modules() if isinstance(m, CanonLayer)), default=0)

    def logits(self, input_ids: Tensor, documents: Documents | None = None) -> Tensor:
        return self.module(input_ids, doc_ids=documents, use_cache=False).logits

    def initialize(self, part: nn.Module, name: str) -> None:
        inside = {module for block in self.blocks.values() if block is not part for module in block.modules()}
        for path, module in part.named_modules(prefix=name):
            if module not in inside:
                init_parameters(module, path, self._config)

    def forward_flops(self, seq_len: int) -> dict[str, float]:
        """FLOPs of one token, which uses one expert. A recurrence counts as its chunked form (`canonlm.ops`) with the
        chunk size of a GPU. Isolated documents cost less, which is not counted."""
        config, parts = self._config, {"linear": 0.0, "attention": 0.0, "recurrence": 0.0, "conv": 0.0}
        for module in self.module.model.modules():
            weights = sum(p.numel() for name, p in module.named_parameters(recurse=False) if name != "bias")
            if isinstance(module, nn.Linear):
                parts["linear"] += 2 * weights
            elif isinstance(module, Experts):
                parts["linear"] += 2 * weights / config.num_experts
            elif isinstance(module, CanonLayer):
                parts["conv"] += module.flops
        for mixer in map(MIXERS.__getitem__, config.mixers):
            parts["recurrence" if mixer.recurrent else "attention"] += mixer.flops(config, seq_len)
        return {**parts, "head": 2 * config.hidden_size * config.vocab_size}

    def bytes_after(self, num_tokens: int) -> int | None:
        """Without the marks of `cache.count_tokens`, which only count tokens. None for a mixer from outside that cannot
        use a cache."""
        try:
            counted, marks = super().bytes_after(num_tokens), 2 * num_tokens * self.module.dtype.itemsize
        except Exception:  # of the user's code
            if not any(map(user_code.is_reference, self._config.mixers)):
                raise
            return None
        return counted if counted is None or self._config.attends else counted - marks

    def extra_memory(self, block: nn.Module, seq_len: int) -> float:
        assert isinstance(block, DecoderLayer)
        return MIXERS[self._config.mixers[block.layer_idx]].extra_memory(self._config, seq_len)

    @property
    def mlp_widths(self) -> dict[str, int]:
        return {} if self._config.mlp == "none" else super().mlp_widths

    @property
    def state_sizes(self) -> dict[str, int]:
        """Those of its recurrences (the first that has one), then those of attention."""
        sizes: dict[str, int] = {}
        for flat in ("mamba_state_size", "linear_key_head_dim", "linear_value_head_dim", "kv_lora_rank"):
            of_mixers = self._config.mixer_options.values()
            if values := [options[key] for options in of_mixers for key in FLAT_OPTIONS[flat] if key in options]:
                sizes[flat] = values[0]
        return sizes | (super().state_sizes if "attention" in self._config.mixers else {})

    @property
    def context_length(self) -> int | None:
        return super().context_length if self._config.attends else None

    def check_tensor_parallel(self, size: int) -> None:
        tensor_parallel.check(self._config, size)

    def check_context_parallel(self, size: int, tp: int) -> None:
        config, key = self._config, "parallel.cp"
        if size == 1:
            return
        if config.mlp == "moe":
            raise expected(key, "1 with experts, whose places and balance depend on all tokens of a window", size)
        heads: dict[str, int] = {}
        for name in config.mixers:
            mixer = MIXERS[name]
            if not mixer.__module__.startswith("canonlm."):
                raise expected(key, f"1 with {name}: only our mixers exchange tokens for heads", size)
            if mixer.attends:
                heads |= {each: getattr(config, each) // tp for each in mixer.tensor_parallel_divides}
            else:
                heads[f"num_heads of {name}"] = config.options_of(mixer).num_heads // tp
        for name, number in heads.items():
            if number % size:
                raise expected(key, f"a divisor of {number}, {name}{' / parallel.tp' * (tp > 1)}", size)
        if (most := config.max_position_embeddings // max(1, self._reach)) < size:
            what = f"at most {most}, as convolutions read {self._reach} tokens of the part before"
            raise expected(key, what, size)

    def part_of(self, size: int) -> "Decoder":
        part = copy.copy(self._config)
        for key in ("num_attention_heads", "num_key_value_heads", "rope_heads", "intermediate_size", "vocab_size"):
            setattr(part, key, getattr(self._config, key) // size)
        part.mixer_options = {
            mixer: {
                key: max(1, x // size) if key in MIXERS[mixer].tensor_parallel_divides else x for key, x in of.items()
            }
            for mixer, of in part.mixer_options.items()
        }
        with torch.device("meta"):
            smaller = Decoder(CanonLMForCausalLM(part))
        for name, parameter in self.module.named_parameters():
            smaller.module.get_parameter(name).requires_grad_(parameter.requires_grad)
        return smaller

    def split_block(self, block: nn.Module, mesh: DeviceMesh) -> None:
        tensor_parallel.split_layer(block, mesh)

    def split_ends(self, mesh: DeviceMesh) -> None:
        tensor_parallel.split_ends(self.module, mesh)


def fields_of(config: CanonLMConfig, arch: str) -> Sizes:
    """The sizes of a configuration with the fields that `arch` does not decide: `config_of` gives it back."""
    own = {name: getattr(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    sizes = Sizes(**own, vocab_size=config.vocab_size, seq_len=config.max_position_embeddings)
    usual = config_of(arch, sizes, config.init_seed)
    fields = {name: getattr(config, name) for name in _FIELDS if meaning_of(config, name) != meaning_of(usual, name)}
    return replace(sizes, fields=fields)


def config_of(arch: str, sizes: Sizes, seed: int, *, saved: bool = False) -> CanonLMConfig:
    """The configuration of one of our architectures at those sizes. InvalidSetting if they do not fit together, and for
    settings without effect, which runs that are `saved` may have."""
    fields = dict(sizes.fields)
    for name, value in fields.items():
        key = f"model.fields.{name}"
        if name not in (*_FIELDS, *FLAT_OPTIONS):
            choices = [f"model.fields.{choice}" for choice in (*_FIELDS, *FLAT_OPTIONS)]
            raise InvalidSetting(key, unknown("setting", key, choices))
        check_type(key, value, _FIELDS.get(name, Any))
    if sizes.hidden_size % sizes.num_attention_heads:
        what = f"a divisor of model.hidden_size = {sizes.hidden_size}"
        raise expected("model.num_attention_heads", what, sizes.num_attention_heads)
    try:
        named = resolve(
            arch,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_attention_heads,
            head_dim=fields.get("head_dim"),
            canon=fields,
        )
    except ValueError as error:
        raise InvalidSetting("arch", error) from None
    options = {**named.pop("mixer_options", {})}
    for mixer, own in (fields.pop("mixer_options", None) or {}).items():
        options[mixer] = {**options.get(mixer, {}), **own}
    try:
        config = CanonLMConfig(
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.seq_len,
            num_hidden_layers=sizes.num_hidden_layers,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_attention_heads,
            init_seed=seed,
            mixer_options=options,
            **{**named, **fields},
        )
    except InvalidSetting as error:
        raise InvalidSetting(f"model.fields.{error.key}", f"model.fields.{error}") from None
    if not saved:
        check_read(config, arch, sizes.fields)
    elif "intermediate_size" not in fields and config.intermediate_size == gated_width(sizes.hidden_size):
        config.intermediate_size = gated_width(sizes.hidden_size, rounded=False)  # of a run that does not name it
    config.arch = name_of(config)
    return config
