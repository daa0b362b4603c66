"""The fields of `CanonLMConfig`: what each is to an architecture's name, and whether a configuration reads it."""

from typing import ClassVar, get_origin

from canonlm.canon.sites import SHORT_CONV
from canonlm.models.config import OF_CANON, CanonLMConfig
from canonlm.models.mixers.base import MIXERS, Mixer
from canonlm.models.other_names import FLAT_OPTIONS

GROUPS = {
    "sizes": {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        *("init_seed",),
    },
    "unnamed": {"intermediate_size", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "arch"},
    "modifiers": {
        *("mixers", "canon_set", "canon_sets", *OF_CANON),
        *("qk_norm", "rope_dim", "rope_heads", "alibi", "mlp", "hidden_act"),
        *("attention_gate", "attention_sink", "sliding_window", "sliding_layers", "attention_residuals"),
    },
    "training": {
        *("initializer", "initializer_range", "init_base_std", "init_std_factor"),
        *("z_loss", "z_loss_weight", "router_loss_weight"),
    },
    "attention": {
        *("num_key_value_heads", "head_dim", "rope_dim", "rope_heads", "rope_theta", "alibi", "qk_norm"),
        *("attention_bias", "attention_dropout", "attention_gate", "attention_sink"),
        *("sliding_window", "sliding_layers"),
    },
}
"""Fields of `CanonLMConfig` by what they are to a name. sizes: given beside it. unnamed: not part of it, either.
modifiers: its modifiers can set them. training: they do not matter once a model has its weights. attention: only mixers
that attend read them (not those of their `ignores`)."""

FIELDS = [
    name
    for name, annotation in CanonLMConfig.__annotations__.items()
    if name not in GROUPS["sizes"] | GROUPS["unnamed"] and get_origin(annotation) is not ClassVar
]
"""The fields that a name decides."""


def mixer_reads(mixer: type[Mixer], key: str) -> bool:
    """Whether layers of this mixer read a field of attention, or the field is of all."""
    return key not in GROUPS["attention"] or (mixer.attends and key not in mixer.ignores)


def reads(config: CanonLMConfig, key: str) -> bool:
    """Whether the value of a field matters in this configuration."""
    return lacks(config, key, "") is None


def lacks(config: CanonLMConfig, key: str, base: str) -> str | None:
    """The part that a configuration lacks to read a field; None if it reads it. base: of its name."""
    layers = config.mixers
    mixers = [MIXERS[mixer] for mixer in dict.fromkeys(layers)]
    if not any(mixer_reads(mixer, key) for mixer in mixers):
        return f"an attention layer to read {key}, as in llama or {base}.llama"
    if key == "conv_kernel" and not any(
        SHORT_CONV in config.sites(i) and key not in MIXERS[mixer].ignores for i, mixer in enumerate(layers)
    ):
        return f"a short convolution (site {SHORT_CONV}) to read {key}, as in gdn2"
    if key in OF_CANON and not any(set(config.canons(i)) - {SHORT_CONV} for i in range(len(layers))):
        return f"Canon layers to read {key}, as in {base}+canon"
    if key in ("hidden_act", "mlp_bias") and config.mlp == "none":
        return f"an MLP to read {key}"
    if key in FLAT_OPTIONS:
        known = {option for mixer in mixers for option in mixer.Options.__dataclass_fields__}
        return None if known & {*FLAT_OPTIONS[key]} else f"a mixer with the option {' or '.join(FLAT_OPTIONS[key])}"
    return None
