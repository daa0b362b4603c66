"""The training loop as a whole, as users call it: idle time, memory, repeatability, a run of the playground."""

import gzip
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from train import our_run, tokens_on_disk

from canonlm.data.windows import batches
from canonlm.launch.recipes import load_preset
from canonlm.models.interface import LanguageModel
from canonlm.train.build import build_model
from canonlm.train.config import RunConfig, resolve
from canonlm.train.data import stream
from canonlm.train.load_config import merge
from canonlm.train.loop import train
from canonlm.train.memory import Device as Planned
from gpu_parts.device import Device
from gpu_parts.rows import Row

SHAPES = {
    "cuda": {"layers": 12, "hidden": 1024, "heads": 16, "time": 4096, "batch": 8, "vocab": 32000, "precision": "bf16"},
    "cpu": {"layers": 2, "hidden": 32, "heads": 2, "time": 32, "batch": 2, "vocab": 128, "precision": "fp32"},
}
ARCH = "llama+canon"
COPIES = {"cuda": (8 * 4096, 2**25), "cpu": (2**10,)}  # int64 numbers: a batch, and one that is large


def loop(device: Device, out: Path) -> Iterator[Row]:
    for numbers in COPIES[device.kind]:
        pageable = torch.zeros(numbers, dtype=torch.long)
        pinned = pageable.pin_memory() if device.is_gpu else pageable
        calls = {name: partial(x.to, device.device, non_blocking=True) for name, x in
                 {"pageable": pageable, "pinned": pinned}.items()}  # fmt: skip
        calls["bare"] = calls["pageable"] if device.is_gpu else pageable.clone
        host = {name: min(on_host(device, call) for _ in range(5)) for name, call in calls.items()}
        took = device.median_us(calls)
        for name in ("pageable", "pinned"):
            settings = {"bytes": pageable.nbytes, "memory": name}
            speed = pageable.nbytes / took[name] / 1000
            yield Row(
                "copy to the device", settings, took[name], "us", more={"GB/s": speed, "host waits us": host[name]}
            )
    steps = (20, 24) if device.is_gpu else (3, 5)
    with Prepared(device) as prepared:
        run = prepared.run(ARCH, compiled=device.is_gpu, steps=steps[1], log_every=4 if device.is_gpu else 1)
        run = run.model_copy(update={"profile": f"{steps[0]}:{steps[1]}"})
        rows, folder = prepared.train(run, "loop")
        settings = {"arch": ARCH, "layers": run.model.num_hidden_layers, "hidden": run.model.hidden_size}
        best = max((row for row in rows if row.get("tokens_per_s")), key=lambda row: row["tokens_per_s"])
        more = {"MFU": best["mfu"] or 0.0, "data wait": best["data_wait_share"], "peak GB": best["memory_gb"]}
        yield Row("training loop", settings, best["tokens_per_s"], "tokens/s", more=more)
        [trace] = (folder / "profile").iterdir()
        share, kernels = idle(trace, device)
        yield Row("device idle", settings, 100 * share, "% of the time", target="<= 5", more={"kernels": kernels})


def on_host(device: Device, call: Any) -> float:
    """Microseconds until the call returns, which may be before the device has done it."""
    device.synchronize()
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def idle(trace: Path, device: Device) -> tuple[float, int]:
    """The part of the traced steps in which nothing ran on the device, and how many kernels did."""
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if device.is_gpu else ("cpu_op",)
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") in wanted]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    if not spans:
        raise RuntimeError("the profiler saw no kernels")
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0]), len(spans)


class Prepared:
    """Random tokens on disk, and runs that read them."""

    def __init__(self, device: Device) -> None:
        self.device, self.shape = device, SHAPES[device.kind]

    def __enter__(self) -> "Prepared":
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        (self.folder / "tokens").mkdir()
        tokens_on_disk(self.folder / "tokens", self.shape)
        return self

    def __exit__(self, *_: Any) -> None:
        self._temporary.cleanup()

    def run(self, arch: str, compiled: bool, steps: int, log_every: int) -> RunConfig:
        return our_run(arch, self.shape, self.folder / "tokens", self.device.kind, compiled, steps, log_every)

    def train(self, run: RunConfig, name: str) -> tuple[list[dict], Path]:
        """Its rows of training, and its folder."""
        torch._dynamo.reset()
        self.device.empty_cache()
        rows: list[dict] = []
        with mock.patch("canonlm.train.checkpoint.Checkpoints.save"):  # it takes longer than the steps
            train(run, self.folder / name, rows.append)
        return [row for row in rows if row["kind"] == "train"], self.folder / name


def memory(device: Device, out: Path) -> Iterator[Row]:
    """Predicted by `canonlm plan` and measured, of an eager step: all of it, and what is not compiled."""
    with Prepared(device) as prepared:
        for kind in ("none", "selective", "full"):
            run = prepared.run(ARCH, compiled=False, steps=4, log_every=2)
            run = run.model_copy(
                update={"parallel": run.parallel.model_copy(update={"activation_checkpointing": kind})}
            )
            model: LanguageModel = build_model(run, "meta")
            plan = Planned(model, run, 1).memory(run.train.batch_size)
            rows, _ = prepared.train(run, kind)
            peak = max(row["memory_gb"] for row in rows)
            settings = {"arch": ARCH, "recomputation": kind}
            more = {"predicted GB": plan.total / 1e9, "of it activations": plan.activations / 1e9}
            yield Row("memory at the peak", settings, peak, "GB", more=more)
            yield Row("predicted over measured", settings, plan.total / 1e9 / peak, "x", target="0.8 to 1.25")


def repeat(device: Device, out: Path) -> Iterator[Row]:
    """The losses of 20 steps, twice: equal to the last bit? With `train.deterministic` they must be."""
    modes = [(compiled, exact) for compiled in (False, True)[: 1 + device.is_gpu] for exact in (False, True)]
    with Prepared(device) as prepared:
        for compiled, exact in modes:
            run = prepared.run(ARCH, compiled=compiled, steps=20, log_every=1)
            run = run.model_copy(update={"train": run.train.model_copy(update={"deterministic": exact})})
            first, second = (
                [row["loss"] for row in prepared.train(run, f"{compiled} {exact} {turn}")[0]] for turn in (0, 1)
            )
            same = sum(one == other for one, other in zip(first, second, strict=True))
            settings = {"arch": ARCH, "mode": "blocks" if compiled else "eager", "deterministic": exact}
            yield Row("steps with the same loss", settings, same, "of 20", target=">= 20" if exact else "")


# -- the playground ---------------------------------------------------------------------------------------------------

PLAYED = {"cuda": ("small", 20.0), "cpu": ("tiny", 5.0)}  # preset, seconds
PLAY = ["--arch", ARCH, "--lr", "1e-3", "--seeds", "1"]


def play(device: Device, out: Path) -> Iterator[Row]:
    preset, seconds = PLAYED[device.kind]
    settings = {"task": "depo", "preset": preset}
    fed = sampled(preset)
    yield Row("sampler", settings, fed, "tokens/s")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "play"
        command = [sys.executable, "-m", "canonlm", "play", "depo", "--preset", preset, "--out", str(folder), *PLAY]
        with (out / "play.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            end, trained = time.monotonic() + seconds, []
            while process.poll() is None and (time.monotonic() < end or not trained):
                time.sleep(0.5)
                trained = speeds(folder)
            process.send_signal(signal.SIGINT)  # saves its runs
            process.wait()
        trained = speeds(folder)
    if not trained:
        raise RuntimeError(f"no step was made, see {out / 'play.txt'}")
    last = trained[-1]
    more = {"steps": last["step"], "loss": last["loss"], "data wait": last["data_wait_share"]}
    yield Row("training", settings, last["tokens_per_s"], "tokens/s", more=more)
    yield Row("sampler, times as fast as the training", settings, fed / last["tokens_per_s"], "x", target=">= 1")


def speeds(folder: Path) -> list[dict]:
    """The rows of training that tell a speed: those after the warm-up."""
    rows = [json.loads(line) for file in folder.rglob("metrics.jsonl") for line in file.read_text().split("\n")[:-1]]
    return [row for row in rows if row["kind"] == "train" and row["tokens_per_s"]]


def sampled(preset: str) -> float:
    """Tokens per second of the training windows as the loop draws them, when nothing waits for them."""
    run = resolve(merge(load_preset("depo", preset).run, {"arch": ARCH}))
    made = batches(stream(run), 0, 64, run.train.batch_size, run.data.workers)
    next(made)  # compiles the sampler
    start = time.perf_counter()
    count = sum(batch.input_ids.numel() for batch in made)
    return count / (time.perf_counter() - start)
