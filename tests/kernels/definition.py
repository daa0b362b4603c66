"""The definition of the kernels, in plain loops over rows and tokens, in float64."""

import torch
from torch.nn import functional

ACTS = {
    "none": lambda z: z,
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}


def conv(x, taps, bias=None, state=None, docs=None, mask=None, residual=True, activation="none", scale=1.0):
    """`[B, T, C]`; the state, which belongs to the first token's document, or zeros precede each row."""
    kernel, taps = taps.shape[-1], taps.reshape(x.shape[-1], -1).unbind(1)
    shape, x = x.shape, [row.unbind() for row in x.unbind()]  # the gradient of x[b, t] would be as large as x
    rows = []
    for b in range(shape[0]):
        for t in range(shape[1]):
            z = torch.zeros_like(x[b][t]) if bias is None else bias
            for back in range(kernel):
                past = t - back
                if docs is not None and docs[b, max(past, 0)] != docs[b, t]:
                    break
                z = z + taps[kernel - 1 - back] * input_at(x, state, mask, b, past)
            z = ACTS[activation](z)
            rows.append(scale * (z + input_at(x, state, mask, b, t)) if residual else scale * z)
    return torch.stack(rows).reshape(shape)


def input_at(x, state, mask, b, t):
    if t >= 0:
        return x[b][t] if mask is None or mask[b, t] else 0 * x[b][t]
    if state is not None and -t <= state.shape[2]:
        return state[b, :, state.shape[2] + t]
    return torch.zeros_like(x[b][0])


def final_state(x, kernel, state=None, docs=None, mask=None):
    """`[B, C, K]`, the last K inputs up to each row's last real token, zero for other documents."""
    rows = []
    for b in range(x.shape[0]):
        real = [t for t in range(x.shape[1]) if mask is None or mask[b, t]]
        end, columns = (real[-1] if real else -1), []
        for back in range(kernel):
            apart = docs is not None and end >= 0 and docs[b, max(end - back, 0)] != docs[b, end]
            column = input_at(x, state, mask, b, end - back)
            columns.append(0 * column if apart else column)
        rows.append(torch.stack(columns[::-1], dim=-1))
    return torch.stack(rows)


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(z, angles, heads, head_dim, absolute=False):
    """`[B, T, C]`: channels i and i + H of the first heads as complex numbers, times e^(i angle)."""
    parts, pairs = [], angles.shape[-1]
    for head, x in enumerate(z.split(head_dim, dim=-1)):
        if head < heads:
            a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
            if absolute:
                real = imag = a + b
            else:
                both = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, :, 0]
                real, imag = both.real, both.imag
            x = torch.cat([real, imag, x[..., 2 * pairs :]], dim=-1)
        parts.append(x)
    return torch.cat(parts, dim=-1)
