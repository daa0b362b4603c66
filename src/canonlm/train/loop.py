"""The training loop: from a configuration to a finished run folder (`canonlm.runs.folder`).

Interrupt it anywhere and run it again: on the same machine and number of processes it ends as if nothing had happened,
to the bit; on another number of processes it reads the same windows and differs by rounding.
"""

import math
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from canonlm.data.windows import Batch, batches
from canonlm.errors import expected
from canonlm.files import append, lock, remove_leftovers, write_json
from canonlm.models import checks
from canonlm.runs import folder as run_folder
from canonlm.runs.rows import Metrics
from canonlm.train import reading, trackers
from canonlm.train.build import build_model, check, with_complete_name
from canonlm.train.checkpoint import Checkpoints
from canonlm.train.clipping import clip_grad_norm
from canonlm.train.clock import Clock
from canonlm.train.config import RunConfig
from canonlm.train.flops import flops_per_token, peak_flops
from canonlm.train.machine import device_name, environment, memory_gb
from canonlm.train.mesh import world_of
from canonlm.train.optim import build_optimizer, learning_rate
from canonlm.train.profile import Profile
from canonlm.train.recipe import check_folder, create_folder
from canonlm.train.sharding import last_micro_batch, parallelize
from canonlm.train.signals import PARENT, Interrupted, Signals, noting_why
from canonlm.world import World

_OF_A_PROCESS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_PROCID",
                 "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP", PARENT)  # fmt: skip
"""How the names of variables begin by which a process knows its place among others."""

OnRow = Callable[[dict[str, Any]], None]


def train(config: RunConfig, folder: Path, on_row: OnRow = lambda row: None) -> dict[str, Any]:
    """Run to the end, from the newest whole checkpoint in `folder` if there is one; returns what `result.json` holds.

    Under `torchrun` and its like every process calls this; the first alone writes, and calls `on_row` with every row of
    `metrics.jsonl`.

    ValueError, in every process: `folder` holds a run of another configuration, or the configuration does not suit the
    machine, the data or the number of processes. Interrupted: a signal asked to stop, and the state is saved.
    FloatingPointError: the loss, the gradient or a weight is no longer finite.
    """
    threads = torch.get_num_threads()
    try:
        with world_of(config) as world, noting_why():
            with world.all_or_none():
                config = with_complete_name(reading.complete(config))
                check(config)
                if config.parallel.tp > 1:
                    build_model(config, "meta").check_tensor_parallel(config.parallel.tp)
            with _alone_in(folder, config, world):
                result = world.broadcast(_finished(folder / "result.json") if world.main else None)
                return result or _Run(config, folder, world, on_row).run()
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: {error.strerror or error}; run it again to continue") from error
    finally:
        torch.set_num_threads(threads)


def _finished(path: Path) -> dict[str, Any] | None:
    """What a run that is finished has written; None before that."""
    result = run_folder.read_json(path)
    if result is None:
        return None
    numbers = [result.get(key) for key in ("steps", "tokens")] if isinstance(result, dict) else [None]
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{path}: expected the result of a finished run, with its steps and tokens")
    return result


@contextmanager
def _alone_in(folder: Path, config: RunConfig, world: World):
    held = lock(folder / ".lock", timeout=0)
    try:
        with world.all_or_none():
            if world.main:
                check_folder(folder, config)
                run_folder.make(folder)
                try:
                    held.acquire()
                except Timeout:
                    raise expected("--out", "a folder that no other process is training in", str(folder)) from None
                texts = reading.check_unchanged(config, folder)
                create_folder(folder, config)
                if texts and texts != run_folder.read_json(folder / "data.json"):
                    write_json(folder / "data.json", texts)
        yield
    finally:
        held.release()


class _Stopped(Exception):
    """An evaluation was asked to stop."""


class _Run:
    def __init__(self, config: RunConfig, folder: Path, world: World, on_row: OnRow) -> None:
        self.config, self.folder, self.world, self.on_row = config, folder, world, on_row
        settings = config.train
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self.shards = reading.verification(config, folder, world)
        with world.all_or_none():
            if world.main:
                for place in (folder, folder / "checkpoints", folder / "profile"):
                    remove_leftovers(place)
            self.stream = reading.stream(config, self.shards.opened)
            self.test = reading.evaluation(config, world, self.shards.opened)
        self.model = parallelize(partial(build_model, config), config, world)
        self.module, self.is_random = self.model.module, self.model.is_random
        checks.check(self.model, isolated=config.data.isolate_documents)
        self.optimizer = build_optimizer(self.module, settings.optim)
        self.checkpoints = Checkpoints(folder / "checkpoints", settings.keep_checkpoints, settings.keep_every, world)
        self.step = self.checkpoints.load_latest(self.module, self.optimizer)
        self.first_bad = torch.full((), -1, device=world.device)  # step: on the device, so that no step waits for it

    def run(self) -> dict[str, Any]:
        config, world, seq_len = self.config, self.world, self.config.data.seq_len
        with Signals() as self.signals, closing(self.checkpoints), closing(self.shards), ExitStack() as sinks:
            self.sinks: list[Any] = []
            with world.all_or_none():
                if world.main:
                    write_json(self.folder / "env.json", environment(world.device) | {"processes": world.size})
                    self.metrics = Metrics(self.folder, self.step)
                    drawn = trackers.start(config.track, self.folder, config.model_dump(mode="json"), self.step)
                    self.sinks = [sinks.enter_context(closing(sink)) for sink in (self.metrics, *drawn)]
            dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
            self.clock = Clock(
                config.train.batch_size * seq_len,
                before_s=self.metrics.elapsed_s if world.main else 0.0,
                flops_per_token=flops_per_token(self.model, seq_len),
                peak_flops=peak_flops(device_name(world.device), dtype),
                devices=world.size,
                device=world.device,
            )
            try:
                return self._run()
            except Interrupted:
                sinks.close()
                world.any(True)  # no process leaves before all are ready: whoever started them may end the others
                raise

    def _run(self) -> dict[str, Any]:
        settings, world = self.config.train, self.world
        # An earlier process may have saved this step and not got to its evaluation: a stop does not wait for one.
        evaluation: dict[str, Any] = {}
        notes = []
        if self.test is None:
            notes += ["nothing will be evaluated: no text has a held-out part, and text.validation names none"]
        if (warmup := settings.optim.warmup_steps) > settings.steps:  # of a short trial, mostly: no mistake
            short = f"train.optim.warmup_steps is {warmup:,}, train.steps {settings.steps:,}"
            notes += [f"the learning rate will not rise to train.optim.lr: {short}"]
        for why in notes if world.main else []:
            self.on_row({"kind": "note", "step": self.step, "why": why})
        if self.step and self._evaluates():
            evaluation = world.broadcast(self.metrics.evaluation(self.step) if world.main else None) or self._evaluate()
            if not evaluation:
                raise self._interrupted("before")
        made = batches(
            self.stream,
            self.step,
            settings.steps,
            settings.batch_size,
            self.config.data.workers,
            rank=world.dp_rank,
            ranks=world.dp_size,
        )
        with closing(made), Profile(self.config.profile, self.folder, world.rank, self.step) as profile:
            for batch in self.clock.waiting(made):
                numbers = self._optimize(batch)
                self.step += 1
                self.clock.tick()
                profile.step()
                last = self.step == settings.steps
                if self.step % settings.log_every == 0 or last:
                    self._log(numbers)
                # Asked once: whoever is told that the state is saved finds it saved.
                failed = self.checkpoints.failed or self.shards.failed
                if stop := world.any(self.signals.asked is not None or failed):
                    self.checkpoints.wait()  # raises what failed, in every process
                    self.shards.check()
                cut_off = False
                if self._evaluates() and (last or not stop):
                    with self.clock.paused():
                        evaluation = self._evaluate()
                    stop = stop or (cut_off := not evaluation)
                if self.step % settings.checkpoint_every == 0 or last or stop:
                    with self.clock.paused():
                        self._check_weights(numbers)
                        self.shards.note()
                        self.checkpoints.save(self.step, self.module, self.optimizer, self._on_checkpoint)
                if stop and (cut_off or not last):
                    self.checkpoints.wait()
                    raise self._interrupted("before" if cut_off else None)
        self.checkpoints.wait()
        self.shards.finish(self.signals, self.step, self.on_row)
        result = {
            "steps": self.step,
            "tokens": self.step * self.clock.tokens_per_step,
            "num_parameters": self.model.num_parameters,
            **self.clock.result(),
            "final": evaluation,
        }
        if world.main:
            write_json(self.folder / "result.json", result)
        return result

    def _optimize(self, batch: Batch) -> dict[str, Any]:
        """One step. Returns the loss of this process's share and what else is known of it, still on the device."""
        config, world = self.config, self.world
        lr = learning_rate(self.step, config.train.steps, config.train.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.is_random:
            torch.manual_seed(_dropout_seed(config.train.seed, self.step, world.rank))
        self.module.train()
        # The loss of the global batch is the mean over its targets; gradients are averaged over processes.
        targets = world.sum([float((batch.targets != -100).sum())])[0] / world.dp_size
        losses, z_losses = [], []
        micro_batches = batch.split(config.parallel.micro_batch_size or len(batch.input_ids))
        for index, part in enumerate(micro_batches):
            last_micro_batch(self.module, index == len(micro_batches) - 1)
            here = part.to(world.device)
            with self._autocast():
                loss, z_loss = self.model.loss(here.input_ids, here.targets, here.doc_ids, targets)
            loss.backward()
            losses.append(loss.detach())
            if z_loss is not None:
                z_losses.append(z_loss)
        grad_norm = clip_grad_norm(self.module, config.train.optim.grad_clip or math.inf, world)
        loss = torch.stack(losses).sum()
        finite = loss.isfinite() & grad_norm.isfinite()
        skipped = config.train.on_nonfinite == "skip" and world.any(not finite)
        if skipped:
            self._report_skip(float(loss), float(grad_norm))
        else:
            self.first_bad = torch.where((self.first_bad < 0) & ~finite, self.step + 1, self.first_bad)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        z_loss = torch.stack(z_losses).sum() if z_losses else None
        return {"loss": loss, "z_loss": z_loss, "lr": lr, "grad_norm": grad_norm, "skipped": skipped}

    def _log(self, numbers: dict[str, Any]) -> None:
        if numbers["skipped"]:
            return  # told already
        local = [float(numbers[key]) for key in ("loss", "z_loss") if numbers[key] is not None]
        loss, *z_loss = [total / self.world.dp_size for total in self.world.sum(local)]
        row: dict[str, Any] = {"loss": loss, **({"z_loss": z_loss[0]} if z_loss else {})}
        row |= {"lr": numbers["lr"], "grad_norm": float(numbers["grad_norm"])}
        self._check_finite(row)
        row |= {"tokens": self.step * self.clock.tokens_per_step, "windows": self._windows(self.step)}
        row |= self.clock.reading() | {"memory_gb": memory_gb(self.world.device)}
        self._write({"kind": "train", "step": self.step, **row})

    def _evaluates(self) -> bool:
        """Whether an evaluation is due after the steps so far."""
        settings = self.config.train
        return self.test is not None and (self.step % settings.eval_every == 0 or self.step == settings.steps)

    def _evaluate(self) -> dict[str, Any]:
        """Its row; empty where a signal asked to stop in the middle of it."""
        assert self.test is not None
        self.module.eval()

        def stop(*_: Any) -> None:  # before each batch, in all processes alike
            if self.world.any(self.signals.asked is not None):
                raise _Stopped

        hook = self.module.register_forward_pre_hook(stop)
        try:
            # Evaluations bring shapes that are not worth compiling for.
            with self._autocast(), torch.compiler.set_stance("force_eager"):
                row = {"kind": "eval", "step": self.step, **self.test.run(self.model, self.world.device)}
        except _Stopped:
            return {}
        finally:
            hook.remove()
        self._write(row)
        return row

    def _interrupted(self, evaluation: str | None) -> Interrupted:
        where = f"stopped after step {self.step} of {self.config.train.steps}"
        where += f", {evaluation} its evaluation" if evaluation else ""
        return Interrupted(f"{where}; {self.world.broadcast(self.signals.next_step(self.world.main))}")

    def _check_weights(self, numbers: dict[str, Any]) -> None:
        """The gradient of a step tells of the weights before it; what is saved are the weights after it."""
        if not numbers["skipped"]:
            [loss] = self.world.sum([float(numbers["loss"])])
            self._check_finite({"loss": loss, "grad_norm": float(numbers["grad_norm"])})
        bad = [name for name, p in self.module.named_parameters() if not _local(p).isfinite().all()]
        if self.world.any(bool(bad)):
            self._diverged(f"{bad[0] if bad else 'a weight'} not finite")

    def _check_finite(self, numbers: dict[str, float]) -> None:
        found = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if found:
            self._diverged(", ".join(found))

    def _diverged(self, what: str) -> None:
        first = int(self.first_bad)
        step = self.step if first < 0 else first
        since = "" if step == self.step else f" since step {step}"
        raise FloatingPointError(
            f"stopped at step {self.step}, the training diverged{since}: {what}; {self._told_windows(step)}"
        )

    def _report_skip(self, loss: float, grad_norm: float) -> None:
        why = f"loss {loss}, gradient norm {grad_norm}; {self._told_windows(self.step + 1)}"
        self._write({"kind": "skip", "step": self.step + 1, "windows": self._windows(self.step + 1), "why": why})

    def _windows(self, step: int) -> list[int]:
        """Numbers of the first and the last window of a step (counted from 1)."""
        size = self.config.train.batch_size
        return [(step - 1) * size, step * size - 1]

    def _told_windows(self, step: int) -> str:
        first, last = self._windows(step)
        describe = getattr(self.stream, "describe", None)
        origin = f" ({describe(first)} to {describe(last)})" if describe else ""
        return f"its batch: windows {first} to {last}{origin}"

    def _write(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)
        if self.world.main:
            self.on_row(row)

    def _on_checkpoint(self, path: Path) -> None:
        """Start the user's command beside the training, in a session of its own: it may outlive this process."""
        step = int(path.name.removeprefix("step-"))
        self.on_row({"kind": "checkpoint", "step": step})  # not in metrics.jsonl: it is there to be seen
        if (command := self.config.on_checkpoint) is None:
            return
        values = {"run": str(self.folder), "checkpoint": str(path), "step": str(step)}
        # In one pass: a value may look like another's place. Braces of the shell's own stay.
        command = re.sub(r"\{(run|checkpoint|step)\}", lambda match: shlex.quote(values[match[1]]), command)
        # It does not belong to this group of processes, and must not take itself for one of them.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_PROCESS)}
        environment |= {f"CANONLM_{name.upper()}": value for name, value in values.items()}
        log = self.folder / "on_checkpoint" / f"{path.name}.txt"
        log.parent.mkdir(exist_ok=True)
        with append(log) as said:
            subprocess.Popen(
                f"{command}\necho exit code $?",
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    return ((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63
