"""A Llama with Canon layers at A, B, C and D, in plain PyTorch: the definition of the model, top to bottom.

Canon layers let every token also read its three predecessors, channel by channel (Physics of Language Models, Part 4.1,
arXiv 2512.17351). The package computes the same faster, with caches, packed documents, padding and other mixers; a test
holds it equal to this file. Parameters have the names of `CanonLMForCausalLM`, so that weights load by name.

Shapes: B batch, T time, D hidden_size, H heads, E channels of a head, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Config:
    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1365
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    canon_kernel: int = 4


class Canon(nn.Module):
    """y_t = x_t + w_0 x_t + w_1 x_{t-1} + … + w_{K-1} x_{t-K+1}, with one tap w_i per channel and distance."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))  # the last tap is that of the current token
        nn.init.uniform_(self.weight, -(kernel**-0.5), kernel**-0.5)

    def forward(self, x_BTC: Tensor) -> Tensor:
        channels, _, kernel = self.weight.shape
        x_BCT = nn.functional.pad(x_BTC.transpose(1, 2), (kernel - 1, 0))  # tokens before the first are zeros
        return x_BTC + nn.functional.conv1d(x_BCT, self.weight, groups=channels).transpose(1, 2)


class RMSNorm(nn.Module):
    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x_BTHE: Tensor, theta: float) -> Tensor:
    """Rotary positions: the pair of channels (i, i + E/2) of token t turns by the angle t * theta^(-2i / E)."""
    time, half = x_BTHE.shape[1], x_BTHE.shape[-1] // 2
    wide = torch.promote_types(x_BTHE.dtype, torch.float32)  # in bfloat16 256 and 257 are one number
    i, t = (torch.arange(size, dtype=wide, device=x_BTHE.device) for size in (half, time))
    angle_T1I = (t[:, None] * theta ** (-i / half))[:, None]
    a, b, cos, sin = x_BTHE[..., :half], x_BTHE[..., half:], angle_T1I.cos(), angle_T1I.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BTHE.dtype)


class Attention(nn.Module):
    """Causal attention; Canon-B is on queries, keys and values, before the rotation."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.theta = config.hidden_size // config.num_attention_heads, config.rope_theta
        width, kv_width = config.hidden_size, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.canonB_q = Canon(width, config.canon_kernel)
        self.canonB_k = Canon(kv_width, config.canon_kernel)
        self.canonB_v = Canon(kv_width, config.canon_kernel)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q = self.canonB_q(self.q_proj(x_BTD)).unflatten(-1, (-1, self.head_dim))
        k = self.canonB_k(self.k_proj(x_BTD)).unflatten(-1, (-1, self.head_dim))
        v = self.canonB_v(self.v_proj(x_BTD)).unflatten(-1, (-1, self.head_dim))
        q_BHTE, k_BHTE, v_BHTE = (x.transpose(1, 2) for x in (rotate(q, self.theta), rotate(k, self.theta), v))
        y_BHTE = nn.functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True, enable_gqa=True)
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); Canon-D is on gate and up, before the nonlinearity."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.canonD_gate = Canon(config.intermediate_size, config.canon_kernel)
        self.canonD_up = Canon(config.intermediate_size, config.canon_kernel)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.canonD_gate(self.gate_proj(x_BTD)), self.canonD_up(self.up_proj(x_BTD))
        return self.down_proj(nn.functional.silu(gate) * up)


class Block(nn.Module):
    """Canon-A is on the input of attention, Canon-C on that of the MLP, each after its norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.canonA = Canon(config.hidden_size, config.canon_kernel)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.canonC = Canon(config.hidden_size, config.canon_kernel)
        self.mlp = MLP(config)

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = h_BTD + self.self_attn(self.canonA(self.input_layernorm(h_BTD)))
        return h_BTD + self.mlp(self.canonC(self.post_attention_layernorm(h_BTD)))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        h_BTD = self.embed_tokens(input_ids_BT)
        for block in self.layers:
            h_BTD = block(h_BTD)
        return self.norm(h_BTD)


class LlamaCanon(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        """The logits `[B, T, V]` of the token after each."""
        return self.lm_head(self.model(input_ids_BT))


if __name__ == "__main__":
    model = LlamaCanon(Config())
    print(model)
    print(model(torch.randint(0, 32000, (1, 16))).shape)
