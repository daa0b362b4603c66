"""Retention against the paper's parallel form: (Q K^T * D) V, all pairs of tokens at once."""

import torch
from torch.testing import assert_close

from canonlm.models.cache import Layout


def test_mixing_equals_the_parallel_form(small_model):
    model = small_model(mixers=["retention"])
    mixer, seen = model.model.layers[0].mixer, []
    mixer.o_norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    x_BTD = torch.randn(2, 19, 32, dtype=torch.float64)
    mixer(x_BTD, Layout())
    q, k, v = (
        torch.nn.functional.silu(mixer.get_submodule(f"{name}_proj")(x_BTD)).unflatten(-1, (2, -1)).transpose(1, 2)
        for name in "qkv"
    )
    steps = torch.arange(19)
    distance = steps[:, None] - steps
    gamma_H11 = torch.tensor([1 - 1 / 32, 1 - 1 / 64], dtype=torch.float64).view(2, 1, 1)
    decay_HTS = torch.where(distance >= 0, gamma_H11 ** distance.clamp(min=0), 0.0)
    o_BHTV = (q @ k.mT * 16**-0.5 * decay_HTS) @ v
    assert_close(seen[0], o_BHTV.transpose(1, 2), atol=1e-12, rtol=0)
