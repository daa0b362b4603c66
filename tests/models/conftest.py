"""A small decoder with weights large enough that greedy choices are clear."""

import pytest
import torch

from canonlm import CanonLMConfig, CanonLMForCausalLM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _fresh_randomness():
    torch.manual_seed(0)


@pytest.fixture
def small_model():
    """`small_model(dtype, **config)`: deterministic weights, evaluation mode."""

    def make(dtype=torch.float64, **config):
        model = CanonLMForCausalLM(CanonLMConfig(**{**SIZES, **config})).to(dtype).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * noise)
                elif "canon" in name and set(parameter.unique().tolist()) <= {0.0, 1.0}:
                    parameter.copy_(0.5 * noise)  # layers that start as the identity would test nothing
                elif parameter.ndim == 2 or "bias" in name or "sinks" in name or "query" in name:
                    parameter.copy_(noise * (1.0 if "embed" in name else parameter.shape[-1] ** -0.5))
        return model

    return make
