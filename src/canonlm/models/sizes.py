"""A configuration of the library's, made small: a preset's sizes in the fields of any `model_type`.

A type's default configuration describes one large model. What is made here keeps its proportions: the MLP, low-rank
projections and the like shrink with the width, the numbers of other heads with the attention heads, their sizes with
the head size; patterns over layers keep all their kinds of layers. State sizes and kernel sizes stay. The number of
experts is at most MAX_EXPERTS, with as much expert width per token as in the default.
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterable
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from canonlm.errors import expected, unknown
from canonlm.models.interface import Sizes

MAX_EXPERTS = 16

_CANONICAL = {
    "hidden_size": ("n_embd", "d_model", "dim", "emb_dim", "embedding_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads", "num_decoder_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "context_length", "model_max_length"),
    "vocab_size": ("decoder_vocab_size",),
}
"""Of the sizes that a preset sets: what types call them whose `attribute_map` does not say so."""

_TWO_PER_BLOCK = {"nemotron_h"}
"""Types that count a mixer and an MLP as two layers."""

_PATTERNS: dict[str, tuple[str, ...]] = {
    "lfm2": ("conv", "conv", "full_attention"),
    "lfm2_moe": ("conv", "conv", "full_attention"),
    "bamba": (*("linear_attention",) * 8, "full_attention"),
    "granitemoehybrid": (*("linear_attention",) * 9, "full_attention"),
}
"""Types whose default has one kind of layer only: as in their published models (LFM2-1.2B, Bamba-9B, Granite-4.0-H)."""

_LAYER_LISTS = re.compile(r"layer_types$|block_types?$|indexer_types$")
_HEADS = re.compile(r"(^|_)(n_|num_)(\w+_)?heads?$|^(en|de)coder_attention_heads$|num_query_groups$")
_GROUPED = re.compile(r"kv|key_value|query_groups")
_HEAD_SIZE = re.compile(r"head_(dim|size)$|headdim$|d_head$|rotary_dim$|kv_channels$|query_pre_attn_scalar$|dim_head$")
_WIDTH = re.compile(
    r"(hidden|intermediate|ffn|feed_forward|embed|inner|embedding|input_embedding|output_embedding)_(size|dim)$"
    r"|^(dff|dim_ff|d_inner|n_inner|d_ff|d_kv|ffn_dim|lru_width|mamba_d_ssm|intermediate_size_mlp|word_embed_proj_dim)$"
    r"|(lora|adapter|laurel|norm)_rank$|_ffn_dim$|hidden_size_per_layer_input$|dim_model_base$|backbone_hidden_size$"
)
_WINDOW = re.compile(
    r"(sliding_window|window_size|attention_chunk_size|local_attention|window_len)$|^sliding_window_size$"
)
_CHUNK = re.compile(r"^(mamba_)?chunk_size$|^block_size$")
_PERIOD = re.compile(r"(_period|_interval|layer_group_size|sliding_window_pattern|every_n_layers|decoder_sparse_step)$")
_OFFSET = re.compile(r"layer_offset$")
_DENSE_FIRST = re.compile(r"^(first_k_dense_replace|num_dense_layers)$")
_EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_moe_experts)$")
_ACTIVE = re.compile(r"^(num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k|experts_per_token)$")
_EXPERT_WIDTH = re.compile(r"^(moe_intermediate_size|expert_ffn_hidden_size)$")
_STATE_GROUPS = re.compile(r"^(mamba_)?n_?groups$")
_ROUTING_GROUPS = re.compile(r"^(n_group|num_expert_group|topk_group)$")
_TOKEN = re.compile(r"_token_(id|index)$|^(unk|mask|pad|bos|eos)_index$")
_DROPOUT = re.compile(r"drop(out)?(_|$)|_pdrop$|layerdrop$|^attn_pdrop$")


def parse(arch: str) -> tuple[str, dict[str, Any]]:
    """`hf:qwen3{head_dim=16,layer_types=[a,b]}` is ("qwen3", {"head_dim": 16, "layer_types": ["a", "b"]})."""
    head, brace, rest = arch.partition("{")
    options: dict[str, Any] = {}
    if brace:
        if not rest.endswith("}"):
            raise expected("arch", "a } at the end of its fields", arch)
        for text in re.split(r",(?![^\[]*\])", rest[:-1]) if rest[:-1].strip() else []:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise expected("arch", "fields such as {head_dim=16,num_key_value_heads=2}", arch)
            options[key.strip()] = _value(value.strip())
    return head.partition(":")[2], options


def _value(text: str) -> Any:
    try:
        return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?e[-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def causal_config(arch: str, sizes: Sizes) -> PreTrainedConfig:
    """The configuration of a causal model of transformers: of a composite type its text model's."""
    model_type, options = parse(arch)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unknown("model_type", model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "Causal models of transformers")
    try:
        config_class = CONFIG_MAPPING[model_type]
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except (ImportError, RuntimeError) as error:  # of the model's own file: a package that is missing
        raise ValueError(f"arch: {arch} cannot be built here: {in_a_line(error)}") from error
    text = model_class.config_class
    if text is not None and text is not config_class and text.model_type in CONFIG_MAPPING:
        model_type = text.model_type
    reads = getattr(model_class, "input_modalities", "text")
    if not {reads} & {"text"} if isinstance(reads, str) else set(reads) - {"text"}:
        near = [t for t in (f"{model_type}_text", f"{model_type.removesuffix('_vl')}_text") if t in CONFIG_MAPPING]
        raise ValueError(f"arch: {arch} reads more than text; {f'use hf:{near[0]}' if near else 'use a model of text'}")
    return config_of(arch, model_type, sizes, options)


def config_of(arch: str, model_type: str, sizes: Sizes, options: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a small model of that type; `sizes.fields` and then `options` replace what is derived here.

    ValueError: an unknown field, or the library refuses what they make together.
    """
    config_class = CONFIG_MAPPING[model_type]
    given = {"tie_word_embeddings": False, **sizes.fields, **options}
    _check_names(arch, config_class, given)
    try:
        default = config_class()
        sized = _Small(default, model_type, sizes).fields | given
        config = config_class(**sized)
        lists = _complete_lists(model_type, config, default, given)
        return config_class(**sized, **lists) if lists else config
    except Exception as error:  # whatever the library's code raises on sizes that its authors did not think of
        raise ValueError(f"arch: {arch} cannot have these sizes: {in_a_line(error)}") from error


def in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def names_of(config_class: type) -> dict[str, Any]:
    """The fields that a configuration can be made with, and their defaults."""
    if dataclasses.is_dataclass(config_class):
        return {
            f.name: None if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(config_class)
            if f.init
        }
    parameters = inspect.signature(config_class).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


def _check_names(arch: str, config_class: type[PreTrainedConfig], given: Iterable[str]) -> None:
    names = {*names_of(config_class), *config_class.attribute_map}
    if "rope_parameters" in names:
        names |= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    for name in given:
        if name not in names and name != "tie_word_embeddings":
            base = arch.partition("{")[0]
            raise unknown("field", f"{base}{{{name}}}", [n for n in names if not n.startswith("_")], "Fields")


class _Small:
    """The fields of `default`, in the proportions of `sizes`."""

    def __init__(self, default: PreTrainedConfig, model_type: str, sizes: Sizes) -> None:
        self.default, self.sizes, self.names = default, sizes, names_of(type(default))
        self.layers = sizes.num_hidden_layers * (2 if model_type in _TWO_PER_BLOCK else 1)
        width = self._value("hidden_size") or sizes.hidden_size
        heads = self._value("num_attention_heads") or max(1, width // 64)
        self.by_width = sizes.hidden_size / width
        self.by_heads = sizes.num_attention_heads / heads
        self.by_head_size = self.by_width / self.by_heads
        self.by_layers = self.layers / max(1, self._value("num_hidden_layers") or self.layers)
        experts = next((v for k, v in self._numbers() if _EXPERTS.search(k)), 0)
        active = next((v for k, v in self._numbers() if _ACTIVE.search(k)), 0)
        self.by_experts = min(1.0, MAX_EXPERTS / experts) if experts else 1.0
        self.experts = round(experts * self.by_experts)
        self.active = max(min(2, active), round(active * self.by_experts)) if active else 0
        self.by_expert_width = self.by_width * (active / self.active if active else 1.0)
        self.fields = self._fields()

    def _name(self, canonical: str) -> str | None:
        options = (type(self.default).attribute_map.get(canonical), canonical, *_CANONICAL[canonical])
        return next((name for name in options if name in self.names), None)

    def _value(self, canonical: str) -> int | None:
        name = self._name(canonical)
        value = None if name is None else getattr(self.default, name, None)
        return value if isinstance(value, int) else None

    def _numbers(self) -> Iterable[tuple[str, Any]]:
        for name in self.names:
            with contextlib.suppress(AttributeError, NotImplementedError):
                yield name, getattr(self.default, name)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in self._numbers():
            new = self._scaled(name, value)
            if new is not None:
                fields[name] = new[0]
        sizes = self.sizes
        for canonical, size in {
            "hidden_size": sizes.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": sizes.num_attention_heads,
            "max_position_embeddings": sizes.seq_len,
            "vocab_size": sizes.vocab_size,
        }.items():
            if (field := self._name(canonical)) is not None:
                fields[field] = size
        return fields

    def _scaled(self, name: str, value: Any) -> tuple[Any] | None:
        """The new value of a field, in a tuple; None: the type decides."""
        sizes = self.sizes
        if _TOKEN.search(name):  # no token of ours is one of theirs, and what is padding does not learn
            if self._may_be_none(name):
                return (None,)
            return (value if isinstance(value, int) and 0 <= value < sizes.vocab_size else 0,)
        if isinstance(value, bool) or value is None or self.names[name] is None:
            return None  # where the class's own default is None the class derives it
        if isinstance(value, float | int) and _DROPOUT.search(name):
            return (type(value)(0),)
        if name == "rope_parameters":
            return None
        if not isinstance(value, int):
            return None
        if name.endswith("_std"):
            return None
        rules: tuple[tuple[re.Pattern[str], Any], ...] = (
            (_EXPERT_WIDTH, lambda: _multiple(value * self.by_expert_width, 8)),
            (_HEADS, lambda: self._heads(name, value)),
            (_HEAD_SIZE, lambda: _multiple(value * self.by_head_size, 2)),
            (_WIDTH, lambda: _multiple(value * self.by_width, 8)),
            (_WINDOW, lambda: min(value, max(8, sizes.seq_len // 2))),
            (_CHUNK, lambda: min(value, max(16, sizes.seq_len))),
            (_PERIOD, lambda: min(value, self.layers)),
            (_OFFSET, lambda: min(value, self.layers - 1)),
            (_DENSE_FIRST, lambda: min(self.layers - 1, max(min(1, value), round(value * self.by_layers)))),
            (_EXPERTS, lambda: self.experts),
            (_ACTIVE, lambda: self.active),
            (_STATE_GROUPS, lambda: max(1, round(value * self.by_heads))),
            (_ROUTING_GROUPS, lambda: min(value, max(1, self.experts // 4))),
        )
        return next(((make(),) for pattern, make in rules if pattern.search(name)), None)

    def _may_be_none(self, name: str) -> bool:
        fields = dataclasses.fields(self.default) if dataclasses.is_dataclass(self.default) else ()
        return all("None" in str(f.type) or "Optional" in str(f.type) for f in fields if f.name == name)

    def _heads(self, name: str, value: int) -> int:
        heads = max(1, round(value * self.by_heads))
        if _GROUPED.search(name):
            while self.sizes.num_attention_heads % heads:
                heads -= 1
        return heads


def _multiple(value: float, of: int) -> int:
    return max(of, round(value / of) * of)


def _complete_lists(
    model_type: str, config: PreTrainedConfig, default: PreTrainedConfig, given: dict[str, Any]
) -> dict[str, Any]:
    """Lists over layers that lack a kind of layer which the type has: the missing kinds take the last layers."""
    lists: dict[str, Any] = {}
    layers = config.num_hidden_layers
    for name in names_of(type(config)):
        if not _LAYER_LISTS.search(name) or name in given:
            continue
        now, whole = getattr(config, name, None), getattr(default, name, None)
        if not isinstance(now, list) or not isinstance(whole, list) or not whole:
            continue
        pattern = _PATTERNS.get(model_type)
        whole = list(pattern) if pattern and name == "layer_types" or pattern and name == "layers_block_type" else whole
        wanted = list(dict.fromkeys(whole))
        if set(now) >= set(wanted) and len(now) == layers:
            continue
        tiled = [whole[i % len(whole)] for i in range(layers)]
        missing = [kind for kind in wanted if kind not in tiled][: max(0, layers - 1)]
        if missing:
            tiled[-len(missing) :] = missing
        lists[name] = tiled
    return lists
