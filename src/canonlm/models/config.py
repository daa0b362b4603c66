"""One configuration for every architecture: which mixer in which layer, which Canon sites, which positions."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from canonlm.errors import expected, unknown

SITES = "AbBCD"
"""Canon sites, in the order in which a layer meets them. `b` is the short convolution of the linear mixers."""

MIXERS: dict[str, dict[str, bool]] = {
    "attention": {"recurrent": False, "short_conv": False},
}
"""What a layer can mix tokens with: does it keep a recurrent state, can it carry the short convolution (site b)?"""


class CanonLMConfig(PreTrainedConfig):
    """
    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: as everywhere in transformers.
        num_key_value_heads: fewer than heads for grouped-query attention; default: as many.
        head_dim: default hidden_size / num_attention_heads.
        intermediate_size: width of the gated MLP; default 8/3 hidden_size, rounded down.
        mixers: one name per layer; default: attention in all.
        canon_set: Canon sites, letters out of `A` (before the mixer), `B` (on its projections), `C` (before the
            MLP), `D` (inside it). Order and repeats mean nothing. `canon_sets`: the same, one string per layer.
        canon_kernel, canon_residual, canon_activation, canon_bias: see `CanonLayer`.
        qk_norm: RMSNorm over the whole query and key vectors, before Canon-B.
        rope_dim: rotate only the first `rope_dim` channels of each head; 0 means no positions (NoPE); default: all.
        init_seed: weights are a function of (init_seed, parameter name) alone.
    """

    model_type = "canonlm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = None  # type: ignore[assignment]  # until __post_init__
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]  # until __post_init__
    head_dim: int = None  # type: ignore[assignment]  # until __post_init__
    mixers: list[str] | None = None
    canon_set: str = ""
    canon_sets: list[str] | None = None
    canon_kernel: int = 4
    canon_residual: bool = True
    canon_activation: bool = False
    canon_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_dim: int = None  # type: ignore[assignment]  # until __post_init__
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    init_seed: int = 0
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs) -> None:
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "canon_kernel"):
            _check_positive(key, getattr(self, key))
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                what = f"a divisor of hidden_size = {self.hidden_size} (or set head_dim)"
                raise expected("num_attention_heads", what, self.num_attention_heads)
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 8 * self.hidden_size // 3
        for key in ("head_dim", "num_key_value_heads", "intermediate_size"):
            _check_positive(key, getattr(self, key))
        if self.num_attention_heads % self.num_key_value_heads:
            what = f"a divisor of num_attention_heads = {self.num_attention_heads}"
            raise expected("num_key_value_heads", what, self.num_key_value_heads)
        if self.rope_dim is None:
            self.rope_dim = self.head_dim
        if not isinstance(self.rope_dim, int) or self.rope_dim % 2 or not 0 <= self.rope_dim <= self.head_dim:
            what = f"an even number from 0 (no positions) to head_dim = {self.head_dim}"
            raise expected("rope_dim", what, self.rope_dim)
        if not 0 <= self.attention_dropout < 1:
            raise expected("attention_dropout", "a number >= 0 and < 1", self.attention_dropout)
        if self.hidden_act not in ACT2FN:
            raise unknown("hidden_act", self.hidden_act, ACT2FN)
        if self.mixers is None:
            self.mixers = ["attention"] * self.num_hidden_layers
        _check_length("mixers", self.mixers, self.num_hidden_layers)
        for mixer in self.mixers:
            if mixer not in MIXERS:
                raise unknown("mixer", mixer, MIXERS)
        if self.canon_sets is None:
            self.canon_set = canonical_sites("canon_set", self.canon_set)
        else:
            _check_length("canon_sets", self.canon_sets, self.num_hidden_layers)
            self.canon_sets = [canonical_sites("canon_sets", sites) for sites in self.canon_sets]
        for layer_idx, mixer in enumerate(self.mixers):
            if "b" in self.sites(layer_idx) and not MIXERS[mixer]["short_conv"]:
                what = f"no site b: {mixer} has no short convolution"
                raise expected("canon_set" if self.canon_sets is None else "canon_sets", what, self.sites(layer_idx))
        super().__post_init__(**kwargs)

    def sites(self, layer_idx: int) -> str:
        """The Canon sites of a layer, in the order of `SITES`; their places are the layer's cache state indices."""
        return self.canon_set if self.canon_sets is None else self.canon_sets[layer_idx]

    def mixer(self, layer_idx: int) -> str:
        return "attention" if self.mixers is None else self.mixers[layer_idx]

    @property
    def canon_kwargs(self) -> dict[str, Any]:
        """What every `CanonLayer` of this model is built with."""
        return {
            "kernel_size": self.canon_kernel,
            "residual": self.canon_residual,
            "activation": self.canon_activation,
            "bias": self.canon_bias,
        }

    @property
    def layer_types(self) -> list[str]:
        """What transformers' caches allocate per layer. Derived, never set."""
        kinds = []
        for layer_idx, mixer in enumerate(self.mixers or []):
            if MIXERS[mixer]["recurrent"]:
                kinds.append("linear_attention")
            else:
                kinds.append("hybrid" if self.sites(layer_idx) else "full_attention")
        return kinds

    @property
    def number_of_conv_states(self) -> int:
        """Convolution states that the caches hold in every layer: the most sites that any layer has."""
        return max(1, *(len(self.sites(i)) for i in range(self.num_hidden_layers)))


def canonical_sites(key: str, sites: str) -> str:
    """`"DAA"` -> `"AD"`."""
    if not isinstance(sites, str) or set(sites) - set(SITES):
        raise expected(key, f'letters out of {", ".join(SITES)} (such as "ABCD")', sites)
    return "".join(site for site in SITES if site in sites)


def _check_positive(key: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise expected(key, "an integer >= 1", value)


def _check_length(key: str, values: list[str], length: int) -> None:
    if len(values) != length:
        raise expected(key, f"one entry per layer ({length})", values)
