"""Small models of transformers, with Canon layers and without."""

from typing import Any

import torch
from transformers import PreTrainedModel

import canonlm
from canonlm.models.hf_small_configs import causal_config
from canonlm.models.interface import Sizes

SIZES = Sizes(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=61, seq_len=64)
KINDS = {
    "llama": "ABCDOME",
    "qwen3": "ABCD",
    "mistral": "KVOM:scaled",
    "gemma2": "ABCD",
    "gpt2": "ABCD",
    "gpt_neox": "ABCD",
    "phi3": "ABCD",
    "olmo2": "ABCD",
    "cohere": "ABCD",
    "falcon": "ABCD",
    "bloom": "ABCD",
    "opt": "ABCD",
    "mixtral": "ABCM",
    "qwen2_moe": "ABC",
    "deepseek_v3": "ABCD",
    "mamba": "ABO",
    "jamba": "ABCD",
    "lfm2": "ABCD",
}
"""Hosts, and the sites that they are tested with."""

DOUBLE = torch.float64
PACKED = {"position_ids": torch.cat([torch.arange(4), torch.arange(6)])[None].expand(2, -1), "use_cache": False}
SINGLE = ("mixtral", "qwen2_moe", "deepseek_v3", "jamba")
"""Hosts with routed experts, which the library supports in single precision only."""


def host(kind: str, dtype: torch.dtype = DOUBLE, **fields: Any) -> PreTrainedModel:
    """A small host."""
    layers = {"jamba": 4, "lfm2": 4}.get(kind, 2)
    sizes = Sizes(layers, SIZES.hidden_size, SIZES.num_attention_heads, SIZES.vocab_size, SIZES.seq_len, fields)
    model_class, config = causal_config(f"hf:{kind}", sizes)
    model: Any = model_class
    torch.manual_seed(0)
    return spread(model._from_config(config, dtype=torch.float32 if kind in SINGLE else dtype))


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, with weights large enough that a wrong token shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.shape[1] ** -0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def with_taps(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with Canon layers that are not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "canon_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def canonized(kind: str, sites: str | None = None, **options: Any) -> PreTrainedModel:
    return with_taps(canonlm.canonize(host(kind, **options), sites or KINDS[kind]))


def ids(batch: int = 2, time: int = 10, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, SIZES.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **options).logits


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
