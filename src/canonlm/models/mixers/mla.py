"""Multi-head latent attention: keys and values of all heads are made from one short vector per token, the latent.

    c_t = norm(W_c x_t),    r_t = R_t W_r x_t,    [k_th; v_th] = W_b,h c_t,    [q_th; p_th] = W_q,h x_t
    y_th = sum_{s <= t} softmax_s((q_th . k_sh + (R_t p_th) . r_s) / sqrt(N + P)) v_sh,    out_t = W_o y_t

R_t rotates by the position t. DeepSeek-V2 (arXiv 2405.04434), Eq. 9 to 19; with `q_lora_rank`, W_q has two factors and
a norm between them. Decoding keeps c and r only. In a step of one token W_b moves to the query and to the output
(Section 2.1.2): scores are (W_k,h^T q_th) . c_s, and values are W_v,h sum_s p_ths c_s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.layer import untouched
from canonlm.canon.sites import OF_MIXER
from canonlm.core.errors import expected
from canonlm.models.attend import Outputs, mean_reach
from canonlm.models.cache import Layout
from canonlm.models.mixers.attention import Attention
from canonlm.models.mixers.base import DERIVED, Architecture, Mixer, Options, register
from canonlm.models.norm import RMSNorm
from canonlm.models.positions import Rotary, rotate
from canonlm.models.settings import Config


@dataclass
class LatentOptions(Options):
    """`kv_lora_rank`: of the latent (default: 4 * head_dim). `q_lora_rank`: of the queries' projection (None: full).
    `qk_nope_head_dim`, `v_head_dim`: of a head's keys and values (default: head_dim). Keys have `rope_dim` more."""

    kv_lora_rank: int = DERIVED
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = DERIVED
    v_head_dim: int = DERIVED

    def complete(self, config: Config) -> None:
        size = config.head_dim
        self.derive(kv_lora_rank=4 * size, qk_nope_head_dim=size, v_head_dim=size)
        if self.q_lora_rank is not None:
            self.check_positive("q_lora_rank")


@register("mla")
class LatentAttention(Attention):
    """Named as DeepSeek-V3's, whose `kv_a_proj_with_mqa` is `kv_a_proj` and `k_rope_proj` in one."""

    Options = LatentOptions
    has_qkv = False
    rope_share = 0.5
    ignores = ("num_key_value_heads",)
    architectures: ClassVar = {
        "mla": Architecture(
            "multi-head latent attention (arXiv 2405.04434): a short vector for keys and values of all heads"
        )
    }
    tensor_parallel: ClassVar = {
        **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "g_proj"), "columns"),
        **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj", "kv_a_layernorm", "k_rope_proj"), "complete"),
        **dict.fromkeys(("canonB_latent", "canonB_rope"), "complete"),
        **{"sinks": "channels", "o_proj": "rows"},
    }
    tensor_parallel_divides = ("num_attention_heads",)

    def __init__(self, config: Config, layer_idx: int) -> None:
        Mixer.__init__(self, config, layer_idx)
        o, hidden, bias = config.options(layer_idx), config.hidden_size, config.attention_bias
        heads, self.rope_dim = config.num_attention_heads, config.rope_dim
        self.key_dims, self.value_dim = [o.qk_nope_head_dim, self.rope_dim], o.v_head_dim
        self.scaling, self.num_key_value_groups = sum(self.key_dims) ** -0.5, 1
        q_size = heads * sum(self.key_dims)
        if o.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, q_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, o.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(o.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(o.q_lora_rank, q_size, bias=False)
        self.kv_a_proj = nn.Linear(hidden, o.kv_lora_rank, bias=bias)
        self.kv_a_layernorm = RMSNorm(o.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(o.kv_lora_rank, heads * (self.key_dims[0] + self.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, hidden, bias=bias)
        if self.rope_dim:
            self.k_rope_proj = nn.Linear(hidden, self.rope_dim, bias=bias)
        self.add_options(heads * self.value_dim)
        self.add_canons({"q": q_size, "latent": o.kv_lora_rank} | ({"rope": self.rope_dim} if self.rope_dim else {}))

    @classmethod
    def check(cls, config: Config) -> None:
        if config.qk_norm:
            raise expected("qk_norm", "false with mla, which normalises its latents", True)
        if config.rope_heads != config.num_attention_heads:
            raise expected("rope_heads", "all heads with mla, where they share the rotated key", config.rope_heads)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        o = config.options_of(cls)
        widths = o.qk_nope_head_dim + config.rope_dim + o.v_head_dim
        return 2 * config.num_attention_heads * widths * mean_reach(config, seq_len, cls.name)

    def heads(self, x_BTD: Tensor, layout: Layout, rotary: Rotary, cache: Cache | None) -> Sequence[Tensor]:
        """Queries `[B, H, T, N + P]`, and what all heads share: c `[B, 1, T, C]` and r `[B, 1, T, P]`."""
        q = self.q_proj(x_BTD) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        inputs = {"q": q, "latent": self.kv_a_layernorm(self.kv_a_proj(x_BTD))}
        inputs |= {"rope": self.k_rope_proj(x_BTD)} if self.rope_dim else {}
        q, c_BTC, *rest = self.run(OF_MIXER, inputs, layout, cache, x_BTD).values()
        q_BTHE, c_BT1C = q.unflatten(-1, (-1, sum(self.key_dims))), c_BTC[:, :, None]
        r_BT1P = self.shared(rest[0])[:, :, None] if rest else c_BT1C[..., :0]
        if rotary is not None and rest:
            q_BTHN, p_BTHP = q_BTHE.split(self.key_dims, dim=-1)
            p_BTHP, r_BT1P = (rotate(x, *rotary, x.shape[2]) for x in (p_BTHP, r_BT1P))
            q_BTHE = torch.cat([q_BTHN, p_BTHP], dim=-1)
        return [x.transpose(1, 2) for x in (q_BTHE, c_BT1C, r_BT1P)]

    def sums(self, kernel: Callable[..., Outputs], q_BHTE: Tensor, c_B1SC: Tensor, r_B1SP: Tensor) -> Outputs:
        heads, sizes = q_BHTE.shape[1], [self.key_dims[0], self.value_dim]
        c_BHSC, r_BHSP = (x.expand(-1, heads, -1, -1) for x in (c_B1SC, r_B1SP))
        # Wrapped layers (LoRA, quantized, offloaded) have to be called, and flash attention takes no wide heads.
        plain = type(self.kv_b_proj) is nn.Linear and untouched(self.kv_b_proj)
        if q_BHTE.shape[2] == 1 and plain and self.config._attn_implementation in ("sdpa", "eager"):
            k_HNC, v_HVC = self.kv_b_proj.weight.unflatten(0, (heads, -1)).split(sizes, dim=1)
            q_BHTN, p_BHTP = q_BHTE.split(self.key_dims, dim=-1)
            q_BHTF = torch.cat([torch.einsum("bhtn,hnc->bhtc", q_BHTN, k_HNC), p_BHTP], dim=-1)
            y_BTHC, weights = kernel(q_BHTF, torch.cat([c_BHSC, r_BHSP], dim=-1), c_BHSC)
            return torch.einsum("bthc,hvc->bthv", y_BTHC, v_HVC), weights
        k_BHSN, v_BHSV = self.kv_b_proj(c_B1SC[:, 0]).unflatten(-1, (heads, -1)).transpose(1, 2).split(sizes, dim=-1)
        return kernel(q_BHTE, torch.cat([k_BHSN, r_BHSP], dim=-1), v_BHSV)
