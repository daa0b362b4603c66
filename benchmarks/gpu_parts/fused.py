"""Kernels that do several operations in one pass, against the same operations one after the other; and their tuning."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from canonlm.ops.causal_conv import causal_conv
from canonlm.ops.kernels import api, launches
from canonlm.ops.kernels import tune as tuning
from gpu_parts.conv import KERNEL, REPLAYED
from gpu_parts.device import Device
from gpu_parts.rows import Row, not_available

SIZES = {"cuda": (8, 4096, 2048, 512, 5632), "cpu": (1, 8, 32, 16, 48)}  # batch, time, hidden, keys, width of the MLP
BATCHES = {"cuda": (1, 64), "cpu": (2,)}
EPS = 1e-5


def tune(device: Device, out: Path) -> Iterator[Row]:
    """The first candidate of a kernel is its built-in launch. The file of the best is kept with the results."""
    batch, time, hidden, _, width = SIZES[device.kind]
    for name in tuning.CANDIDATES if device.is_gpu else ("forward",):
        took: list[float] = []

        def measure(call: Callable[[], object], took: list[float] = took) -> float:
            took.append(device.median_us({"": call}, seconds=0.05)[""])
            return took[-1]

        best = tuning.tune(batch, time, hidden, width, KERNEL, names=(name,), measure=measure)
        [launch] = best.values()
        settings = {"kernel": name, "channels": launch.channels, "warps": launch.warps, "rows": launch.rows}
        settings |= {"stages": launch.stages, "tokens": launch.tokens}
        yield Row("fastest launch", settings, min(took), "us", more={"built-in": took[0], "tried": len(took)})
        shutil.copy(launches.tuned_path(), out / "kernels.json")


def fused(device: Device, out: Path) -> Iterator[Row]:
    batch, time, hidden, keys, width = SIZES[device.kind]
    where = f"{batch}x{time}"
    x, branch, gate, up = (device.randn(batch, time, c) for c in (hidden, hidden, width, width))
    q, k, v = (device.randn(batch, time, c) for c in (hidden, keys, keys))
    norm = torch.ones(hidden, device=device.device)
    taps = {c: device.randn(c, KERNEL, dtype=torch.float32) / 2 for c in (hidden, keys, width)}
    pairs: dict[str, tuple[str, list[Tensor], dict[str, Callable]]] = {
        "Canon, act(gate) * up": (
            f"{where}x{width}",
            [gate, up, taps[width], taps[width].clone()],
            {
                "fused": lambda gate, up, g, u: [api.gated(gate, up, [g, u])],
                "unfused": lambda gate, up, g, u: [gated(*api.canon([gate, up], [g, u]))],
                "PyTorch forms": lambda gate, up, g, u: [gated(pytorch(gate, g), pytorch(up, u))],
                "without Canon": lambda gate, up, g, u: [gated(gate, up)],
            },
        ),
        "add, norm, Canon": (
            f"{where}x{hidden}",
            [x, branch, norm, taps[hidden]],
            {
                "fused": lambda x, b, n, t: api.normed(x, b, n, EPS, t),
                "unfused": lambda x, b, n, t: [x + b, api.canon([normed(x + b, n)], [t])[0]],
                "PyTorch forms": lambda x, b, n, t: [x + b, pytorch(normed(x + b, n), t)],
                "without Canon": lambda x, b, n, t: [x + b, normed(x + b, n)],
            },
        ),
        "Canon on q, k, v": (
            f"{where}x({hidden}+{keys}+{keys})",
            [q, k, v, taps[hidden], taps[keys], taps[keys].clone()],
            {
                "fused": lambda q, k, v, *w: api.canon([q, k, v], w),
                "unfused": lambda q, k, v, *w: [api.canon([y], [t])[0] for y, t in zip((q, k, v), w, strict=True)],
                "PyTorch forms": lambda q, k, v, *w: [pytorch(y, t) for y, t in zip((q, k, v), w, strict=True)],
            },
        ),
    }
    for name, (shape, inputs, forms) in pairs.items():
        yield from compared(device, name, shape, inputs, forms)
    for size in BATCHES[device.kind]:
        yield from decoding(device, size, hidden, keys, width, taps, norm)


def pytorch(x: Tensor, taps: Tensor) -> Tensor:
    return x + causal_conv(x, taps[:, None])


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight.shape, weight.to(x.dtype), EPS)


def compared(device: Device, name: str, shape: str, inputs: list[Tensor], forms: dict[str, Callable]) -> Iterator[Row]:
    forward, backward = {}, {}
    for form, call in forms.items():
        try:
            leaves = [x.detach().requires_grad_() for x in inputs]
            ys = call(*leaves)
            dys = [torch.ones_like(y) for y in ys]
            back = partial(torch.autograd.grad, ys, leaves, dys, retain_graph=True, allow_unused=True)
            back()
        except Exception as error:
            yield not_available(name, {"shape": shape, "form": form}, error)
            continue
        forward[form], backward[form] = torch.no_grad()(partial(call, *inputs)), back
    for direction, calls in {"forward": forward, "backward": backward}.items():
        took = device.median_us(calls)
        for form, us in took.items():
            yield Row(f"{direction}: {name}", {"shape": shape, "form": form}, us, "us")
        if {"fused", "unfused"} <= took.keys():
            faster = took["unfused"] / took["fused"]
            row_name = f"{direction}: fused, times as fast as unfused"
            yield Row(row_name, {"of": name}, faster, "x", target=">= 1")


def decoding(
    device: Device, batch: int, hidden: int, keys: int, width: int, taps: dict[int, Tensor], norm: Tensor
) -> Iterator[Row]:
    """The Canon layers of one decoder layer, for one new token, in a CUDA graph."""
    x, q, k, v, gate, up = (device.randn(batch, 1, c) for c in (hidden, hidden, keys, keys, width, width))
    wide = [taps[hidden], taps[keys], taps[keys]]
    states = [device.randn(batch, c, KERNEL) for c in (hidden, hidden + 2 * keys, hidden, 2 * width)]
    thirds = [*states[1].split([hidden, keys, keys], dim=1)]
    halves = [*states[3].split([width, width], dim=1)]

    def fused() -> None:
        api.normed_step(x, None, norm, EPS, taps[hidden], states[0])
        api.step([q, k, v], wide, states[1])
        api.normed_step(x, None, norm, EPS, taps[hidden], states[2])
        api.gated_step(gate, up, [taps[width], taps[width]], states[3])

    def unfused() -> None:
        api.step([normed(x, norm)], [taps[hidden]], states[0])
        for y, tap, state in zip((q, k, v), wide, thirds, strict=True):
            api.step([y], [tap], state)
        api.step([normed(x, norm)], [taps[hidden]], states[2])
        gated(*(api.step([y], [taps[width]], state)[0] for y, state in zip((gate, up), halves, strict=True)))

    def pytorch_step(y: Tensor, tap: Tensor, state: Tensor) -> Tensor:
        out = y + causal_conv(y, tap[:, None], state_BCK=state)
        state.copy_(torch.cat([state[..., 1:], y.transpose(1, 2)], dim=-1))
        return out

    def pytorch_forms() -> None:
        pytorch_step(normed(x, norm), taps[hidden], states[0])
        for y, tap, state in zip((q, k, v), wide, thirds, strict=True):
            pytorch_step(y, tap, state)
        pytorch_step(normed(x, norm), taps[hidden], states[2])
        gated(*(pytorch_step(y, taps[width], state) for y, state in zip((gate, up), halves, strict=True)))

    def without() -> None:
        normed(x, norm)
        normed(x, norm)
        gated(gate, up)

    calls: dict[str, Callable[[], object]] = {}
    steps = {"fused": fused, "unfused": unfused, "PyTorch forms": pytorch_forms, "without Canon": without}
    with torch.no_grad():
        for form, step in steps.items():
            try:
                step()
                calls[form] = device.captured(step, REPLAYED)
            except Exception as error:
                yield not_available("step of a layer", {"batch": batch, "form": form}, error)
        for form, us in device.median_us(calls).items():
            yield Row("step of a layer", {"batch": batch, "form": form}, us / REPLAYED, "us")
