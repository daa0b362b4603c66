"""Gated retention against its parallel form: (Q K^T * D) V with D_ts = product of the decays after s up to t."""

import torch
from torch.testing import assert_close

from canonlm.models.cache import Layout


def test_mixing_equals_the_parallel_form(small_model):
    model = small_model(mixers=["gated_retention"])
    mixer, seen = model.model.layers[0].mixer, []
    mixer.o_norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    x_BTD = torch.randn(2, 19, 32, dtype=torch.float64)
    mixer(x_BTD, Layout())
    q, k, v = (
        torch.nn.functional.silu(mixer.get_submodule(f"{name}_proj")(x_BTD)).unflatten(-1, (2, -1)).transpose(1, 2)
        for name in "qkv"
    )
    decay_BHT = torch.sigmoid(x_BTD @ mixer.decay_proj.weight.T).pow(1 / 16).transpose(1, 2)
    o_BHTV = torch.zeros_like(v)
    for t in range(19):
        for s in range(t + 1):
            between = decay_BHT[..., s + 1 : t + 1].prod(-1)
            score = (q[:, :, t] * k[:, :, s]).sum(-1) * 16**-0.5 * between
            o_BHTV[:, :, t] += score[..., None] * v[:, :, s]
    assert_close(seen[0], o_BHTV.transpose(1, 2), atol=1e-12, rtol=0)
