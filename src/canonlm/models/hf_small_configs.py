"""Small configurations of transformers: a preset's sizes in the fields of any `model_type`.

A type's default configuration describes one large model. The small ones keep its proportions: the MLP, low-rank
projections and the like shrink with the width, the numbers of other heads with the attention heads, their sizes with
the head size; patterns over layers keep all their kinds of layers. State sizes and kernel sizes do not change. The
number of experts is at most MAX_EXPERTS, with the same expert width per token as in the default.
"""

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from canonlm.core.errors import InvalidSetting, expected, unknown
from canonlm.core.saved import LAYERS
from canonlm.models.interface import Sizes
from canonlm.models.names import read_settings

MAX_EXPERTS = 16

_CANONICAL = {
    "hidden_size": ("n_embd", "d_model", "dim", "emb_dim", "embedding_dim"),
    "num_hidden_layers": LAYERS,
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads", "num_decoder_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "context_length", "model_max_length"),
    "vocab_size": ("decoder_vocab_size",),
}
"""Other names of a preset's sizes, in types whose `attribute_map` lacks them."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
ACTIVE_EXPERTS = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "moe_top_k"),
    "experts_per_token",
)
"""Names of the number of experts in a layer, and of those that a token uses."""

_TWO_PER_BLOCK = {"nemotron_h"}
"""Types that count a mixer and an MLP as two layers."""

_LFM2 = ["conv", "conv", "full_attention"]
_LEFT_OPEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [*["linear_attention"] * 8, "full_attention"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gpt_neo": {"attention_types": ["global", "local"]},
    "granitemoehybrid": {"layer_types": [*["linear_attention"] * 9, "full_attention"]},
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8},
    "lfm2": {"layer_types": _LFM2, "intermediate_size": 8192, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": _LFM2},
    "mllama": {"cross_attention_layers": [-1]},
    "rwkv": {"rescale_every": 0},
}
"""Fields that a type's default leaves open, or has in one kind of layer only, as in its published models. RWKV would
divide weights in place whenever it is evaluated; LFM2 would round the MLP to a multiple of 256."""

_GROUPS = {"attn_config", "ffn_config"}
"""Groups of fields, not models of their own."""

OF_TEXT = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Fields that any model may be given, as they describe its text."""

_ALWAYS = {"tie_word_embeddings", *OF_TEXT}
_OF_FILES = {"architectures", "dtype", "torch_dtype", "transformers_version"}
_HOW = "set its fields, as in hf:qwen3{head_dim=16}, or take another model"

_LAYER_LISTS = re.compile(r"layer_types$|block_types?$|indexer_types$|^activation_sparsity_pattern$")
_HEADS = re.compile(r"(^|_)(n_|num_)(\w+_)?heads?$|^(en|de)coder_attention_heads$|num_query_groups$")
_GROUPED = re.compile(r"kv|key_value|query_groups")
_HEAD_SIZE = re.compile(r"head_(dim|size)$|headdim$|d_head$|rotary_dim$|kv_channels$|query_pre_attn_scalar$|dim_head$")
_WIDTH = re.compile(
    r"(hidden|intermediate|ffn|feed_forward|embed|inner|embedding|input_embedding|output_embedding)_(size|dim)$"
    r"|^(dff|dim_ff|d_inner|n_inner|d_ff|d_kv|ffn_dim|lru_width|mamba_d_ssm|intermediate_size_mlp|word_embed_proj_dim)$"
    r"|(lora|adapter|laurel|norm)_rank$|_ffn_dim$|hidden_size_per_layer_input$|dim_model_base$|backbone_hidden_size$"
)
_WINDOW = re.compile(
    r"(sliding_window|window_size|attention_chunk_size|local_attention|window_len)$|^(sliding_window_size|index_topk)$"
)
_CHUNK = re.compile(r"^(mamba_)?chunk_size$|^block_size$")
_PERIOD = re.compile(r"(_period|_interval|layer_group_size|sliding_window_pattern|every_n_layers|decoder_sparse_step)$")
_OFFSET = re.compile(r"layer_offset$")
_DENSE_FIRST = re.compile(r"^(first_k_dense_replace|num_dense_layers)$")
_EXPERTS = re.compile(rf"^({'|'.join(EXPERTS)})$")
_ACTIVE = re.compile(rf"^({'|'.join(ACTIVE_EXPERTS)})$")
_EXPERT_WIDTH = re.compile(r"^(moe_intermediate_size|expert_ffn_hidden_size)$")
_MLP_WIDTH = re.compile(r"^intermediate_size$")
_ZERO_EXPERTS = re.compile(r"^zero_expert_num$")
_STATE_GROUPS = re.compile(r"^(mamba_)?n_?groups$")
_ROUTING_GROUPS = re.compile(r"^(n_group|num_expert_group|topk_group)$")
_VOCABULARY = re.compile(r"^(unpadded_vocab_size|vocab_size_per_layer_input)$")
_TOKEN = re.compile(r"_token_(id|index)$|^(unk|mask|pad|bos|eos)_index$")
_DROPOUT = re.compile(r"drop(out)?(_|$)|_pdrop$|layerdrop$|^attn_pdrop$")


def parse(arch: str) -> tuple[str, dict[str, Any]]:
    """`hf:qwen3{head_dim=16,layer_types=[a,b]}` is ("qwen3", {"head_dim": 16, "layer_types": ["a", "b"]})."""
    head, brace, rest = arch.partition("{")
    if "+" in head or "+" in rest.rpartition("}")[2]:
        raise expected("arch", "no modifiers (+) behind a model that is not our decoder", arch)
    if brace and not rest.endswith("}"):
        raise expected("arch", "a } at the end of its fields", arch)
    return head.partition(":")[2], read_settings(rest[:-1])


def causal_config(arch: str, sizes: Sizes) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of a causal model of transformers and its configuration; for a composite type, those of its text
    model."""
    model_type, options = parse(arch)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unknown("model_type", model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "Causal models of transformers")
    try:
        config_class = CONFIG_MAPPING[model_type]
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except Exception as error:  # raised by the model's own file, mostly for a missing package
        raise refusal(arch, "cannot be built here", error) from error
    if model_class.config_class is not config_class and model_class.config_class in CONFIG_MAPPING.values():
        config_class = model_class.config_class
    if parts := [part for part in config_class.sub_configs if part not in _GROUPS]:
        text = f"{model_type}_text" if f"{model_type}_text" in CONFIG_MAPPING else "llama"
        what = f"is made of several models ({', '.join(parts)})"
        raise InvalidSetting("arch", f"arch: {arch} {what}; choose a text model, such as hf:{text}")
    return model_class, config_of(arch, config_class, sizes, options)


def fla_config(arch: str, sizes: Sizes) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """As `causal_config`, for flash-linear-attention, which registers its types with transformers when imported."""
    name, options = parse(arch)
    if importlib.util.find_spec("fla") is None or not torch.cuda.is_available():
        what = 'a CUDA device and flash-linear-attention (with a GPU: pip install "canonlm[gpu]")'
        raise expected("arch", what, arch)
    try:
        models = importlib.import_module("fla.models")
        classes = [c for c in vars(models).values() if isinstance(c, type) and issubclass(c, PreTrainedConfig)]
        types = {c.model_type: c for c in classes if c in MODEL_FOR_CAUSAL_LM_MAPPING}
    except Exception as error:
        raise refusal(arch, "cannot be built here", error) from error
    if name not in types:
        raise unknown("model of flash-linear-attention", name, types, "its models")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[types[name]]
    return model_class, config_of(arch, types[name], sizes, options)


def config_of(
    arch: str, config_class: type[PreTrainedConfig], sizes: Sizes, options: dict[str, Any]
) -> PreTrainedConfig:
    """The configuration of a small model of that type; `sizes.fields` and then `options` replace what is derived here.

    InvalidSetting for an unknown field, and for values that the library refuses.
    """
    chosen = {"tie_word_embeddings": False, **sizes.fields, **options}
    names = {*names_of(config_class), *config_class.attribute_map}
    names |= {"rope_theta", "rope_scaling", "partial_rotary_factor"} if "rope_parameters" in names else set()
    check_known(arch, chosen, options, names | _ALWAYS)
    try:
        config = config_class(**{**_Small(config_class(), sizes).fields, **chosen})
    except Exception as error:  # whatever the library raises for sizes that its authors did not think of
        raise refusal(arch, "cannot have these sizes", error) from error
    for name in OF_TEXT:
        if name not in chosen and _may_be_none(config_class, name):
            vars(config)[name] = None  # even if the class would set it
    return config


def check_known(arch: str, chosen: Iterable[str], options: Collection[str], known: Collection[str]) -> None:
    """InvalidSetting for a chosen field that is not among the known ones. options: those in braces in the name."""
    base = arch.partition("{")[0]
    for name in chosen:
        if name not in known:
            key = f"{base}{{{name}}}" if name in options else f"model.fields.{name}"
            fields = [field for field in known if not field.startswith("_")]
            raise InvalidSetting("arch", unknown("field", key, fields, f"fields of {base}"))


def fields_of(config: PreTrainedConfig, arch: str) -> Sizes:
    """The sizes of a saved model's configuration, with all fields that differ from those of a small model of that type:
    `causal_config` gives it back. InvalidSetting for a type that is not a causal model of text."""

    def size(name: str) -> int:
        names = (name, *_CANONICAL[name])
        return next((value for each in names if isinstance(value := getattr(config, each, None), int)), 1)

    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    known: dict[str, Any] = {key: size(key) for key in keys}
    sizes = Sizes(**known, seq_len=size("max_position_embeddings"))
    own = config.to_dict()

    def differing(than: Sizes) -> dict[str, Any]:
        made = causal_config(arch, than)[1].to_dict()
        names = [name for name in (*names_of(type(config)), *sorted(_ALWAYS)) if name in own and name not in _OF_FILES]
        return {name: own[name] for name in names if own[name] != made.get(name)}

    # A length that is not that of the windows, or tables of positions would have another size.
    length = type(config).attribute_map.get("max_position_embeddings", "max_position_embeddings")
    fixed = {length: own[length]} if length in own and length in names_of(type(config)) else {}
    sizes = dataclasses.replace(sizes, fields={**differing(sizes), **fixed})
    if rest := differing(sizes):
        raise InvalidSetting(
            "model.weights", f"model.weights: {arch} with these fields cannot be built: {sorted(rest)}"
        )
    return sizes


def refusal(arch: str, what: str, error: Exception, place: str = "") -> InvalidSetting:
    """A one-line error for an exception from other people's code."""
    text = " ".join(str(error).split())[:240]
    return InvalidSetting("arch", f"arch: {arch} {what} ({type(error).__name__}: {text}{place}); {_HOW}")


def names_of(config_class: type) -> dict[str, Any]:
    """The arguments of a configuration class, and their defaults."""
    # A class that only inherits from data classes has an __init__ of its own.
    if inspect.unwrap(config_class.__init__).__code__.co_filename == "<string>":  # type: ignore[misc]
        fields = [field for field in dataclasses.fields(config_class) if field.init]
        return {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}
    parameters = list(inspect.signature(config_class.__init__).parameters.values())[1:]  # type: ignore[misc]
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {p.name: None if p.default is p.empty else p.default for p in named}


class _Small:
    """The fields of `default`, in the proportions of `sizes`."""

    def __init__(self, default: PreTrainedConfig, sizes: Sizes) -> None:
        self.model_type = model_type = default.model_type
        self.default, self.sizes, self.names = default, sizes, names_of(type(default))
        # As stored: for fields that differ by layer, reading the attribute would raise.
        stored, names = vars(default), type(default).attribute_map
        self.open = _LEFT_OPEN.get(model_type, {})
        self.values = {name: stored.get(names.get(name, name)) for name in self.names} | self.open
        self.layers = sizes.num_hidden_layers * (2 if model_type in _TWO_PER_BLOCK else 1)
        width = self._value("hidden_size") or sizes.hidden_size
        heads = self._value("num_attention_heads") or max(1, width // 64)
        self.by_width = sizes.hidden_size / width
        self.by_heads = sizes.num_attention_heads / heads
        self.by_head_size = self.by_width / self.by_heads
        self.by_layers = self.layers / max(1, self._value("num_hidden_layers") or self.layers)
        experts = self._first(_EXPERTS) if self.values.get("is_moe", True) else 0
        # Where experts have no width of their own, it is that of the MLP.
        self.expert_width = _EXPERT_WIDTH if self._first(_EXPERT_WIDTH) or not experts else _MLP_WIDTH
        active = self._first(_ACTIVE)
        self.by_experts = min(1.0, MAX_EXPERTS / experts) if experts else 1.0
        self.experts = round(experts * self.by_experts)
        self.active = max(min(2, active), round(active * self.by_experts)) if active else 0
        self.by_expert_width = self.by_width * (active / self.active if active else 1.0)
        self.fields = self._fields()

    def _name(self, canonical: str) -> str | None:
        options = (type(self.default).attribute_map.get(canonical), canonical, *_CANONICAL[canonical])
        return next((name for name in options if name in self.names), None)

    def _value(self, canonical: str) -> int | None:
        value = self.values.get(self._name(canonical) or "")
        return value if isinstance(value, int) else None

    def _first(self, pattern: re.Pattern[str]) -> int:
        return next((value for name, value in self.values.items() if pattern.search(name) and value), 0)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in self.values.items():
            if name in _GROUPS and value is not None:
                scaled = ((key, self._scaled(key, part)) for key, part in vars(value).items())
                fields[name] = value.to_diff_dict() | {key: new[0] for key, new in scaled if new is not None}
            elif (new := self._scaled(name, value)) is not None:
                fields[name] = new[0]
        sizes = self.sizes
        for canonical, size in {
            "hidden_size": sizes.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": sizes.num_attention_heads,
            "max_position_embeddings": sizes.seq_len,
            "vocab_size": sizes.vocab_size,
        }.items():
            names = [self._name(canonical), *(name for name in _CANONICAL[canonical] if "decoder" in name)]
            fields |= {name: size for name in names if name in self.names}
        for name, size in {
            "head_dim": sizes.hidden_size // sizes.num_attention_heads,
            "num_key_value_heads": sizes.num_attention_heads,
            "n_inner": 4 * sizes.hidden_size,
        }.items():
            if name in self.names and self.values.get(name) is None:
                fields[name] = size
        for name in self.open:
            fields.setdefault(name, self.values[name])
        match self.model_type:
            case "bamba":
                kinds = _cycled(fields["attn_layer_indices"], self.layers)
                fields["attn_layer_indices"] = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
            case "gpt_neo":
                fields["attention_types"] = [[_cycled(fields["attention_types"], self.layers), 1]]
            case "gemma4_text" | "gemma4_unified_text":  # a number that the class accepts but does not store
                fields["global_head_dim"] = 2 * fields["head_dim"]
            case "dots3_note_text":  # the same
                fields |= {"sliding_window_size": max(8, sizes.seq_len // 2)}
                sliding = {"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024}
                sliding |= {"kv_lora_rank": 1024, "head_dim": 256, "qk_nope_head_dim": 192}
                fields |= {f"swa_{name}": self._rule(name, value) for name, value in sliding.items()}
            case "gemma3n_text" if self.layers <= 10:  # layers that share keys need one of each kind before them
                fields["num_kv_shared_layers"] = 0
        return fields

    def _scaled(self, name: str, value: Any) -> tuple[Any] | None:
        """The new value of a field, in a tuple; None: the type decides."""
        sizes = self.sizes
        if _TOKEN.search(name):  # none of our tokens is one of theirs, and a padding token would not be trained
            if _may_be_none(type(self.default), name):
                return (None,)
            return (value if isinstance(value, int) and 0 <= value < sizes.vocab_size else 0,)
        if _LAYER_LISTS.search(name) and isinstance(value, list) and value:
            fixed = name in self.open or self.names[name] is not None or self.model_type in _TWO_PER_BLOCK
            derived = not fixed and len(value) <= self.layers
            return None if derived else (_cycled(value, self.layers),)
        if isinstance(value, list) and value and all(type(item) is int for item in value) and _WIDTH.search(name):
            return ([self._rule(name, value[0])] * self.layers,)
        if self.names.get(name, value) is None and name not in self.open:
            return None  # the class derives it
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if _DROPOUT.search(name):
            return (type(value)(0),)
        new = self._rule(name, value) if isinstance(value, int) and value > 0 else None
        return None if new is None else (new,)

    def _rule(self, name: str, value: int) -> int | None:
        sizes = self.sizes
        rules: tuple[tuple[re.Pattern[str], Any], ...] = (
            (self.expert_width, lambda: _multiple(value * self.by_expert_width, 8)),
            (_HEADS, lambda: self._heads(name, value)),
            (_HEAD_SIZE, lambda: self._head_size(value)),
            (_WIDTH, lambda: _multiple(value * self.by_width, 8)),
            (_VOCABULARY, lambda: sizes.vocab_size),
            (_WINDOW, lambda: min(value, max(8, sizes.seq_len // 2))),
            (_CHUNK, lambda: min(value, max(16, sizes.seq_len))),
            (_PERIOD, lambda: min(value, self.layers)),
            (_OFFSET, lambda: min(value, self.layers - 1)),
            (_DENSE_FIRST, lambda: min(self.layers - 1, max(min(1, value), round(value * self.by_layers)))),
            (_EXPERTS, lambda: self.experts),
            (_ACTIVE, lambda: self.active),
            (_ZERO_EXPERTS, lambda: round(value * self.by_experts)),
            (_STATE_GROUPS, lambda: max(1, round(value * self.by_heads))),
            (_ROUTING_GROUPS, lambda: min(value, max(1, self.experts // 2))),
        )
        return next((make() for pattern, make in rules if pattern.search(name)), None)

    def _head_size(self, value: int) -> int:
        size = value * self.by_head_size
        return _multiple(size, 8 if size >= 12 else 2)  # attention kernels read eight numbers at a time

    def _heads(self, name: str, value: int) -> int:
        heads = max(1, round(value * self.by_heads))
        if _GROUPED.search(name):
            while self.sizes.num_attention_heads % heads:
                heads -= 1
        return heads


def _may_be_none(config_class: type[PreTrainedConfig], name: str) -> bool:
    return all("None" in str(f.type) for f in dataclasses.fields(config_class) if f.name == name)


def _multiple(value: float, of: int) -> int:
    return max(of, round(value / of) * of)


def _cycled(pattern: list[str], layers: int) -> list[str]:
    """The pattern, repeated over `layers` layers. Kinds that would be missing take the last layers."""
    kinds = [pattern[i % len(pattern)] for i in range(layers)]
    missing = [kind for kind in dict.fromkeys(pattern) if kind not in kinds][: layers - 1]
    return kinds[: layers - len(missing)] + missing
