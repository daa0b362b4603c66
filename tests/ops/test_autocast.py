"""Autocast is for projections: the dtypes of the inputs decide the precision of recurrences."""

import pytest
import torch
from torch.testing import assert_close

from canonlm.ops.gated_delta_rule import gated_delta_rule
from canonlm.ops.gated_linear_attention import gated_linear_attention
from canonlm.ops.ssd import ssd


def inputs_of(op, dtype):
    def random(*shape):
        return torch.randn(2, 40, *shape, generator=generator)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (random(3, 8).to(dtype) / 3 for _ in range(3))
    if op is ssd:
        return v, random(3).exp(), -torch.ones(3), k[:, :, :1], q[:, :, :1]
    if op is gated_delta_rule:
        return q, k, v, -random(3).exp(), random(3).sigmoid()
    return q, k, v, -random(3, 8).exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [gated_linear_attention, gated_delta_rule, ssd])
def test_autocast_rounds_no_state(op, dtype):
    inputs = inputs_of(op, dtype)
    expected = op(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = op(*inputs)
        with torch.no_grad():
            (one, state) = op(*(x if x.ndim == 1 else x[:, :1] for x in inputs))
    assert_close(got, expected, atol=0, rtol=0)
    assert (got[0].dtype, got[1].dtype) == (dtype, torch.float32)
    assert (one.dtype, state.dtype) == (dtype, torch.float32)
