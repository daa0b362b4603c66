"""Estimates for runs: work, memory, micro-batches and time of one run before it starts; work and time of many; the
time that is left while they train."""

import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from canonlm.core.errors import expected, unknown
from canonlm.core.user_code import reference_of
from canonlm.models.build import build
from canonlm.models.interface import Sizes
from canonlm.models.names import resolve
from canonlm.models.state import State
from canonlm.train import data
from canonlm.train.build import build_model, pick_device, sizes_of, slow_width
from canonlm.train.config import RunConfig
from canonlm.train.flops import GPUS, flops_per_token, peak_flops_of
from canonlm.train.memory import Device, Memory
from canonlm.train.mesh import check_layout
from canonlm.train.optim import build_optimizer
from canonlm.train.traffic import NETWORK, Traffic, traffic

USABLE = 0.9
"""The usable share of a GPU's memory; the rest is for memory that `canonlm.train.memory` leaves out."""

TRIAL_TOKENS, TRIAL_STEPS = 4096, 6  # to measure this machine's speed

MFU = 0.4
"""The assumed share of a device's peak that training reaches."""

START_SECONDS = 10.0
"""Seconds from the start of a process to its first step."""

HOUR = 60 * 60  # in seconds
DAY = 24 * HOUR


@dataclass(frozen=True)
class Plan:
    parameters: int
    tokens: int
    flops_per_token: float  # forward and backward
    only_projections: bool  # of some layers, `LanguageModel.only_projections`
    shards: int  # number of devices over which one copy of weights and optimizer state is sharded
    windows: int  # windows that a device processes per step
    micro_batch: int  # windows that a device processes at once
    memory: Memory  # of a device, with that micro-batch
    usable: float  # of a device's memory, in bytes
    peak: float  # of a device, FLOP/s
    days: float  # of steps that take the longer of computing and sending
    traffic: Traffic  # of a device, in a step
    sending: float  # seconds of a step
    computing: float  # the same
    width: str  # advice on the MLP's width, if any
    state: State | None  # of one sequence of data.seq_len tokens

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

    @property
    def cpu_hours(self) -> float:
        """Hours of one process with one thread on this machine, at `MFU` of its measured peak."""
        return self.flops / (MFU * _cpu_peak()) / HOUR if self.flops else 0.0


def cost(runs: Iterable[RunConfig], gpu: str = "h100", mfu: float = MFU) -> Cost:
    """The cost of these runs on one GPU, one after another, computed in seconds for thousands of them. `mfu` as in
    `make_plan`. ValueError: no such GPU."""
    _check(gpu, mfu)
    counted: dict[str, float] = {}
    number, tokens, flops, hours = 0, 0, 0.0, 0.0
    for run in runs:
        key = f"{run.arch} {sizes_of(run)}"
        if key not in counted:
            counted[key] = _flops_per_token(run.arch, sizes_of(run))
        work = tokens_of(run) * counted[key]
        number, tokens, flops = number + 1, tokens + tokens_of(run), flops + work
        hours += work / (mfu * peak_flops_of(gpu, run.train.precision)) / HOUR
    return Cost(number, tokens, flops, hours)


_counted: dict[str, float] = {}


def _flops_per_token(arch: str, sizes: Sizes) -> float:
    """If all layers cost the same: from models of one and two layers and a small head, which is only its matrix."""
    if _layers_differ(arch, sizes):
        return _counted_on_meta(arch, sizes)
    small = replace(sizes, vocab_size=64)
    one, two = (_counted_on_meta(arch, replace(small, num_hidden_layers=layers)) for layers in (1, 2))
    head = 6 * sizes.hidden_size * (sizes.vocab_size - small.vocab_size)
    return one + (two - one) * (sizes.num_hidden_layers - 1) + head


def _layers_differ(arch: str, sizes: Sizes) -> bool:
    """Whether the layers of a model may differ: it is from outside, or a hybrid, or has settings per layer."""
    if reference_of(arch) or arch.startswith("hf:"):
        return True
    head_dim = sizes.fields.get("head_dim")
    fields = resolve(arch, hidden_size=sizes.hidden_size, num_heads=sizes.num_attention_heads, head_dim=head_dim)
    lists = [value for value in (fields | sizes.fields).values() if isinstance(value, list)]
    return any(len(values) > 1 for values in lists)


def _counted_on_meta(arch: str, sizes: Sizes) -> float:
    if (key := f"{arch} {sizes}") not in _counted:
        with torch.device("meta"):
            _counted[key] = flops_per_token(build(arch, sizes), sizes.seq_len)
    return _counted[key]


@cache
def _cpu_peak() -> float:
    """FLOP/s of one process with one thread, measured on products of two matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.rand(512, 512)
        torch.mm(a, a)
        begin, products = time.process_time(), 0  # of this process, so that other load does not matter
        while (seconds := time.process_time() - begin) < 0.2:
            torch.mm(a, a)
            products += 1
    finally:
        torch.set_num_threads(threads)
    return products * 2 * 512**3 / seconds


class Timed(NamedTuple):
    """A run and its time, in seconds. predicted: of its whole process, or of what is left of it; took: so far."""

    predicted: float
    took: float = 0.0
    ended: bool = False


def time_left(runs: Collection[Timed], jobs: int) -> float:
    """Seconds until all runs have ended, `jobs` at a time. Others are as much slower or faster than predicted as the
    ended ones were."""
    expected_seconds = sum(run.predicted for run in runs if run.ended)
    ratio = sum(run.took for run in runs if run.ended) / expected_seconds if expected_seconds else 1.0
    rest = [max(0.0, ratio * run.predicted - run.took) for run in runs if not run.ended]
    return max(sum(rest) / jobs, max(rest, default=0.0))


_timed: dict[str, float] = {}


def timed_steps(run: RunConfig) -> float:
    """Seconds per token, measured on some steps of the model, once for each task and model."""
    key = f"{(run.task or {}).get('name')} {run.arch} {run.model}"
    if key not in _timed:
        _timed[key] = flops_per_token(build_model(run, "meta"), run.data.seq_len) / measure_speed([run])
    return _timed[key]


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


def make_plan(run: RunConfig, gpus: int, gpu: str, mfu: float = MFU, network: float = NETWORK) -> Plan:
    """The plan with the run's `parallel.micro_batch_size`, or else the largest that fits. `mfu`: the share of the peak
    that training reaches; network: GB/s of a GPU to those of other machines, in each direction. A step takes the longer
    of computing and sending, as if they overlapped. ValueError: no such GPU, a layout that does not divide, or a run
    that cannot fit."""
    _check(gpu, mfu)
    if gpus < 1:
        raise expected("--gpus", "an integer >= 1", gpus)
    if not 0 < network < float("inf"):
        raise expected("--network", "a number > 0, in GB/s", network)
    check_layout(run, gpus)
    model = build_model(run, "meta")
    model.check_tensor_parallel(run.parallel.tp)
    model.check_context_parallel(run.parallel.cp, run.parallel.tp)
    device, usable = Device(model, run, gpus), USABLE * GPUS[gpu].memory * 2**30
    sizes = [run.parallel.micro_batch_size or n for n in range(device.windows, 0, -1) if device.windows % n == 0]
    plans = [(size, device.memory(size)) for size in sizes]
    micro_batch, memory = next((plan for plan in plans if plan[1].total <= usable), plans[-1])
    if memory.total > usable:
        raise ValueError(_does_not_fit(run, memory, usable, micro_batch, gpu))
    tokens = tokens_of(run)
    per_token, peak = flops_per_token(model, run.data.seq_len), peak_flops_of(gpu, run.train.precision)
    sent = traffic(model, run, gpus, micro_batch)
    computing = tokens * per_token / (gpus * peak * mfu) / run.train.steps
    sending = sent.seconds(run, gpus, gpu, network)
    return Plan(
        parameters=model.num_parameters, tokens=tokens, flops_per_token=per_token, shards=device.shards,
        windows=device.windows, micro_batch=micro_batch, memory=memory, usable=usable, peak=peak,
        days=run.train.steps * max(computing, sending) / DAY, computing=computing, traffic=sent, sending=sending,
        state=model.state(run.data.seq_len),
        width=slow_width(run, model), only_projections=model.only_projections,
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
        advice = (
            "a smaller parallel.micro_batch_size"
            if micro_batch > 1
            else "a larger parallel.cp or a shorter data.seq_len"
        )
    windows = "1 window" if micro_batch == 1 else f"{micro_batch} windows"
    need = f"{readable(memory.total)} with {windows} at a time, {readable(parts[largest])} of it {largest}"
    return f"memory: expected at most {readable(usable)} of a GPU ({gpu}), got {need}. Try {advice}"


def readable(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
