"""One configuration for every architecture: which mixer in which layer, which Canon sites, which positions."""

import functools
import inspect
import math
import sys
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from canonlm.canon.sites import MAX_KERNEL, OF_MIXER, SHORT_CONV, SITES, Variant, members, parse, slots
from canonlm.canon.sites import write as write_sites
from canonlm.core.errors import InvalidSetting, expected, unknown
from canonlm.core.saved import check_labels
from canonlm.models.mixers import MIXERS
from canonlm.models.mixers.base import DERIVED, Mixer, types_of
from canonlm.models.other_names import FLAT_OPTIONS, read_rotary, refuse_unknown
from canonlm.models.settings import as_typed, check_choice, check_divides, check_positive, check_sign, check_type

MAX_LAYERS = 2_000
"""Max layers: building that many takes some 8 seconds."""

MLPS = ("gated", "standard", "moe", "none")
ALIBI = ("alibi", "hard")
INITIALIZERS = ("normal", "fan_in", "truncated")
STD_FACTORS = ("disabled", "current_depth", "global_depth", "dim_ratio")
Z_LOSSES = ("logsumexp", "squared_nll")

_parsed = functools.lru_cache(maxsize=None)(parse)


def parse_sites(text: str, **options: Any) -> dict[str, Variant]:
    """The sites of a text: parsed once, as the text may be read at any time. A compiler would warn of the cache."""
    return (parse if torch.compiler.is_compiling() else _parsed)(text, **options)


def gated_width(hidden_size: int, *, rounded: bool = True) -> int:
    """8/3 hidden_size, rounded down; from 1024 on, up to a multiple of 64, as a GPU is slow at odd widths. (The paper's
    playground is narrower. Earlier versions rounded all widths down.)"""
    width = 8 * hidden_size // 3
    return -(-width // 64) * 64 if rounded and hidden_size >= 1024 else width


ABOVE_ZERO = ("rope_theta", "expert_capacity", "init_base_std")
NOT_NEGATIVE = ("rms_norm_eps", "initializer_range", "router_loss_weight", "z_loss_weight")
OF_EXPERTS: dict[str, float] = {"num_experts": 32, "expert_capacity": 2.0, "router_loss_weight": 0.01}
"""Fields of mixtures of experts, with their defaults. Other models have None there: tools (vLLM, llama.cpp) take any
model with `num_experts` for a mixture of experts."""


OF_CANON = {
    **{"canon_kernel": "kernel", "canon_residual": "residual", "canon_activation": "activation"},
    **{"canon_bias": "bias", "canon_frozen": "frozen"},
}
"""Fields that all Canon layers share, and what a `Variant` calls them."""


class CanonLMConfig(PreTrainedConfig):
    """The architecture and sizes of a `CanonLMForCausalLM`.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: as everywhere in transformers.
        mixers: one name per layer, or fewer that repeat (["gdn", "gdn", "gdn", "attention"]);
            default: attention in all.

        num_key_value_heads: fewer than heads for grouped-query attention; default: num_attention_heads.
        head_dim: of attention; default hidden_size / num_attention_heads.
        qk_norm: RMSNorm over the full query and key vectors, before Canon-B.
        attention_gate: multiply attention's output by sigmoid(g_proj(x)), channel by channel (arXiv 2505.06708).
        attention_sink: every head has a learned logit beside its scores, which takes weight and adds no value
            (arXiv 2508.10925).
        sliding_window: a token attends to this many tokens, the last of which is the token itself; padding does not
            count. Caches keep no more. Default: all.
        sliding_layers: whether a layer has the window: one entry per layer, or fewer that repeat. Default: all that
            attend.
        rope_dim: rotate only the first `rope_dim` channels of each head; 0 means no positions (NoPE); default: all,
            or none with `alibi`.
        rope_heads: rotate only in the first `rope_heads` query heads (and the key heads that serve them); default: all.
        alibi: "alibi" lowers each head's scores in proportion to distance (arXiv 2108.12409); with "hard", head h of
            the first half sees its nearest h tokens only and the other half all.

        mixer_options: {mixer: {option: value}} of the recurrent mixers; the `Options` in each mixer's file lists them.
        conv_kernel: of the short convolutions (site b).

        mlp: "gated" (down(act(gate) * up)), "standard" (down(act(up))), "moe" (gated experts, one per token) or "none".
        intermediate_size: width of the MLP or of one expert; default: `gated_width` in a Transformer with gated MLPs,
            4 hidden_size with standard ones, 2 hidden_size where a mixer is recurrent.
        hidden_act: name of the activation, as in transformers: "silu", "relu2", "gelu", …
        num_experts, expert_capacity: of "moe": in training an expert takes at most expert_capacity * tokens /
            num_experts tokens of a call, and further ones get zeros. Default: 32 and 2.0.
        router_loss_weight: of the loss that balances the experts, one term per layer, in training. Default: 0.01.
            Without experts all three are None, and `config.json` lacks them; other values than the
            defaults are refused.

        attention_residuals: mixers and MLPs read a mean of all outputs before them, weighed by a learned query each, in
            place of their sum (arXiv 2603.15031); see `canonlm.models.attention_residuals`.

        canon_set: Canon sites, such as "ABCD", "AbCD" or "KVOM:scaled": see `canonlm.canon.sites`.
            `canon_sets`: the same, one text per layer, or fewer that repeat; with E in all of them or in none.
        canon_kernel, canon_residual, canon_activation, canon_bias: options of every Canon layer, see `CanonLayer`.
            Variants in `canon_set` set the same for single sites; if all sites agree, their values move to these
            fields.
        canon_frozen: Canon weights keep their random initial values (site b is trained).

        z_loss: "logsumexp" adds z_loss_weight * log(Z)^2 to each token's loss l, "squared_nll" z_loss_weight * l^2.
        init_seed: weights are a function of (init_seed, parameter name) alone.
        initializer: "normal" (standard deviation `initializer_range`), "fan_in" (uniform, torch's default for linear
            layers; embeddings as before) or "truncated" (normal, cut at three standard deviations of 1 / sqrt(fan-in),
            or of `init_base_std` in the layers; what writes into the residual stream is divided by `init_std_factor`).
            Default: "fan_in" if all mixers are mamba2, else "normal". `initializer_range`: default 0.1 with "fan_in",
            else 0.02.
        rope_theta, rms_norm_eps, attention_bias, mlp_bias, attention_dropout, max_position_embeddings,
            tie_word_embeddings: as in `LlamaConfig`.

        zeyuan_layernorm: how norms of GLA and Gated DeltaNet round in the original release: kept for its checkpoints'
            key names, without effect on what is computed here.

        arch: the complete name of the architecture, if the configuration was made from one
            (`canonlm.models.names.name_of` has it for any configuration).
    """

    model_type = "canonlm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values", "z_loss"]

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = DERIVED
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = DERIVED
    head_dim: int = DERIVED
    mixers: list[str] = DERIVED
    mixer_options: dict[str, dict[str, Any]] = DERIVED
    conv_kernel: int = 4
    mlp: str = "gated"
    num_experts: int = DERIVED
    expert_capacity: float = DERIVED
    router_loss_weight: float = DERIVED
    canon_set: str = ""
    canon_sets: list[str] | None = None
    canon_kernel: int = 4
    canon_residual: bool = True
    canon_activation: bool = False
    canon_bias: bool = False
    canon_frozen: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    attention_sink: bool = False
    sliding_window: int | None = None
    sliding_layers: list[bool] | None = None
    attention_residuals: bool = False
    rope_theta: float = 10000.0
    rope_dim: int = DERIVED
    rope_heads: int = DERIVED
    alibi: str | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    max_position_embeddings: int = 2048
    z_loss: str | None = None
    z_loss_weight: float = 1e-4
    initializer: str = DERIVED
    initializer_range: float = DERIVED
    init_base_std: float | None = None
    init_std_factor: str = "disabled"
    init_seed: int = 0
    zeyuan_layernorm: bool = False
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    arch: str | None = None

    def __post_init__(self, **kwargs) -> None:
        for key in kwargs:  # they become attributes, which must not replace the methods of the class
            there = inspect.getattr_static(type(self), key, None)
            if key.startswith("__") or callable(there) or (isinstance(there, property) and there.fset is None):
                raise expected(key, "the name of a field", kwargs[key])
        check_labels(kwargs)
        for key, annotation in CanonLMConfig.__annotations__.items():
            check_type(key, getattr(self, key), annotation, getattr(CanonLMConfig, key, None))
        if self.num_hidden_layers > MAX_LAYERS:
            raise expected("num_hidden_layers", f"at most {MAX_LAYERS:,}", self.num_hidden_layers)
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        check_positive(self, "max_position_embeddings")
        self.rope_theta = read_rotary(kwargs, self.rope_theta, CanonLMConfig.rope_theta)
        self._settle_mixers()
        self._settle_attention()
        self._settle_options(kwargs)
        refuse_unknown(kwargs, self.__dataclass_fields__)
        self._settle_mlp()
        self._settle_canon()
        if self.initializer is None:
            self.initializer = "fan_in" if set(self.mixers) == {"mamba2"} else "normal"
        check_choice(self, "initializer", INITIALIZERS)
        if self.initializer_range is None:
            self.initializer_range = 0.1 if self.initializer == "fan_in" else 0.02
        check_choice(self, "init_std_factor", STD_FACTORS)
        check_sign(self, ABOVE_ZERO, NOT_NEGATIVE)
        if self.z_loss is not None:
            check_choice(self, "z_loss", Z_LOSSES)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Any:
        """As the library's, but keyword arguments are checked as the fields in the dictionary are."""
        own = {key: kwargs.pop(key) for key in list(kwargs) if key in CanonLMConfig.__annotations__}
        refuse_unknown(kwargs, cls.__dataclass_fields__)
        if own.keys() - {"arch"}:  # another architecture
            own.setdefault("arch", None)
        if "canon_set" in own:  # in place of the sites in the dictionary, in whichever field these are
            own.setdefault("canon_sets", None)
        elif own.get("canon_sets") is not None:
            own["canon_set"] = ""
        return super().from_dict({**config_dict, **own}, **kwargs)

    def _settle_mixers(self) -> None:
        self.mixers = self._per_layer("mixers", ["attention"] if self.mixers is None else self.mixers)
        for mixer in self.mixers:
            if mixer not in MIXERS:
                raise unknown("mixer", mixer, MIXERS)

    def _settle_attention(self) -> None:
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                what = f"a divisor of hidden_size = {self.hidden_size} (or set head_dim)"
                raise expected("num_attention_heads", what, self.num_attention_heads)
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_positive(self, "head_dim")
        check_divides(self, "num_key_value_heads", "num_attention_heads")
        if self.alibi is not None:
            check_choice(self, "alibi", ALIBI)
        if self.rope_dim is None:
            share = max((MIXERS[mixer].rope_share for mixer in self.mixers if MIXERS[mixer].attends), default=1.0)
            width = self.head_dim if share == 1 else 2 * math.ceil(share * self.head_dim / 2)
            self.rope_dim = width if self.alibi is None else 0
        if self.rope_dim % 2 or not 0 <= self.rope_dim <= self.head_dim:
            what = f"an even number from 0 (no positions) to head_dim = {self.head_dim}"
            raise expected("rope_dim", what, self.rope_dim)
        if self.rope_heads is None:
            self.rope_heads = self.num_attention_heads
        groups = self.num_attention_heads // self.num_key_value_heads
        if self.rope_heads not in range(groups, self.num_attention_heads + 1, groups):
            what = f"a multiple of {groups} (query heads per key head) up to {self.num_attention_heads}"
            raise expected("rope_heads", what, self.rope_heads)
        for key in ("attention_gate", "attention_sink", "sliding_window"):
            if getattr(self, key) and not self.attends:
                raise expected(key, "an attention layer to go with it", getattr(self, key))
        if self.sliding_window is not None:
            if self.sliding_window < 2:
                raise expected("sliding_window", "an integer >= 2", self.sliding_window)
            if self.alibi is not None:
                raise expected(
                    "sliding_window", "none with alibi, which reads the distance to all tokens", self.sliding_window
                )
        if self.sliding_layers is not None:
            attend = [MIXERS[mixer].attends for mixer in self.mixers]
            slide = self._per_layer("sliding_layers", self.sliding_layers)
            slide = [has and each for has, each in zip(slide, attend, strict=True)]
            if self.sliding_window is None or not any(slide):
                raise expected("sliding_layers", "sliding_window and an attention layer for it", self.sliding_layers)
            self.sliding_layers = None if slide == attend else slide
        if not 0 <= self.attention_dropout < 1:
            raise expected("attention_dropout", "a number >= 0 and < 1", self.attention_dropout)

    def _settle_options(self, kwargs: dict[str, Any]) -> None:
        """Complete the options of the mixers in use. `kwargs` may hold those of earlier versions, which were flat."""
        check_positive(self, "conv_kernel")
        read = FLAT_OPTIONS if "mla" in self.mixers else FLAT_OPTIONS.keys() - {"kv_lora_rank"}  # of other models
        flat = {FLAT_OPTIONS[key]: kwargs.pop(key) for key in list(kwargs) if key in read}
        options_by_mixer, self.mixer_options = self.mixer_options or {}, {}
        for mixer in options_by_mixer:
            if mixer not in MIXERS:
                raise unknown("mixer", mixer, MIXERS)
        for mixer in dict.fromkeys(self.mixers):
            of_mixer = MIXERS[mixer].Options
            known, types = of_mixer.__dataclass_fields__, types_of(of_mixer)
            old = {key: value for keys, value in flat.items() for key in keys if key in known}
            own = dict(options_by_mixer.get(mixer, {}))
            for key, value in own.items():
                if key not in known:
                    raise unknown(f"option of {mixer}", key, known, f"options of {mixer}")
                check_type(f"mixer_options.{mixer}.{key}", value, types[key], known[key].default)
                own[key] = as_typed(value, types[key], known[key].default)
            try:
                complete = of_mixer(**{**old, **own})
                complete.complete(self)
            except InvalidSetting as error:
                raise InvalidSetting(f"mixer_options.{mixer}.{error.key}", f"mixer_options.{mixer}.{error}") from None
            if known:
                self.mixer_options[mixer] = asdict(complete)
            MIXERS[mixer].check(self)

    def _settle_mlp(self) -> None:
        check_choice(self, "mlp", MLPS)
        if self.intermediate_size is None:
            if self.is_recurrent:
                self.intermediate_size = 2 * self.hidden_size
            else:
                standard = self.mlp == "standard"
                self.intermediate_size = 4 * self.hidden_size if standard else gated_width(self.hidden_size)
        check_positive(self, "intermediate_size")
        if self.mlp == "moe" and self.mlp_bias:
            raise expected("mlp_bias", 'False with mlp = "moe"', True)
        for key, default in OF_EXPERTS.items():
            value = getattr(self, key)
            if self.mlp != "moe" and value not in (None, default):  # earlier versions wrote the defaults everywhere
                raise expected(key, f'none with mlp = "{self.mlp}"', value)
            setattr(self, key, None if self.mlp != "moe" else default if value is None else value)
        if self.mlp == "moe":
            check_positive(self, "num_experts")
        if self.hidden_act not in ACT2FN:
            raise unknown("hidden_act", self.hidden_act, ACT2FN)

    def _settle_canon(self) -> None:
        """Normalize the spelling: settings that all sites share are in the fields, others in the texts."""
        if not 1 <= self.canon_kernel <= MAX_KERNEL:
            raise expected("canon_kernel", f"an integer from 1 to {MAX_KERNEL}", self.canon_kernel)
        if self.canon_set and self.canon_sets is not None:
            raise expected("canon_set", "none with canon_sets", self.canon_set)
        key = "canon_set" if self.canon_sets is None else "canon_sets"
        texts = [self.canon_set] if self.canon_sets is None else self._per_layer(key, self.canon_sets)
        layers = [parse_sites(text, key=key, default=self._usual_canon) for text in texts]
        for letter in "".join(site.letter for site in SITES.values() if site.part == "model"):
            if len({letter in sites for sites in layers}) > 1:
                where = SITES[letter].about
                raise expected(key, f"{letter} in every layer's sites or in none ({where})", texts)
        canons = {variant for sites in layers for letter, variant in sites.items() if SITES[letter].forms}
        common = {
            Variant(**{x: getattr(c, x) for x in OF_CANON.values()}) if c.form == "conv" else None for c in canons
        }
        if canons:
            shared = (common.pop() if len(common) == 1 else None) or Variant()
            for field, name in OF_CANON.items():
                setattr(self, field, getattr(shared, name))
        texts = [write_sites(sites, default=self._usual_canon) for sites in layers]
        if self.canon_sets is None:
            self.canon_set = texts[0]
        else:
            self.canon_sets = texts
        for mixer, text in dict.fromkeys(zip(self.mixers, self.canon_texts, strict=True)):
            self._check_sites(key, MIXERS[mixer], text)

    def _check_sites(self, key: str, mixer: type[Mixer], text: str) -> None:
        sites = parse_sites(text)
        if SHORT_CONV in sites and not mixer.takes_short_conv:
            raise expected(key, f"no site {SHORT_CONV}: {mixer.name} has no short convolution", text)
        if not all(SITES[letter].is_in(self.mlp) for letter in sites):
            *most, last = [site.letter for site in SITES.values() if not site.is_in(self.mlp)]
            which = f"sites {', '.join(most)} and {last}" if most else f"site {last}"
            why = ": neighbouring tokens go to different experts" * (self.mlp == "moe")
            raise expected(key, f'no {which} with mlp = "{self.mlp}"{why}', text)
        inside = {sites.get(letter) for letter in members(OF_MIXER)}
        if not mixer.has_qkv and (len(inside) > 1 or any(c is not None and c.form == "dynamic" for c in inside)):
            raise expected(key, f"{OF_MIXER}: {mixer.name} has other projections than queries, keys and values", text)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """vLLM would send a folder's configuration to its processes with the code of the class and of all that it uses,
        which cannot be pickled. Its processes read the folder instead."""
        by_value: set[str] = getattr(sys.modules.get("cloudpickle"), "list_registry_pickle_by_value", set)()
        if not __name__.startswith("transformers_modules.") or "transformers_modules" not in by_value:
            return super().__reduce_ex__(protocol)
        revision = getattr(self, "_commit_hash", None)
        load = functools.partial(AutoConfig.from_pretrained, trust_remote_code=True, revision=revision)
        return load, (self.name_or_path,), vars(self)

    @functools.cached_property
    def auto_map(self) -> dict[str, str]:
        """The classes of a self-contained folder. TRL reads it from any configuration, transformers adds to it."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        unwritten: dict[str, Any] = {**dict.fromkeys([*OF_EXPERTS, "arch"]), "auto_map": {}}
        return {key: x for key, x in super().to_dict().items() if key not in unwritten or x != unwritten[key]}

    @property
    def _usual_canon(self) -> Variant:
        """The variant of a site whose text names none."""
        return Variant(**{name: getattr(self, field) for field, name in OF_CANON.items()})

    def _per_layer(self, key: str, pattern: list[Any]) -> list[Any]:
        if isinstance(pattern, str) or not pattern or self.num_hidden_layers % len(pattern):
            raise expected(key, f"one entry per layer ({self.num_hidden_layers}), or a pattern that repeats", pattern)
        return list(pattern) * (self.num_hidden_layers // len(pattern))

    def canons(self, layer_idx: int) -> dict[str, Variant]:
        """The Canon sites of a layer by letter (Q, K and V in place of B), and how the layers there work.

        E belongs to the first layer, whose cache keeps its state.
        """
        text = self.canon_set if self.canon_sets is None else self.canon_sets[layer_idx]
        sites = parse_sites(text, default=self._usual_canon)
        return {x: variant for x, variant in sites.items() if SITES[x].part != "model" or layer_idx == 0}

    @property
    def canon_texts(self) -> list[str]:
        """Each layer's Canon sites as a complete text, such as `AC:nores`; with E in all of them."""
        texts, usual = self.canon_sets or [self.canon_set] * self.num_hidden_layers, self._usual_canon
        complete = {text: write_sites(parse_sites(text, default=usual)) for text in dict.fromkeys(texts)}
        return [complete[text] for text in texts]

    def sites(self, layer_idx: int) -> str:
        """The states of a layer's Canon layers, such as "AbBCD" (B: for any of Q, K, V), in the order in which the
        layer meets them: the layer's cache has one for each, at the same index."""
        return slots(self.canons(layer_idx))

    def window(self, layer_idx: int) -> int | None:
        """The window of a layer's attention; None: it has none."""
        slides = self.sliding_layers is None or self.sliding_layers[layer_idx]
        return self.sliding_window if slides and MIXERS[self.mixers[layer_idx]].attends else None

    def options(self, layer_idx: int) -> Any:
        """The options of a layer's mixer."""
        return self.options_of(MIXERS[self.mixers[layer_idx]])

    def options_of(self, mixer: type[Mixer]) -> Any:
        return mixer.Options(**self.mixer_options.get(mixer.name, {}))

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a recurrent state; then decoding cannot be rewound."""
        return any(MIXERS[mixer].recurrent for mixer in self.mixers)

    @property
    def attends(self) -> bool:
        """Whether a layer attends: then the decoder makes masks and rotary tables."""
        return any(MIXERS[mixer].attends for mixer in self.mixers)

    @property
    def attending(self) -> list[int]:
        """The layers that attend; in an early exit, of those before it."""
        return [i for i, mixer in enumerate(self.mixers[: self.num_hidden_layers]) if MIXERS[mixer].attends]

    @property
    def layer_types(self) -> list[str]:
        """The kinds of layers for transformers' caches. Derived, never set."""
        kinds = []
        for layer_idx, mixer in enumerate((self.mixers or [])[: self.num_hidden_layers]):  # fewer in an early exit
            if MIXERS[mixer].recurrent:
                kinds.append("linear_attention")
            else:
                slides = self.window(layer_idx) is not None
                of_states, plain = ("hybrid_sliding", "sliding_attention") if slides else ("hybrid", "full_attention")
                kinds.append(of_states if self.sites(layer_idx) else plain)
        if kinds and set(kinds) == {"linear_attention"}:
            kinds[0] = "hybrid"  # such a cache would have no length: see `count_tokens` in models/cache.py
        return kinds

    @property
    def number_of_conv_states(self) -> int:
        """Convolution states that caches hold in every layer: the max number of sites in a layer."""
        return max(1, *(len(self.sites(i)) for i in range(len(self.mixers))))
