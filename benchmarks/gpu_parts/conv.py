"""Canon's convolution alone: forward, backward and a decoding step, against every other form at hand and a copy.

Bytes are the minimum that a form must move: x and y forward; x, dy and dx backward. The copy moves as many as the
forward.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from canonlm.ops.causal_conv import causal_conv
from canonlm.ops.kernels import api
from canonlm.ops.kernels.documents import reach_of
from gpu_parts.device import Device
from gpu_parts.rows import Row, not_available

KERNEL = 4
SHAPES = {  # batch, time, channels, documents of a row
    "cuda": [(1, 16384, 12288, 1), (8, 4096, 2048, 1), (64, 512, 1024, 1), (1, 16384, 12288, 64)],
    "cpu": [(1, 24, 40, 1), (1, 24, 40, 4)],
}
STEPS = {"cuda": [(1, 2048), (64, 2048), (1, 12288), (64, 12288)], "cpu": [(2, 40)]}  # batch, channels
REPLAYED = 20  # decoding steps in one graph
GOALS = {"forward": 0.85, "backward": 0.75}  # of the copy's speed
FLA = ("fla.modules.causal_conv1d", "fla.modules.conv", "fla.modules.convolution")  # where its versions have the op

ACTIVATIONS = ("none", "silu")
FORMS = (
    "PyTorch form",
    "kernel",
    "conv1d, channels last",
    "conv1d, time last, with the copies",
    "fla",
    "causal-conv1d",
)

Form = Callable[[Tensor, Tensor], Tensor]
"""x [B, T, C] and the weight [C, K] to y. Without an activation it is x + conv(x), with one act(conv(x))."""


def conv(device: Device, out: Path) -> Iterator[Row]:
    for shape in SHAPES[device.kind]:
        for activation in ACTIVATIONS:
            yield from one_shape(device, *shape, activation, [name for name in FORMS if name != "fla"])
    for batch, channels in STEPS[device.kind]:
        yield from decoding(device, batch, channels)


def fla(device: Device, out: Path) -> Iterator[Row]:
    """Its kernels try 16 configurations for every shape, so all cores compile those beforehand, and it comes late."""
    try:
        fla_op("causal_conv1d")
    except ImportError as error:
        yield not_available("flash-linear-attention", {}, error)
        return
    processes = min(os.cpu_count() or 1, 16)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for shape in SHAPES[device.kind]:
            for activation in ACTIVATIONS:
                parts = [(device.kind, shape, activation, part, processes) for part in range(processes)]
                list(pool.map(compile_fla, *zip(*parts, strict=True)))
                yield from one_shape(device, *shape, activation, ["kernel", "fla"])


def compile_fla(kind: str, shape: tuple[int, int, int, int], activation: str, part: int, parts: int) -> None:
    """With every `parts`-th configuration: Triton keeps what it compiles on disk."""
    for name, tuner in vars(sys.modules[fla_op("causal_conv1d").__module__]).items():
        while name.endswith("_kernel") and not hasattr(tuner, "configs") and hasattr(tuner, "fn"):
            tuner = tuner.fn
        if hasattr(tuner, "configs"):
            tuner.configs = tuner.configs[part::parts] or tuner.configs[:1]
    x, weight, dy, starts = inputs(Device(kind), *shape)
    form = fla_form(activation, starts)
    assert not isinstance(form, str)
    with suppress(Exception):  # `one_shape` meets it again
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        torch.autograd.grad(form(*leaves), leaves, dy)


def one_shape(
    device: Device, batch: int, time: int, channels: int, documents: int, activation: str, names: list[str]
) -> Iterator[Row]:
    settings = {"shape": f"{batch}x{time}x{channels}", "documents": documents, "activation": activation}
    x, weight, dy, starts = inputs(device, batch, time, channels, documents)
    exact = None
    copied = torch.empty_like(x)
    calls: dict[str, dict[str, Callable]] = {"forward": {"copy": lambda: copied.copy_(x)}, "backward": {}}
    off: dict[str, float] = {}
    for name, form in forms(activation, starts, time).items():
        if name not in names:
            continue
        if isinstance(form, str):
            yield not_available(f"conv, {name}", settings, form)
            continue
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        try:
            y = form(*leaves)
            torch.autograd.grad(y, leaves, dy, retain_graph=True)
        except Exception as error:  # of a compiler, or of a package that is not ours
            yield not_available(f"conv, {name}", settings, error)
            continue
        exact = y.detach() if exact is None else exact
        off[name] = float((y.detach() - exact).abs().max() / exact.abs().max())
        calls["forward"][name] = torch.no_grad()(partial(form, x, weight))
        calls["backward"][name] = partial(torch.autograd.grad, y, leaves, dy, retain_graph=True)
    took = {direction: device.median_us(timed) for direction, timed in calls.items()}
    copy = 2 * x.nbytes / took["forward"].pop("copy")
    yield Row("copy", settings, 2 * x.nbytes / copy, "us", more={"TB/s": copy / 1e6})
    for direction, units in (("forward", 2), ("backward", 3)):
        for name, us in took[direction].items():
            speed = units * x.nbytes / us
            more = {"TB/s": speed / 1e6, "of the copy": speed / copy}
            if off[name] > 0.03:
                more["off"] = off[name]  # of the largest number: it does not compute the same
            yield Row(f"{direction}, {name}", settings, us, "us", more=more)
        if "kernel" in took[direction]:
            us = took[direction].pop("kernel")
            share = units * x.nbytes / us / copy
            yield Row(f"{direction}: share of the copy's speed", settings, share, "", target=f">= {GOALS[direction]}")
            if others := [other for name, other in took[direction].items() if name in ("fla", "causal-conv1d")]:
                name = f"{direction}: times as fast as the best other"
                yield Row(name, settings, min(others) / us, "x", target=">= 1")


def inputs(
    device: Device, batch: int, time: int, channels: int, documents: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, weight, the gradient of y, and where documents begin."""
    x, dy = device.randn(batch, time, channels), device.randn(batch, time, channels)
    starts = torch.linspace(0, time, documents + 1, device=device.device).int() if documents > 1 else None
    return x, device.randn(channels, KERNEL) / 2, dy, starts


def forms(activation: str, starts: Tensor | None, time: int) -> dict[str, Form | str]:
    """Each, or why it is not available. The first is what the others are compared with."""
    act = functional.silu if activation == "silu" else None
    if starts is None:
        doc_ids = reach = None
    else:
        places = torch.arange(time, device=starts.device)
        doc_ids = torch.searchsorted(starts.long(), places, right=True)[None]
        reach = reach_of(doc_ids)

    def finished(x: Tensor, y: Tensor) -> Tensor:
        return x + y if act is None else act(y)

    def pytorch(x: Tensor, weight: Tensor) -> Tensor:
        return finished(x, causal_conv(x, weight[:, None], doc_ids_BT=doc_ids))

    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        return api.canon([x], [weight], reach=reach, residual=act is None, activation=activation)[0]

    def conv1d(x: Tensor, weight: Tensor, time_last: bool) -> Tensor:
        x_BCT = x.transpose(1, 2)
        x_BCT = x_BCT.contiguous() if time_last else x_BCT
        y = functional.conv1d(x_BCT, weight[:, None], padding=KERNEL - 1, groups=x.shape[2])[..., : x.shape[1]]
        return finished(x, y.transpose(1, 2))

    none = "it knows no documents"
    return {  # by the names of FORMS
        "PyTorch form": pytorch,
        "kernel": kernel,
        "conv1d, channels last": partial(conv1d, time_last=False) if starts is None else none,
        "conv1d, time last, with the copies": partial(conv1d, time_last=True) if starts is None else none,
        "fla": fla_form(activation, starts),
        "causal-conv1d": causal_conv1d_form(activation, doc_ids),
    }


def fla_op(name: str) -> Callable:
    for module in FLA:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            why = error
    raise ImportError(f"flash-linear-attention: {why}")


def fla_form(activation: str, starts: Tensor | None) -> Form | str:
    try:
        op = fla_op("causal_conv1d")
    except ImportError as error:
        return str(error)

    def form(x: Tensor, weight: Tensor) -> Tensor:
        how: dict[str, Any] = {"residual": x} if activation == "none" else {"activation": activation}
        return op(x, weight, backend="triton", cu_seqlens=starts, **how)[0]

    return form


def causal_conv1d_form(activation: str, doc_ids: Tensor | None) -> Form | str:
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError as error:
        return str(error)
    seq_idx = None if doc_ids is None else doc_ids.int()

    def form(x: Tensor, weight: Tensor) -> Tensor:
        act = None if activation == "none" else activation
        y = causal_conv1d_fn(x.transpose(1, 2), weight, seq_idx=seq_idx, activation=act).transpose(1, 2)
        return x + y if act is None else y

    return form


def decoding(device: Device, batch: int, channels: int) -> Iterator[Row]:
    """One new token in a CUDA graph: x + conv of the state's last tokens, which moves on."""
    settings = {"batch": batch, "channels": channels}
    x, weight = device.randn(batch, 1, channels), device.randn(channels, KERNEL) / 2
    state = device.randn(batch, channels, KERNEL)
    last = state[..., 1:].clone()

    def pytorch() -> Tensor:
        y = x + causal_conv(x, weight[:, None], state_BCK=state)
        state.copy_(torch.cat([state[..., 1:], x.transpose(1, 2)], dim=-1))
        return y

    def fla_step() -> Tensor:
        return fla_op("causal_conv1d_update")(x, state, residual=x, weight=weight)

    def causal_conv1d_step() -> Tensor:
        from causal_conv1d import causal_conv1d_update

        return x[:, 0] + causal_conv1d_update(x[:, 0], last, weight)

    def kernel() -> Tensor:
        return api.step([x], [weight], state)[0]

    calls = {}
    steps = {"PyTorch form": pytorch, "kernel": kernel, "fla": fla_step, "causal-conv1d": causal_conv1d_step}
    with torch.no_grad():
        for name, step in steps.items():
            try:
                step()
                calls[name] = device.captured(step, REPLAYED)
            except Exception as error:
                yield not_available(f"step, {name}", settings, error)
        for name, us in device.median_us(calls).items():
            yield Row(f"step, {name}", settings, us / REPLAYED, "us")
