"""The release's GLA, Gated DeltaNet and Mamba2, in the style of transformers."""

import math
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator

from canonlm.canon.sites import OF_MLP, SHORT_CONV, SITES
from canonlm.core.errors import expected
from canonlm.models.config import CanonLMConfig
from canonlm.models.published.format import Release, as_named, ratio, round_up, share_of, sites
from canonlm.models.published.rename import Names

_BLOCK = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **as_named("canonA", "canonC", "mlp.down_proj"),
    "mlp.canonD": "mlp.canonD_gate mlp.canonD_up",
}
_QKV = {
    **{f"attn.{x}_proj": f"mixer.{x}_proj" for x in "qkvo"},
    **{f"attn.{x}_conv1d": f"mixer.{x}_conv1d" for x in "qkv"},
    **{f"attn.g_proj{factor}": f"mixer.g_proj{factor}" for factor in ("", ".0", ".1")},  # full rank, or two factors
}
_OF_ANY_MLP = "".join(letter for letter, site in SITES.items() if not site.is_in("none"))
_NO_ATTENTION = {"num_attention_heads": 1, "rope_dim": 0}
_BOTH = "mlp.gate_proj mlp.up_proj"


class LinearAttention(Release):
    """Common fields of GLA and Gated DeltaNet."""

    same: ClassVar[dict[str, str]] = {
        **Release.same,
        **as_named("max_position_embeddings", "zeyuan_layernorm"),
        "output_gate_rank": "mixer.output_gate_rank",
        "conv_size": "conv_kernel",
        "norm_eps": "rms_norm_eps",
    }

    num_heads: PositiveInt
    expand_v: PositiveFloat
    intermediate_size: PositiveInt | None = None
    hidden_ratio: PositiveFloat = 4
    hidden_act: Literal["swish", "silu"] = "swish"
    use_short_conv: bool
    conv_size: PositiveInt = 4
    output_gate_rank: PositiveInt | None
    norm_eps: float = 1e-6
    zeyuan_layernorm: bool = False
    max_position_embeddings: PositiveInt = 2048
    fuse_norm: bool = True

    attn: None = None
    attn_mode: Any = "chunk"
    fuse_swiglu: Any = True
    fuse_cross_entropy: Any = True
    zeyuan_split_init: Any = True

    def derived(self) -> dict[str, Any]:
        width = self.intermediate_size
        if width is None:
            width = round_up(int(self.hidden_size * self.hidden_ratio * 2 / 3), 256)
        return {
            "canon_set": sites(self.canon_set, self.use_short_conv),
            "intermediate_size": width,
            "mixer.num_heads": self.num_heads,
            **_NO_ATTENTION,
        }

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        own = {
            "num_heads": config.options(0).num_heads,
            "intermediate_size": config.intermediate_size,
            "use_short_conv": SHORT_CONV in config.sites(0),
        }
        return {**super().of(config), **own}

    def blocks(self, layer: dict[str, str]) -> Names:
        top = {"model.embeddings": "model.embed_tokens", "model.norm": "model.norm", "lm_head": "lm_head"}
        return Names(top=top, layers="model.layers", layer={**_BLOCK, **_QKV, **layer})


class GLACanon(LinearAttention):
    mixer = "gla"
    canons = "AbCD"
    same: ClassVar[dict[str, str]] = {
        **LinearAttention.same,
        "use_output_gate": "mixer.output_gate",
        "clamp_min": "mixer.clamp_min",
    }

    model_type: Literal["GLACanon"] = "GLACanon"
    expand_k: PositiveFloat
    num_kv_heads: PositiveInt | None = None
    use_output_gate: bool = True
    clamp_min: float | None = None

    elementwise_affine: Literal[True] = True
    feature_map: None = None
    use_gk: Literal[True] = True
    use_gv: Literal[False] = False
    use_l2warp: Literal[False] = False

    def derived(self) -> dict[str, Any]:
        return {
            **super().derived(),
            "mixer.num_key_value_heads": self.num_kv_heads,
            "mixer.key_head_dim": share_of("num_heads", int(self.hidden_size * self.expand_k), self.num_heads),
            "mixer.value_head_dim": share_of("num_heads", int(self.hidden_size * self.expand_v), self.num_heads),
        }

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        options = config.options(0)
        own = {
            "expand_k": ratio(options.num_heads * options.key_head_dim, config.hidden_size),
            "expand_v": ratio(options.num_heads * options.value_head_dim, config.hidden_size),
            "num_kv_heads": options.num_key_value_heads,
        }
        return {**super().of(config), **own}

    def names(self) -> Names:
        fused = self.fuse_norm and self.use_output_gate and not self.zeyuan_layernorm
        return self.blocks(
            {
                "attn.g_norm_swish_gate" if fused else "attn.g_norm": "mixer.o_norm",
                **{f"attn.gk_proj.{factor}": f"mixer.gk_proj.{factor}" for factor in "01"},
                "mlp.gate_proj": _BOTH,
            }
        )


class GatedDeltaNetCanon(LinearAttention):
    mixer = "gdn"
    same: ClassVar[dict[str, str]] = {
        **LinearAttention.same,
        "use_gate": "mixer.output_gate",
        "head_dim": "mixer.key_head_dim",
    }

    model_type: Literal["GatedDeltaNetCanon"] = "GatedDeltaNetCanon"
    head_dim: PositiveInt
    use_gate: bool = True

    def derived(self) -> dict[str, Any]:
        return {**super().derived(), "mixer.value_head_dim": int(self.head_dim * self.expand_v)}

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        options = config.options(0)
        expand_v = ratio(options.value_head_dim, options.key_head_dim)
        return {**super().of(config), "expand_v": expand_v}

    def names(self) -> Names:
        apart = as_named("mlp.gate_proj", "mlp.up_proj")
        return self.blocks(
            {
                **{f"attn.{x}": f"mixer.{x}" for x in ("a_proj", "b_proj", "A_log", "dt_bias", "o_norm")},
                "attn.canonB": "mixer.canonB_q mixer.canonB_k mixer.canonB_v",
                **({"mlp.both_proj": _BOTH} if OF_MLP in self.canon_set else apart),
            }
        )


class Mamba2Canon(Release):
    mixer = "mamba2"
    same: ClassVar[dict[str, str]] = {
        **Release.same,
        **as_named("conv_kernel"),
        "num_heads": "mixer.num_heads",
        "head_dim": "mixer.head_dim",
        "state_size": "mixer.state_size",
        "layer_norm_epsilon": "rms_norm_eps",
    }

    model_type: Literal["Mamba2Canon"] = "Mamba2Canon"
    num_heads: PositiveInt
    head_dim: PositiveInt
    state_size: PositiveInt
    expand: PositiveFloat = 2
    conv_kernel: PositiveInt = 4
    noconv1d: bool = False
    use_conv_bias: bool
    layer_norm_epsilon: float = 1e-5
    mlp_type: Literal["mlp10"] | None = None
    intermediate_size: PositiveInt | None = None
    initializer_range: float = 0.1
    bos_token_id: int | None = 0

    hidden_act: Literal["silu"] = "silu"
    n_groups: Literal[1] = 1
    rms_norm: Literal[True] = True
    use_bias: Literal[False] = False
    residual_in_fp32: Literal[False] = False
    time_step_limit: list[float] = [0.0, math.inf]
    time_step_rank: Any = "auto"
    time_step_min: Any = 0.001
    time_step_max: Any = 0.1
    time_step_floor: Any = 1e-4
    rescale_prenorm_residual: Any = False
    chunk_size: Any = 256
    norm_eps: Any = 1e-5
    fuse_cross_entropy: Any = False

    @field_validator("time_step_limit")
    @classmethod
    def _no_limit(cls, value: list[float]) -> list[float]:
        if value != [0.0, math.inf]:
            raise expected("params.time_step_limit", "[0.0, Infinity]", value)
        return value

    def derived(self) -> dict[str, Any]:
        if self.use_conv_bias == self.noconv1d:
            raise expected(
                "params.use_conv_bias", f"{not self.noconv1d} with noconv1d = {self.noconv1d}", self.use_conv_bias
            )
        if (inner := int(self.expand * self.hidden_size)) != self.num_heads * self.head_dim:
            raise expected(
                "params.head_dim", f"expand * hidden_size / num_heads = {inner / self.num_heads:g}", self.head_dim
            )
        return {
            "canon_set": sites(self.canon_set, not self.noconv1d, without="" if self.mlp_type else _OF_ANY_MLP),
            "mlp": "gated" if self.mlp_type else "none",
            "intermediate_size": self.intermediate_size or 2 * self.hidden_size,
            **_NO_ATTENTION,
        }

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        options = config.options(0)
        own = {
            "expand": ratio(options.num_heads * options.head_dim, config.hidden_size),
            "noconv1d": SHORT_CONV not in config.sites(0),
            "use_conv_bias": SHORT_CONV in config.sites(0),
            "n_groups": options.n_groups,
            "mlp_type": None if config.mlp == "none" else "mlp10",
            "intermediate_size": config.intermediate_size,
        }
        return {**super().of(config), **own}

    def names(self) -> Names:
        convolved = self.num_heads * self.head_dim + 2 * self.state_size
        return Names(
            top={"backbone.embeddings": "model.embed_tokens", "backbone.norm_f": "model.norm", "lm_head": "lm_head"},
            layers="backbone.layers",
            layer={
                **as_named("canonA", "canonC", "mlp.down_proj"),
                "norm": "input_layernorm",
                "mixer.in_proj": "mixer.z_proj mixer.x_proj mixer.B_proj mixer.C_proj mixer.dt_proj",
                "mixer.canonB": "mixer.canonB_z mixer.canonB_x mixer.canonB_B mixer.canonB_C mixer.canonB_dt",
                "mixer.conv1d": "mixer.x_conv1d mixer.B_conv1d mixer.C_conv1d",
                **as_named("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm", "mixer.out_proj"),
                "pre_mlp_layernorm": "post_attention_layernorm",
                "mlp.both_proj": _BOTH,
                "mlp.canonD": "mlp.canonD_gate mlp.canonD_up",
            },
            unread={"mixer.conv1d.weight": (convolved, 1, self.conv_kernel)} if self.noconv1d else {},
        )

    def dump(self) -> dict[str, Any]:
        return {key: value for key, value in super().dump().items() if (key, value) != ("mlp_type", None)}
