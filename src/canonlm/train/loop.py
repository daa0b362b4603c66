"""The training loop: from a configuration to a finished run folder (`canonlm.train.folder`).

Interrupt it anywhere and run it again: on the same CPU it ends as if nothing had happened, to the bit.
"""

import math
import os
import platform
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout

from canonlm import __version__, evals
from canonlm.errors import expected
from canonlm.train import checkpoint
from canonlm.train import folder as run_folder
from canonlm.train.build import build_model, check, pick_device
from canonlm.train.config import RunConfig
from canonlm.train.files import remove_leftovers, write_json
from canonlm.train.metrics import Metrics
from canonlm.train.optim import build_optimizer, learning_rate
from canonlm.windows import Batch, WindowStream


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state."""


def train(
    config: RunConfig, folder: Path, on_row: Callable[[dict[str, Any]], None] = lambda row: None
) -> dict[str, Any]:
    """Run to the end, from the newest checkpoint in `folder` if there is one; returns what `result.json` holds.

    `on_row` sees every row of `metrics.jsonl` as it is written.

    ValueError: `folder` holds a run of another configuration. Interrupted: SIGINT or SIGTERM came, and the state is
    saved. FloatingPointError: the loss, the gradient or a weight is no longer finite.
    """
    check(config)
    run_folder.create(folder, config)
    if (result := run_folder.result(folder)) is not None:
        return result
    threads = torch.get_num_threads()
    try:
        with FileLock(folder / ".lock", timeout=0):
            return _Run(config, folder, on_row).run()
    except Timeout:
        raise expected("--out", "a folder that no other process is training in", str(folder)) from None
    finally:
        torch.set_num_threads(threads)


class _Run:
    def __init__(self, config: RunConfig, folder: Path, on_row: Callable[[dict[str, Any]], None]) -> None:
        self.config, self.folder, self.on_row = config, folder, on_row
        settings, data, task = config.train, config.data, config.built_task
        remove_leftovers(folder)
        checkpoint.prune(folder / "checkpoints", settings.keep_checkpoints)
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)  # of dropout; weights and data have generators of their own
        self.device = torch.device(pick_device(settings.device))
        self.model = build_model(config)
        self.model.to(self.device)  # type: ignore[arg-type]  # the library's wrapper confuses the checker
        self.optimizer = build_optimizer(self.model, settings.optim)
        self.step = checkpoint.load_latest(folder / "checkpoints", self.model, self.optimizer)
        self.forward = torch.compile(self.model) if settings.compile else self.model
        stream: dict[str, Any] = {"task": task, "seed": settings.seed, "seq_len": data.seq_len, "loss_on": data.loss_on}
        self.stream = WindowStream(**stream, split="train", isolate_documents=data.isolate_documents)
        test = WindowStream(**stream, split="test", isolate_documents=data.isolate_documents)
        self.test = evals.build(test, settings.eval_size, settings.batch_size)
        self.metrics = Metrics(folder, self.step)
        self.stop_asked = False

    def run(self) -> dict[str, Any]:
        write_json(self.folder / "env.json", environment(self.device))
        previous = {number: signal.signal(number, self._ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            self.metrics.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ask_to_stop(self, *_: Any) -> None:
        self.stop_asked = True

    def _run(self) -> dict[str, Any]:
        settings, data = self.config.train, self.config.data
        clock = _Clock(settings.batch_size * data.seq_len)
        evaluation: dict[str, Any] = {}
        batches = self.stream.batches(self.step, settings.steps, settings.batch_size, data.workers)
        with closing(batches):
            for batch in batches:
                loss, grad_norm, lr = self._optimize(batch)
                self.step += 1
                clock.tick()
                last = self.step == settings.steps
                if self.step % settings.log_every == 0 or last:
                    numbers = {"loss": float(loss), "lr": lr, "grad_norm": float(grad_norm)}
                    self._check_finite(numbers)
                    self._write({"kind": "train", "step": self.step, **numbers, **clock.reading()})
                if self.step % settings.eval_every == 0 or last:
                    with clock.paused():
                        evaluation = self._evaluate()
                stop = self.stop_asked  # read once: whoever is told that the state is saved finds it saved
                if self.step % settings.checkpoint_every == 0 or last or stop:
                    with clock.paused():
                        self._check_finite({"loss": float(loss), "grad_norm": float(grad_norm)}, weights=True)
                        self._save()
                if stop and not last:
                    raise Interrupted(f"stopped after step {self.step} of {settings.steps}; run it again to continue")
        # An earlier process may have done the last step, and even its evaluation, without getting to write the result.
        evaluation = evaluation or self.metrics.evaluation(self.step) or self._evaluate()
        result = {
            "steps": self.step,
            "tokens": self.step * clock.tokens_per_step,
            "num_parameters": self.model.num_parameters(),
            **clock.result(),
            "final": evaluation,
        }
        write_json(self.folder / "result.json", result)
        return result

    def _optimize(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, float]:
        settings = self.config.train
        batch = batch.to(self.device)
        lr = learning_rate(self.step, settings.steps, settings.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        with self._autocast():
            loss = self.forward(batch.input_ids, labels=batch.labels, doc_ids=batch.doc_ids, use_cache=False).loss
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.optim.grad_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), grad_norm, lr

    def _evaluate(self) -> dict[str, Any]:
        self.model.eval()
        with self._autocast():
            row = {"kind": "eval", "step": self.step, **self.test.run(self.model, self.device)}
        self._write(row)
        return row

    def _check_finite(self, numbers: dict[str, float], weights: bool = False) -> None:
        """The gradient of a step tells of the weights before it; what is saved are the weights after it."""
        found = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if not found and weights:
            found = [f"{name} not finite" for name, p in self.model.named_parameters() if not p.isfinite().all()][:1]
        if found:
            raise FloatingPointError(f"stopped at step {self.step}, the training diverged: {', '.join(found)}")

    def _write(self, row: dict[str, Any]) -> None:
        self.metrics.write(row)
        self.on_row(row)

    def _save(self) -> None:
        folder, keep = self.folder / "checkpoints", self.config.train.keep_checkpoints
        checkpoint.save(folder, self.step, self.model, self.optimizer, keep)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")


class _Clock:
    """Training time without evaluations and checkpoints; the first steps of a process, which warm up, do not count."""

    WARMUP_STEPS = 3

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._start = self._mark = time.perf_counter()
        self._out = 0.0
        self._steps = 0

    def tick(self) -> None:
        self._steps += 1
        if self._steps == self.WARMUP_STEPS:
            self._mark, self._out = time.perf_counter(), 0.0

    def paused(self) -> "_Clock":
        return self

    def __enter__(self) -> None:
        self._paused_at = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._out += time.perf_counter() - self._paused_at

    def reading(self) -> dict[str, float | None]:
        seconds = time.perf_counter() - self._mark - self._out
        steps = self._steps - self.WARMUP_STEPS
        speed = self.tokens_per_step * steps / seconds if steps > 0 else None
        return {"tokens_per_s": speed, "elapsed_s": time.perf_counter() - self._start}

    def result(self) -> dict[str, float | None]:
        reading = self.reading()
        return {"tokens_per_s": reading["tokens_per_s"], "train_seconds": reading["elapsed_s"]}


def environment(device: torch.device) -> dict[str, Any]:
    """What the run ran on: for the reader of a report, and for whoever wants the same numbers."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "machine": accelerator or f"{platform.machine()} CPU, {cpu_name()}",
        "device": str(device),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "canonlm": __version__,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown model"
