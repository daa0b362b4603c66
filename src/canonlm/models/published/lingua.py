"""Configurations of the release's training runs: Meta lingua's arguments, under `model` in params.json."""

from dataclasses import replace
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from canonlm.canon.sites import SHORT_CONV
from canonlm.core.errors import expected, unknown
from canonlm.models.config import CanonLMConfig
from canonlm.models.published.format import Published, Release, round_up
from canonlm.models.published.linear import GatedDeltaNetCanon, GLACanon, Mamba2Canon
from canonlm.models.published.llama import LlamaCanon, pairs_to_halves
from canonlm.models.published.rename import Names

_LINEAR = {"GLA5": "gla", "GDN2": "gdn", "Mamba2": "mamba2"}
"""Our mixers by `model_name`, which a Llama does not have."""

_LAYER = {
    **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attention.canonB": "self_attn.canonB_q self_attn.canonB_k self_attn.canonB_v",
    **{f"feed_forward.w{i}": f"mlp.{x}_proj" for i, x in ((1, "gate"), (3, "up"), (2, "down"))},
    "feed_forward.canonD": "mlp.canonD_gate mlp.canonD_up",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "canonA": "canonA",
    "canonC": "canonC",
}


class Lingua(Published):
    vocab_size: PositiveInt
    dim: PositiveInt
    n_layers: PositiveInt
    model_name: str | None = None
    n_heads: PositiveInt | None = None
    n_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_dim: PositiveInt | None = None
    ffn_dim_multiplier: PositiveFloat | None = None
    multiple_of: PositiveInt = 256
    mlp_type: Literal["mlp10"] | None = None
    mamba_ssm: Literal[64, 128, 256] | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    rope_theta: PositiveFloat = 10000.0
    rope_dim: PositiveInt | None = None
    canon_set: str = ""
    canon_bias: Literal[False] = False
    canon_kernel: PositiveInt = 4
    canon_residual: bool = True
    canon_activation: bool = False
    weight_tying: bool = False
    z_loss: bool = False
    init_base_std: PositiveFloat | None = None
    init_std_factor: str = "disabled"
    max_seqlen: PositiveInt = 1024
    zeyuan_layernorm: bool = False

    sliding_window: None = None
    attn_impl: Any = "sdpa"
    seed: Any = 42

    @model_validator(mode="after")
    def _is_a_family(self) -> "Lingua":
        if self.model_name and self.model_name not in _LINEAR:
            raise unknown("model_name", self.model_name, _LINEAR)
        if self.n_heads is None and (self.model_name or self.head_dim is None):
            raise expected("params.n_heads", "an integer > 0", None)
        return self

    def release(self) -> Release:
        """The configuration of the class in the style of transformers that computes the same."""
        heads = self.n_heads or self.dim // (self.head_dim or self.dim)
        canon_keys = ("canon_set", "canon_bias", "canon_kernel", "canon_residual", "canon_activation")
        common = {
            **{key: getattr(self, key) for key in canon_keys},
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "tie_word_embeddings": self.weight_tying,
        }
        linear = {**common, "num_heads": heads, "norm_eps": self.norm_eps, "fuse_cross_entropy": False}
        gated = {
            **linear,
            "intermediate_size": self.hidden_dim or 2 * self.dim,
            "expand_v": 2,
            "output_gate_rank": 16,
            "use_short_conv": SHORT_CONV in self.canon_set,
            "zeyuan_layernorm": self.zeyuan_layernorm,
        }
        match self.model_name:
            case "GLA5":
                return GLACanon.parse({**gated, "expand_k": 1})
            case "GDN2":
                return GatedDeltaNetCanon.parse({**gated, "head_dim": self.dim // heads})
            case "Mamba2":
                conv = {"noconv1d": SHORT_CONV not in self.canon_set, "use_conv_bias": SHORT_CONV in self.canon_set}
                sizes = {"head_dim": 2 * self.dim // heads, "state_size": self.mamba_ssm or 256}
                mlp = {"mlp_type": self.mlp_type, "intermediate_size": self.hidden_dim}
                return Mamba2Canon.parse({**linear, **conv, **sizes, **mlp})
        head_dim = self.head_dim or self.dim // heads
        usual_width = int((self.ffn_dim_multiplier or 1) * int(2 * 4 * self.dim / 3))
        own = {
            "num_attention_heads": heads,
            "num_key_value_heads": self.n_kv_heads or heads,
            "head_dim": head_dim,
            "intermediate_size": self.hidden_dim or round_up(usual_width, self.multiple_of),
            "qk_norm": self.qk_norm,
            "rms_norm_eps": self.norm_eps,
            "rope_version": "lingua",
            "rope_theta": self.rope_theta,
            "rope_dim": self.rope_dim,
            "partial_rotary_factor": (self.rope_dim or head_dim) / head_dim,
            "max_position_embeddings": self.max_seqlen,
        }
        return LlamaCanon.parse({**common, **own})

    def config(self) -> CanonLMConfig:
        initial = {"init_base_std": self.init_base_std, "init_std_factor": self.init_std_factor}
        return self.release().config(
            z_loss="squared_nll" if self.z_loss else None,
            max_position_embeddings=self.max_seqlen,
            **({} if self.model_name else {"initializer": "truncated", **initial}),
        )

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        same = ("vocab_size", "canon_bias", "canon_kernel", "canon_residual", "canon_activation")
        params = {
            **{key: getattr(config, key) for key in same},
            "canon_set": config.sites(0),
            "dim": config.hidden_size,
            "n_layers": config.num_hidden_layers,
            "hidden_dim": config.intermediate_size,
            "norm_eps": config.rms_norm_eps,
            "weight_tying": config.tie_word_embeddings,
            "z_loss": config.z_loss == "squared_nll",
            "max_seqlen": config.max_position_embeddings,
        }
        if config.mixers[0] == "attention":
            own = ("qk_norm", "rope_theta", "rope_dim", "head_dim", "init_base_std", "init_std_factor")
            heads = {"n_heads": config.num_attention_heads, "n_kv_heads": config.num_key_value_heads}
            return {**params, **{key: getattr(config, key) for key in own}, **heads}
        return {
            **params,
            "model_name": next(name for name, mixer in _LINEAR.items() if mixer == config.mixers[0]),
            "n_heads": config.options(0).num_heads,
            "zeyuan_layernorm": config.zeyuan_layernorm,
            "mlp_type": "mlp10" if config.mixers[0] == "mamba2" and config.mlp == "gated" else None,
            "mamba_ssm": config.options(0).state_size if config.mixers[0] == "mamba2" else None,
        }

    def dump(self) -> dict[str, Any]:
        linear_only = {"model_name", "mlp_type", "mamba_ssm", "zeyuan_layernorm"}  # unknown to the release's Llama
        return self.model_dump(exclude=None if self.model_name else linear_only)

    def names(self) -> Names:
        if self.model_name:
            return replace(self.release().names(), prefix="trans.")
        head = "output.tied_module" if self.weight_tying else "output"
        return Names(
            top={"tok_embeddings": "model.embed_tokens", "norm": "model.norm", head: "lm_head"},
            layers="layers",
            layer=_LAYER,
            orders=pairs_to_halves(self.config()),
        )
