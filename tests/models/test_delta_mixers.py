"""The mixers of the delta rule against their equations, one token after the other, as products of matrices."""

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
