"""Mamba-3 against its equations with complex numbers, one token after the other; and what such a state can count."""

import math

import pytest
import torch
from torch.nn.functional import rms_norm, silu, softplus
from torch.testing import assert_close

from canonlm.models.cache import Layout
from canonlm.ops.varlen import as_documents

HEADS, SIZE = 2, 16


def by_equations(mixer, u_TD, rank, groups, angles):
    """The output. The state itself turns here, in complex numbers: pairs that do not turn have an angle of zero."""

    def linear(name):
        return u_TD @ mixer.get_parameter(f"{name}_proj.weight").T

    def complex_vectors(name):
        by_group = linear(name).view(-1, rank, groups, SIZE)
        normed = rms_norm(by_group, (SIZE,), mixer.get_parameter(f"{name}_norm.weight"), 1e-5)
        real = normed.repeat_interleave(HEADS // groups, dim=2) + mixer.get_parameter(f"{name}_bias")
        turning, still = real[..., : 2 * angles], real[..., 2 * angles :]
        pairs = torch.complex(turning[..., :angles], turning[..., angles:])
        return torch.cat([pairs, torch.complex(still, torch.zeros_like(still))], dim=-1)

    B, C = complex_vectors("B"), complex_vectors("C")
    z, x = (linear(name).view(len(u_TD), 1, HEADS, -1) for name in "zx")
    scale_x, scale_z, scale_out = (getattr(mixer, f"mimo_{name}", torch.ones(1)) for name in ("x", "z", "out"))
    z, x = z * scale_z, x * scale_x
    dt = softplus(linear("dt") + mixer.dt_bias)
    A, trap = -softplus(linear("A")).clamp(min=1e-4), linear("trap").sigmoid()
    theta = math.pi * linear("angle").tanh() if angles else torch.zeros(len(u_TD), 0, dtype=torch.float64)
    theta = torch.nn.functional.pad(theta, (0, B.shape[-1] - angles))
    y = torch.zeros(len(u_TD), rank, HEADS, x.shape[-1], dtype=torch.float64)
    for h in range(HEADS):
        state = torch.zeros(x.shape[-1], B.shape[-1], dtype=torch.complex128)
        before = torch.zeros_like(state)
        for t in range(len(u_TD)):
            turn = torch.exp(dt[t, h] * (A[t, h] - 1j * theta[t]))
            now = sum(torch.outer(x[t, r, h], B[t, r, h]) for r in range(rank))
            state = turn * (state + (1 - trap[t, h]) * dt[t, h] * before) + trap[t, h] * dt[t, h] * now
            before = now
            for r in range(rank):
                y[t, r, h] = (state @ C[t, r, h].conj()).real + mixer.D[h] * x[t, r, h]
    return (scale_out * y * silu(z)).sum(1).flatten(1) @ mixer.out_proj.weight.T


@pytest.fixture
def mixer(small_model):
    def make(**options):
        mixer = (
            small_model(mixers=["mamba3"], mixer_options={"mamba3": {"state_size": SIZE, **options}})
            .model.layers[0]
            .mixer
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in mixer.parameters():
                if parameter.ndim != 2:
                    parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        return mixer

    return make


@pytest.mark.parametrize(("rank", "groups", "angles"), [(1, 1, 4), (1, 2, 8), (3, 1, 4), (2, 2, 0), (1, 1, 0)])
def test_a_layer_equals_the_equations(mixer, rank, groups, angles):
    layer = mixer(mimo_rank=rank, n_groups=groups, num_angles=angles)
    u_BTD = torch.randn(1, 90, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = by_equations(layer, u_BTD[0], rank, groups, angles)
        got = layer(u_BTD, Layout())[0][0]
    assert_close(got, expected, atol=1e-10, rtol=0)
    assert expected.abs().max() > 0.1


def test_the_token_before_is_not_of_another_document(mixer):
    u_BTD = torch.randn(1, 9, 32, dtype=torch.float64)
    docs = torch.tensor([[0] * 4 + [1] * 5])
    layer = mixer(mimo_rank=2)
    with torch.no_grad():
        packed = layer(u_BTD, Layout(documents=as_documents(docs)))[0]
        alone = [layer(part, Layout())[0] for part in u_BTD.split([4, 5], dim=1)]
    assert_close(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("angles", [8, 0])
def test_a_state_that_turns_by_pi_counts_ones_modulo_two(mixer, angles):
    """A first token is written, each one turns it by pi. Without angles the output cannot change its sign."""
    layer = mixer(num_angles=angles)
    weights = dict(layer.named_parameters())
    with torch.no_grad():
        for parameter in weights.values():
            parameter.zero_()
        weights["B_bias"].fill_(1)
        weights["C_bias"].fill_(1)
        weights["dt_bias"].fill_(math.log(math.e - 1))  # dt = 1
        start, one, always = range(3)
        weights["A_proj.weight"][:, always] = -50
        weights["trap_proj.weight"][:, always] = 50
        weights["z_proj.weight"][:, always] = 1
        weights["x_proj.weight"][:, start] = 1
        weights["out_proj.weight"][0, 0] = 1
        if angles:
            weights["angle_proj.weight"][:, one] = 50
    ones = torch.randint(2, (1, 999), generator=torch.Generator().manual_seed(0))
    u_BTD = torch.zeros(1, 1000, 32, dtype=torch.float64)
    u_BTD[0, 0, start], u_BTD[0, 1:, one], u_BTD[..., always] = 1, ones[0].double(), 1
    with torch.no_grad():
        y = layer(u_BTD, Layout())[0][0, 1:, 0]
    odd = ones[0].cumsum(0) % 2 == 1
    assert odd.any()
    assert torch.equal(y < 0, odd if angles else torch.zeros_like(odd))
    assert y.abs().min() > 0.1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("mimo_rank", 0, r"mamba3\.mimo_rank: expected an integer >= 1, got 0"),
        ("num_angles", 9, r"mamba3\.num_angles: expected an integer from 0 to state_size / 2 = 8, got 9"),
        ("num_angles", -1, r"mamba3\.num_angles: expected an integer from 0 to state_size / 2 = 8, got -1"),
    ],
)
def test_what_it_refuses(mixer, option, value, message):
    with pytest.raises(ValueError, match=message):
        mixer(**{option: value})
