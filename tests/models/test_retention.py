"""Retention, with fixed and with gated decays, against its parallel form: (Q K^T * D) V, all pairs at once."""

import pytest
import torch
from torch.testing import assert_close

from canonlm.models.cache import Layout

TIME = 19


def fixed(mixer, x_BTD):
    """D_ts = gamma^(t - s), with one gamma per head."""
    gamma_H11 = torch.tensor([1 - 1 / 32, 1 - 1 / 64], dtype=torch.float64).view(2, 1, 1)
    steps = torch.arange(TIME)
    return gamma_H11 ** (steps[:, None] - steps).clamp(min=0)


def gated(mixer, x_BTD):
    """D_ts = the product of the decays after s up to t."""
    decay_BHT = torch.sigmoid(x_BTD @ mixer.decay_proj.weight.T).pow(1 / 16).transpose(1, 2)
    rows = [[decay_BHT[..., s + 1 : t + 1].prod(-1) for s in range(TIME)] for t in range(TIME)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


@pytest.mark.parametrize(("name", "decays"), [("retention", fixed), ("gated_retention", gated)])
def test_mixing_equals_the_parallel_form(small_model, name, decays):
    mixer, seen = small_model(mixers=[name]).model.layers[0].mixer, []
    mixer.o_norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    x_BTD = torch.randn(2, TIME, 32, dtype=torch.float64)
    mixer(x_BTD, Layout())
    q, k, v = (
        torch.nn.functional.silu(mixer.get_submodule(f"{name}_proj")(x_BTD)).unflatten(-1, (2, -1)).transpose(1, 2)
        for name in "qkv"
    )
    o_BHTV = (q @ k.mT * 16**-0.5 * decays(mixer, x_BTD)).tril() @ v
    assert_close(seen[0], o_BHTV.transpose(1, 2), atol=1e-12, rtol=0)
