"""Mixers against their equations: the delta rule as products of matrices, one token after the other, and retention."""

import pytest
import torch
from torch.nn.functional import normalize, silu, softplus
from torch.testing import assert_close

from canonlm.models.cache import Layout

HEADS, KEYS = 2, 16
RANKS = [("kda", "decay_rank"), ("kda", "output_gate_rank"), ("rwkv7", "decay_rank"), ("rwkv7", "gate_rank")]
CASES = {
    "gdn": {},
    "gdn with negative eigenvalues": {"negative_eigenvalues": True},
    "delta_vec": {},
    "delta_vec with negative eigenvalues": {"negative_eigenvalues": True},
    "deltaproduct": {},
    "deltaproduct of three": {"steps": 3, "negative_eigenvalues": False},
}


def by_equations(mixer, x_TD, kind, steps, largest):
    """`o`, `[T, H, V]`."""

    def of_heads(name, count=HEADS):
        return silu(mixer.get_submodule(f"{name}_proj")(x_TD)).unflatten(-1, (count, -1))

    q, k, v = of_heads("q"), of_heads("k", steps * HEADS), of_heads("v", steps * HEADS)
    b = largest * mixer.b_proj(x_TD).sigmoid().unflatten(-1, (steps * HEADS, -1))  # of one channel, or of K
    w = mixer.w_proj(x_TD).sigmoid().view_as(v) if kind == "delta_vec" else b
    rates = softplus(mixer.a_proj(x_TD) + mixer.dt_bias).unflatten(-1, (HEADS, -1))
    decays = (-mixer.A_log.exp()[:, None] * rates).exp().expand(-1, -1, KEYS)
    out = torch.zeros(len(x_TD), HEADS, v.shape[-1], dtype=torch.float64)
    for h in range(HEADS):
        state = torch.zeros(KEYS, v.shape[-1], dtype=torch.float64)
        for t in range(len(x_TD)):
            state = decays[t, h].diag() @ state
            for i in range(h, steps * HEADS, HEADS):  # a token's steps, one after the other
                key = normalize(k[t, i], dim=0)
                step = torch.eye(KEYS, dtype=torch.float64) - torch.outer(key, b[t, i] * key)
                state = step @ state + torch.outer(key, w[t, i] * v[t, i])
            out[t, h] = normalize(q[t, h], dim=0) @ state / KEYS**0.5
    return out


@pytest.mark.parametrize("case", CASES)
def test_mixing_equals_the_equations(small_model, case):
    kind, _, more = case.partition(" ")
    model = small_model(mixers=[kind], mixer_options={kind: CASES[case]})
    mixer, seen = model.model.layers[0].mixer, []
    mixer.o_norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    x_BTD = torch.randn(1, 37, 32, dtype=torch.float64)
    steps = {"deltaproduct": 2, "deltaproduct of three": 3}.get(case, 1)
    largest = 2 if "negative" in more or case == "deltaproduct" else 1
    with torch.no_grad():
        mixer(x_BTD, Layout())
        expected = by_equations(mixer, x_BTD[0], kind, steps, largest)
    assert_close(seen[0][0], expected, atol=1e-5, rtol=0)  # the norm of keys adds a constant, 1e-6
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize(("kind", "rank"), RANKS)
def test_a_rank_of_zero_is_not_the_default(small_model, kind, rank):
    with pytest.raises(ValueError, match=rf"{kind}\.{rank}: expected an integer >= 1, got 0"):
        small_model(mixers=[kind], mixer_options={kind: {rank: 0}})


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
def test_retention_equals_the_parallel_form(small_model, name, decays):
    """(Q K^T * D) V, all pairs at once, with fixed and with gated decays."""
    mixer, seen = small_model(mixers=[name]).model.layers[0].mixer, []
    mixer.o_norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    x_BTD = torch.randn(2, TIME, 32, dtype=torch.float64)
    mixer(x_BTD, Layout())
    q, k, v = (
        silu(mixer.get_submodule(f"{name}_proj")(x_BTD)).unflatten(-1, (2, -1)).transpose(1, 2) for name in "qkv"
    )
    o_BHTV = (q @ k.mT * 16**-0.5 * decays(mixer, x_BTD)).tril() @ v
    assert_close(seen[0], o_BHTV.transpose(1, 2), atol=1e-12, rtol=0)
