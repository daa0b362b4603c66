"""Estimates for runs before they start: work, memory, micro-batches and time of one run; work and time of many."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from canonlm.core.errors import expected, unknown
from canonlm.train import data
from canonlm.train.build import build_model, pick_device, sizes_of
from canonlm.train.config import RunConfig
from canonlm.train.flops import GPUS, flops_per_token, peak_flops_of
from canonlm.train.memory import Device, Memory
from canonlm.train.mesh import check_layout
from canonlm.train.optim import build_optimizer

USABLE = 0.9
"""The usable share of a GPU's memory; the rest is for memory that `canonlm.train.memory` leaves out."""

TRIAL_TOKENS, TRIAL_STEPS = 4096, 6  # to measure this machine's speed

HOUR = 60 * 60  # in seconds
DAY = 24 * HOUR


@dataclass(frozen=True)
class Plan:
    parameters: int
    tokens: int
    flops_per_token: float  # forward and backward
    shards: int  # number of devices over which one copy of weights and optimizer state is sharded
    windows: int  # windows that a device processes per step
    micro_batch: int  # windows that a device processes at once
    memory: Memory  # of a device, with that micro-batch
    usable: float  # of a device's memory, in bytes
    peak: float  # of a device, FLOP/s
    days: float

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_per_token

    @property
    def accumulation(self) -> int:
        return self.windows // self.micro_batch


@dataclass(frozen=True)
class Cost:
    """The cost of several runs together."""

    runs: int
    tokens: int
    flops: float  # forward and backward
    hours: float  # of one GPU


def cost(runs: Iterable[RunConfig], gpu: str = "h100", mfu: float = 0.4) -> Cost:
    """The cost of these runs on one GPU, one after another; models of one architecture and size are counted once. `mfu`
    as in `make_plan`. ValueError: no such GPU."""
    _check(gpu, mfu)
    counted: dict[str, float] = {}
    number, tokens, flops, hours = 0, 0, 0.0, 0.0
    for run in runs:
        key = f"{run.arch} {sizes_of(run)}"
        if key not in counted:
            counted[key] = flops_per_token(build_model(run, "meta"), run.data.seq_len)
        work = tokens_of(run) * counted[key]
        number, tokens, flops = number + 1, tokens + tokens_of(run), flops + work
        hours += work / (mfu * peak_flops_of(gpu, run.train.precision)) / HOUR
    return Cost(number, tokens, flops, hours)


def measure_speed(runs: Sequence[RunConfig]) -> float:
    """FLOP/s of training on this machine, measured on some steps of the run of median size, with fewer windows per
    step if its steps are large."""
    by_work = sorted(runs, key=lambda run: run.model.num_hidden_layers * run.model.hidden_size * tokens_of(run))
    run = by_work[len(by_work) // 2]
    device = torch.device(pick_device(run.train.device))
    threads = torch.get_num_threads()
    torch.set_num_threads(run.train.num_threads or threads)
    model = build_model(run)
    module: Any = model.module
    module.to(device)
    optimizer = build_optimizer(module, run.train.optim)
    windows = min(run.train.batch_size, max(1, TRIAL_TOKENS // run.data.seq_len))
    input_ids = torch.randint(sizes_of(run).vocab_size, (windows, run.data.seq_len), device=device)
    seconds = []
    for _ in range(TRIAL_STEPS):
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=run.train.precision == "bf16"):
            loss = model.loss(input_ids, input_ids, None, float(input_ids.numel())).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return input_ids.numel() * flops_per_token(model, run.data.seq_len) / statistics.median(seconds[1:])


def tokens_of(run: RunConfig) -> int:
    """The tokens that a run reads in training."""
    return run.train.steps * run.train.batch_size * run.data.seq_len


def _check(gpu: str, mfu: float) -> None:
    if gpu not in GPUS:
        raise unknown("GPU", gpu, GPUS, "GPUs", meant=[gpu.lower()] if gpu.lower() in GPUS else [])
    if not 0 < mfu <= 1:
        raise expected("--mfu", "a number > 0 and <= 1", mfu)


def with_vocabulary(run: RunConfig) -> RunConfig:
    """The run, with the size of the vocabulary from its text if it is not set."""
    return data.complete(run) if run.model.vocab_size is None else run


def make_plan(run: RunConfig, gpus: int, gpu: str, mfu: float = 0.4) -> Plan:
    """The plan with the run's `parallel.micro_batch_size`, or else the largest that fits. `mfu`: the share of the peak
    that training reaches. ValueError: no such GPU, a layout that does not divide, or a run that cannot fit."""
    _check(gpu, mfu)
    if gpus < 1:
        raise expected("--gpus", "an integer >= 1", gpus)
    check_layout(run, gpus)
    model = build_model(run, "meta")
    model.check_tensor_parallel(run.parallel.tp)
    device, usable = Device(model, run, gpus), USABLE * GPUS[gpu].memory * 2**30
    sizes = [run.parallel.micro_batch_size or n for n in range(device.windows, 0, -1) if device.windows % n == 0]
    plans = [(size, device.memory(size)) for size in sizes]
    micro_batch, memory = next((plan for plan in plans if plan[1].total <= usable), plans[-1])
    if memory.total > usable:
        raise ValueError(_does_not_fit(run, memory, usable, micro_batch, gpu))
    tokens = tokens_of(run)
    per_token, peak = flops_per_token(model, run.data.seq_len), peak_flops_of(gpu, run.train.precision)
    return Plan(
        parameters=model.num_parameters, tokens=tokens, flops_per_token=per_token, shards=device.shards,
        windows=device.windows, micro_batch=micro_batch, memory=memory, usable=usable, peak=peak,
        days=tokens * per_token / (gpus * peak * mfu) / DAY,
    )  # fmt: skip


def _does_not_fit(run: RunConfig, memory: Memory, usable: float, micro_batch: int, gpu: str) -> str:
    """A one-line error, with advice for the largest part."""
    parts = asdict(memory)
    largest = max(parts, key=parts.__getitem__)
    if largest != "activations":
        advice = "more --gpus, or a larger --gpu"
    elif run.parallel.activation_checkpointing != "full":
        advice = "parallel.activation_checkpointing=full"
    else:
        advice = "a smaller parallel.micro_batch_size" if micro_batch > 1 else "a shorter data.seq_len"
    windows = "1 window" if micro_batch == 1 else f"{micro_batch} windows"
    need = f"{readable(memory.total)} with {windows} at a time, {readable(parts[largest])} of it {largest}"
    return f"memory: expected at most {readable(usable)} of a GPU ({gpu}), got {need}. Try {advice}"


def readable(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
