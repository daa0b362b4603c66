"""What a run will take on given GPUs, before anything is started: work, memory, how a step is cut, time."""

from dataclasses import asdict, dataclass

from canonlm.errors import expected, unknown
from canonlm.train import reading
from canonlm.train.build import build_model
from canonlm.train.config import RunConfig
from canonlm.train.flops import GPUS, flops_per_token, peak_flops_of
from canonlm.train.memory import Device, Memory
from canonlm.train.mesh import check_layout

USABLE = 0.9
"""Of a GPU's memory; the rest is for what `canonlm.train.memory` leaves out."""

DAY = 24 * 60 * 60  # in seconds


@dataclass(frozen=True)
class Plan:
    parameters: int
    tokens: int
    flops_per_token: float  # forward and backward
    shards: int  # devices over which one copy of weights and optimizer is spread
    windows: int  # that a device reads in a step
    micro_batch: int  # of these at a time
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


def with_vocabulary(run: RunConfig) -> RunConfig:
    """The run as it is if it says how large its vocabulary is; else its text is asked."""
    return reading.complete(run) if run.model.vocab_size is None else run


def make_plan(run: RunConfig, gpus: int, gpu: str, mfu: float = 0.4) -> Plan:
    """With the run's `parallel.micro_batch_size`, or else the largest that fits. `mfu`: the share of the peak that
    training reaches. ValueError: no such GPU, a layout that does not divide, or what cannot fit."""
    if gpu not in GPUS:
        raise unknown("GPU", gpu, GPUS, "GPUs")
    if gpus < 1:
        raise expected("--gpus", "an integer >= 1", gpus)
    if not 0 < mfu <= 1:
        raise expected("--mfu", "a number > 0 and <= 1", mfu)
    check_layout(run, gpus)
    model = build_model(run, "meta")
    model.check_tensor_parallel(run.parallel.tp)
    device, usable = Device(model, run, gpus), USABLE * GPUS[gpu].memory * 2**30
    sizes = [run.parallel.micro_batch_size or n for n in range(device.windows, 0, -1) if device.windows % n == 0]
    plans = [(size, device.memory(size)) for size in sizes]
    micro_batch, memory = next((plan for plan in plans if plan[1].total <= usable), plans[-1])
    if memory.total > usable:
        raise ValueError(_does_not_fit(run, memory, usable, micro_batch, gpu))
    tokens = run.train.steps * run.train.batch_size * run.data.seq_len
    per_token, peak = flops_per_token(model, run.data.seq_len), peak_flops_of(gpu, run.train.precision)
    return Plan(
        parameters=model.num_parameters, tokens=tokens, flops_per_token=per_token, shards=device.shards,
        windows=device.windows, micro_batch=micro_batch, memory=memory, usable=usable, peak=peak,
        days=tokens * per_token / (gpus * peak * mfu) / DAY,
    )  # fmt: skip


def _does_not_fit(run: RunConfig, memory: Memory, usable: float, micro_batch: int, gpu: str) -> str:
    """In one line, with what would help against the largest part."""
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
