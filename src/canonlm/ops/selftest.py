"""Checks kernels on this machine: each is tried once, on small random inputs, against the recurrence that it computes.

Compilers and kernels have computed wrong numbers, and wrong gradients of right numbers, on some GPUs and in some
versions. A trial detects that on the machine in use, without a list of versions.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from canonlm.core import user_folders
from canonlm.ops.compiled import cached_constant

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Max error of results, relative to the largest entry, by the precision of the inputs."""

SHAPE = (2, 70, 2)
"""Rows, tokens and heads of the inputs: more tokens than a chunk has, and no multiple of it."""

WIDTHS = {"cuda": 64, "cpu": 16}
"""Channels of a head, by device: what kernels are made for, and what is quick."""

Inputs = tuple[dict[str, Tensor], Tensor]
"""In float64: arguments by name, and the state before the first token."""


@dataclass(frozen=True)
class Kernel:
    """A form of an op, and the definition that it is compared with.

    name: as users see it. fast, definition: called with the inputs by name, `state` and `doc_ids`, they return the
    output and the state after it. inputs: makes them from a generator and the number of channels of a head. wide:
    inputs that stay in float32 (decays, gates). differentiable: False for kernels that only decoding uses; their
    gradients are not tried.
    """

    name: str
    fast: Callable[..., tuple[Tensor, Tensor]]
    definition: Callable[..., tuple[Tensor, Tensor]]
    inputs: Callable[[torch.Generator, int], Inputs]
    wide: tuple[str, ...] = ()
    differentiable: bool = True


class Errors(NamedTuple):
    """The largest errors of a trial, divided by the limit of the precision: at most 1 is right. Infinite for NaN, and
    if the kernel raised an error, which `detail` contains."""

    values: float
    gradients: float
    detail: str = ""


def attempt(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Errors:
    """Run the kernel on ordinary inputs, on packed documents, and on decays that erase the state, and compare.

    OSError: it cannot be tried, as a compiler's cache cannot be written or a file of its own is missing.
    """
    values = gradients = 0.0
    for index, doc_ids in enumerate((None, _documents())):
        generator = torch.Generator().manual_seed(index)
        inputs, state = kernel.inputs(generator, WIDTHS.get(device.type, 64))
        rounded = {name: x.to(torch.float32 if name in kernel.wide else dtype) for name, x in inputs.items()}
        weights = None
        if kernel.differentiable:
            shapes = _shapes(kernel, inputs)
            weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        true = _results(kernel.definition, {n: x.double() for n, x in rounded.items()}, state, doc_ids, weights)
        on_device = {name: x.to(device) for name, x in rounded.items()}
        try:
            with torch.autocast(device.type, enabled=False):
                got = _results(
                    kernel.fast,
                    on_device,
                    state.float().to(device),
                    None if doc_ids is None else doc_ids.to(device),
                    weights,
                )
        except OSError:
            raise
        except Exception as error:  # a compiler's, a driver's or a package's own
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            return Errors(torch.inf, torch.inf, detail[:200])
        errors = [_error(one, other) / LIMITS[dtype] for one, other in zip(got, true, strict=True)]
        values, gradients = max(values, *errors[:2]), max([gradients, *errors[2:]])
    return Errors(values, gradients)


def judge(kernel: Kernel) -> Callable[..., bool]:
    """A function of (with_gradients, device type, dtype of the inputs) that returns whether the kernel is right on this
    machine; by default in bfloat16 on a GPU.

    The first call tries the kernel, which takes seconds; the result is cached for these versions. A warning names a
    wrong kernel once. To a compiler the result is a constant.
    """

    @cached_constant
    def is_right(with_gradients: bool, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> bool:
        try:
            errors = _in_new_thread(lambda: known(kernel, torch.device(device), dtype))
            right = errors.values <= 1 and (errors.gradients <= 1 or not with_gradients)
            wrong = errors.detail or f"its {'gradients' if errors.values <= 1 else 'values'} are off"
            what = f"is wrong on this machine ({wrong})"
        except OSError as error:
            right, what = False, f"could not be tried on this machine ({error})"
        if not right:
            warnings.warn(
                f"{kernel.name} {what}, so the PyTorch form is used, which is slower; "
                "`canonlm doctor` shows all kernels",
                stacklevel=2,
            )
        return right

    return is_right


def _in_new_thread(call: Callable[[], Errors]) -> Errors:
    """Run `call` in a new thread, outside the caller's contexts: inference mode, the hooks by which activation
    checkpointing counts saved tensors, modes that count operations or compute with fake tensors."""
    card = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> Errors:
        if card is not None:
            torch.cuda.set_device(card)
        return call()

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(run).result()


def known(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Errors:
    """The errors of a kernel on this machine: recorded in the user's cache, or else tried and recorded. OSError: it
    cannot be tried."""
    return recorded(kernel, device, dtype) or record(kernel, device, dtype, attempt(kernel, device, dtype))


def recorded(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Errors | None:
    notes = _read(file) if (file := _notes()) else {}
    key = _key(kernel, device, dtype)
    return Errors(*notes[key]) if key in notes else None


def record(kernel: Kernel, device: torch.device, dtype: torch.dtype, errors: Errors) -> Errors:
    """`errors`, which are recorded where that is possible: on a full disk the kernel is tried again next time."""
    if file := _notes():
        with suppress(OSError):
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
                json.dump({**_read(file), _key(kernel, device, dtype): list(errors)}, new)
            os.replace(new.name, file)
    return errors


def _notes() -> Path | None:
    place = user_folders.cache()
    return place / "kernel-trials.json" if place else None


def _key(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    return f"{kernel.name}, {str(dtype).removeprefix('torch.')}, {fingerprint(device)}"


def versions() -> dict[str, str]:
    """The versions of the installed packages that results depend on."""
    installed = {}
    for name in ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def fingerprint(device: torch.device) -> str:
    """A hash of everything that a trial depends on: the kind of device, the versions and our code."""
    card: object = "cpu"
    if device.type == "cuda":  # not all properties: the uuid differs between GPUs of a kind
        kind = torch.cuda.get_device_properties(device)
        card = kind.name, kind.major, kind.minor, kind.total_memory, kind.multi_processor_count
    return hashlib.sha256(json.dumps([card, torch.version.cuda, versions(), _code()]).encode()).hexdigest()[:16]


@functools.cache
def _code() -> str:
    """A hash of the kernels and definitions beside this module."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _results(call, inputs: dict[str, Tensor], state: Tensor, doc_ids: Tensor | None, weights: list[Tensor] | None):
    """Output, state, and the gradients of a sum of both, of every input (weights None: no gradients)."""
    if weights is None:
        return list(call(**inputs, state=state, doc_ids=doc_ids))
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    first = state.detach().requires_grad_()
    with torch.enable_grad():
        y, final = call(**leaves, state=first, doc_ids=doc_ids)
        total = (y * weights[0].to(y)).sum() + (final * weights[1].to(final)).sum()
        return [y, final, *torch.autograd.grad(total, [*leaves.values(), first])]


def _shapes(kernel: Kernel, inputs: dict[str, Tensor]) -> list[torch.Size]:
    with torch.no_grad():
        meta = {name: x.to("meta") for name, x in inputs.items()}
        return [x.shape for x in kernel.definition(**meta, state=None, doc_ids=None)]


def _error(one: Tensor, other: Tensor) -> float:
    difference = (one.detach().cpu().double() - other.detach().cpu()).abs().max()
    return float((difference / other.detach().abs().max().clamp(min=1e-30)).nan_to_num(nan=torch.inf))


def _documents() -> Tensor:
    ids = torch.zeros(SHAPE[:2], dtype=torch.long)
    ids[0, 40:], ids[0, 41:], ids[1, 64:] = 1, 2, 1
    return ids


def as_form(op: Callable[..., tuple[Tensor, Tensor]], state_name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A recurrence, called as a `Kernel` calls its forms. state_name: of its argument for the state."""
    return lambda state, doc_ids, **inputs: op(*inputs.values(), **{state_name: state}, doc_ids_BT=doc_ids)


def states(generator: torch.Generator, width: int) -> Tensor:
    """Random states before the first tokens: `[rows, heads, width, width]`."""
    return normal(generator, SHAPE[0], SHAPE[2], width, width)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def log_decays(generator: torch.Generator, *shape: int) -> Tensor:
    """Random log-decays: most are mild, some erase the state, some keep all of it."""
    g = torch.nn.functional.logsigmoid(normal(generator, *shape) + 2)
    draw = torch.rand(shape, generator=generator)
    return torch.where(draw < 0.03, -40.0, torch.where(draw > 0.97, 0.0, g))


def _read(file: Path) -> dict[str, tuple[float, float, str]]:
    try:
        notes = json.loads(file.read_text())
        return {key: (float(v), float(g), str(d)) for key, (v, g, d) in notes.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
