"""The training loop: from a configuration to a finished run folder (`canonlm.runs.folder`).

A run that is interrupted anywhere and started again ends with the same bits on the same machine and number of
processes. With another number of processes it reads the same windows, and numbers differ by rounding.
"""

import errno
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

from canonlm.core.distributed import Votes, World
from canonlm.core.errors import about, expected
from canonlm.core.files import append, lock, make_folder, remove_leftovers, write_json
from canonlm.core.ranks import ranks
from canonlm.data.windows import batches
from canonlm.models import causality
from canonlm.runs import folder as run_folder
from canonlm.runs import leases, rows
from canonlm.runs.identity import check_label, label
from canonlm.train import data, trackers
from canonlm.train.build import build_model, check, state_bytes, with_complete_name
from canonlm.train.checkpoint import Checkpoints
from canonlm.train.clipping import clip_grad_norm
from canonlm.train.clock import Clock
from canonlm.train.config import RunConfig
from canonlm.train.flops import flops_per_token, peak_flops
from canonlm.train.load_config import check_folder, create_folder
from canonlm.train.machine import deterministic, device_name, environment, memory_gb
from canonlm.train.mesh import world_of
from canonlm.train.micro_batches import Portion, prepare
from canonlm.train.optim import build_optimizer, learning_rate
from canonlm.train.profile import Profile
from canonlm.train.sharding import last_micro_batch, parallelize
from canonlm.train.signals import PARENT, Interrupted, Signals, Superseded, recording_failure
from canonlm.train.weights import Weights, other_tokenizer

_PROCESS_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_PROCID",
                      "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP", PARENT,
                      leases.VARIABLE)  # fmt: skip
"""Prefixes of the environment variables that describe a process's place among others."""

OnRow = Callable[[dict[str, Any]], None]


def train(config: RunConfig, folder: Path, on_row: OnRow = lambda row: None) -> dict[str, Any]:
    """Train to the end, from the newest undamaged checkpoint in `folder` if there is one; returns the content of
    `result.json`.

    Under `torchrun` and similar launchers, every process calls this; only the first one writes, and calls `on_row` with
    every row of `metrics.jsonl`.

    ValueError, in every process: `folder` has a run of another configuration, or the configuration does not fit the
    machine, the data or the number of processes. Interrupted: stopped by a signal; the state is saved. Superseded:
    another worker has taken the run over. FloatingPointError: the loss, the gradient or a weight is no longer finite.
    """
    threads = torch.get_num_threads()
    # Where NCCL's flight recorder writes what each process did last, when an exchange takes too long. Two names, as
    # PyTorch has renamed it.
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE") if ranks()[1] > 1 else ():
        os.environ.setdefault(name, str(folder.absolute() / "flight-rank-"))
    try:
        exact = deterministic(config.train.deterministic)
        with exact, world_of(config) as world, recording_failure(), data.read_once():
            with world.all_or_none():
                config = with_complete_name(data.complete(config))
                check(config)
                tp, cp = config.parallel.tp, config.parallel.cp
                if max(tp, cp) > 1:
                    model = build_model(config, "meta")
                    model.check_tensor_parallel(tp)
                    model.check_context_parallel(cp, tp)
            with _locked(folder, config, world):
                with world.all_or_none():
                    result = _finished(folder / "result.json", config) if world.main else None
                result = world.broadcast(result)
                return result or _Run(config, folder, world, on_row).run()
    except OSError as error:
        what = about(error, folder)
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ValueError(f"{what}; run it again to continue") from error
        if not what.startswith(str(folder)):
            raise ValueError(what) from error
        raise expected("--out", f"a folder that can be read and written ({what})", str(folder)) from error
    finally:
        torch.set_num_threads(threads)


def _finished(path: Path, config: RunConfig) -> dict[str, Any] | None:
    """The result of a finished run; None if it is not finished. ValueError: of another one."""
    result = run_folder.read_json(path)
    if result is None:
        return None
    numbers = [result.get(key) for key in ("steps", "tokens")] if isinstance(result, dict) else [None]
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{path}: expected the result of a finished run, with its steps and tokens")
    check_label(result.get("run"), label(config.model_dump()), str(path))
    return result


@contextmanager
def _locked(folder: Path, config: RunConfig, world: World):
    """Within this context, no other process trains in the folder, which exists and has this configuration.

    A ValueError before anything has been trained refuses the run: a new folder then gets no configuration, so that the
    corrected run may be trained in it."""
    held = lock(folder / ".lock", timeout=1)  # a worker that looks whether the folder is free holds it for an instant
    is_new = False
    try:
        with world.all_or_none():
            if world.main:
                check_folder(folder, config)
                run_folder.make(folder)
                try:
                    held.acquire()
                except Timeout:
                    if leases.Lease.of_environment() is not None:  # its worker waits, then tries again
                        raise Superseded("stopped before it began: another process is training in its folder") from None
                    raise expected("--out", "a folder that no other process is training in", str(folder)) from None
                texts = data.check_unchanged(config, folder)
                is_new = not (folder / "config.yaml").exists()
                create_folder(folder, config)
                if texts and texts != run_folder.read_json(folder / "data.json"):
                    write_json(folder / "data.json", texts)
        yield
    except ValueError:
        if is_new and not run_folder.has_trained(folder):
            run_folder.remove_config(folder)
        raise
    finally:
        held.release()


class _Stopped(Exception):
    """A signal stopped an evaluation."""


class _Run:
    def __init__(self, config: RunConfig, folder: Path, world: World, on_row: OnRow) -> None:
        self.config, self.folder, self.world, self.on_row = config, folder, world, on_row
        settings = config.train
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self.shards = data.verification(config, folder, world)
        with world.all_or_none():
            if world.main:
                for place in (folder, make_folder(folder, "checkpoints"), folder / "profile"):
                    remove_leftovers(place)
            self.stream = data.stream(config, self.shards.opened)
            self.test = data.evaluation(config, world, self.shards.opened)
        resumed = world.broadcast(bool(run_folder.checkpoint_steps(folder / "checkpoints")))
        with world.all_or_none():
            first = config.model.weights is not None and not resumed and world.local_rank == 0
            weights = Weights(config, build_model(config, "meta")) if first else None
        self.model = parallelize(partial(build_model, config), config, world, weights, resumed=resumed)
        del weights
        self.module = self.model.module
        if not resumed:  # its weights have no values yet, and the model has passed before
            causality.check(self.model, isolated=config.data.isolate_documents)
        self.optimizer = build_optimizer(self.module, settings.optim)
        self.lease = leases.Lease.of_environment()
        self.checkpoints = Checkpoints(
            folder / "checkpoints", settings.keep_checkpoints, settings.keep_every, world, self._check_lease,
            config.model_dump(),
        )  # fmt: skip
        self.step = self.checkpoints.load_latest(self.module, self.optimizer)
        self.first_bad = torch.full((), -1, device=world.device)  # a step, on the device so that no step waits for it

    def run(self) -> dict[str, Any]:
        config, world, seq_len = self.config, self.world, self.config.data.seq_len
        with Signals() as self.signals, closing(self.checkpoints), closing(self.shards), ExitStack() as sinks:
            self.sinks: list[Any] = []
            with world.all_or_none():
                if world.main:
                    self._check_lease()
                    write_json(self.folder / "env.json", environment(world.device) | {"processes": world.size})
                    self.metrics = rows.Metrics(self.folder, self.step)
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
                world.any(True)  # no process leaves before all are ready: the launcher may then end the others
                raise

    def _run(self) -> dict[str, Any]:
        settings, world = self.config.train, self.world
        # An earlier process may have saved this step without its evaluation: a stop does not wait for one.
        evaluation: dict[str, Any] = {}
        notes = []
        if self.test is None:
            notes += ["nothing will be evaluated: no text has a held-out part, and text.validation is empty"]
        for name in data.trained_on(self.config) if world.main else []:
            has = "has no held-out part (canonlm data prepare --validation)"
            notes += [f"text.validation.{name} {has}, so it is evaluated on windows that are also trained on"]
        if world.main and self.config.model.weights is not None and not self.step:
            notes += [note for text in data.folders(self.config)[:1] if (note := other_tokenizer(self.config, text))]
        if (warmup := settings.optim.warmup_steps) > settings.steps:  # common in short trials, so not an error
            short = f"train.optim.warmup_steps is {warmup:,}, train.steps {settings.steps:,}"
            notes += [f"the learning rate will not reach train.optim.lr: {short}"]
        for why in notes if world.main else []:
            self.on_row({"kind": "note", "step": self.step, "why": why})
        if self.step and self._evaluates():
            evaluation = world.broadcast(self.metrics.evaluation if world.main else None) or self._evaluate()
            if not evaluation:
                raise self._interrupted(evaluated=False)
        portions = batches(
            self.stream,
            self.step,
            self.step if self._reached(evaluation) else settings.steps,
            settings.batch_size,
            self.config.data.workers,
            rank=world.dp_rank,
            ranks=world.dp_size,
            prepare=partial(prepare, micro_batch_size=self.config.parallel.micro_batch_size, device=world.device),
        )
        votes = Votes(world, self.step)
        with closing(portions), Profile(self.config.profile, self.folder, world.rank, self.step) as profile:
            for portion in self.clock.waiting(portions):
                numbers = self._optimize(portion)
                self.step += 1
                self.clock.tick()
                profile.step()
                last = self.step == settings.steps
                if self.step % settings.log_every == 0 or last:
                    self._log(numbers)
                # Read once, so that all processes that report a saved state have saved it.
                failed = self.checkpoints.failed or self.shards.failed
                if stop := votes.any(self.signals.received is not None or failed, self.step):
                    self.checkpoints.wait()  # raises what failed, in every process
                    self.shards.check()
                cut_off = False
                if self._evaluates() and (last or not stop):
                    with self.clock.paused():
                        evaluation = self._evaluate()
                    stop = stop or (cut_off := not evaluation)
                    last = last or self._reached(evaluation)
                if self.step % settings.checkpoint_every == 0 or last or stop:
                    with self.clock.paused():
                        self._check_weights(numbers)
                        self.shards.note()
                        self.checkpoints.save(self.step, self.module, self.optimizer, self._on_checkpoint)
                if stop and (cut_off or not last):
                    self.checkpoints.wait()
                    raise self._interrupted(evaluated=not cut_off)
                if last:
                    break
        self.checkpoints.wait()
        self.shards.finish(self.signals, self.step, self.on_row)
        result = {
            "steps": self.step,
            "tokens": self.step * self.clock.tokens_per_step,
            "num_parameters": self.model.num_parameters,
            "state_bytes": state_bytes(self.config) if world.main else None,
            **self.clock.result(),
            "final": evaluation,
            "run": label(self.config.model_dump()),
        }
        if world.main:
            self._check_lease()
            write_json(self.folder / "result.json", result)
        return result

    def _optimize(self, portion: Portion) -> dict[str, Any]:
        """One optimizer step. Returns the loss of this process's share and other numbers, still on the device, so that
        the CPU does not wait for a GPU (except with `train.on_nonfinite` skip, which needs the loss of every step)."""
        config, world = self.config, self.world
        lr = learning_rate(self.step, config.train.steps, config.train.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        dropout_seed = (config.train.seed * 1_000_003 + self.step) * 1_000_003 + world.rank
        causality.seed_all(dropout_seed % 2**63)
        self.module.train()
        # The loss of the global batch is the mean over its targets; gradients are averaged over processes.
        # Without any target (small batches of long instances), it is 0, not 0 / 0.
        total = world.sum_on_device(float(portion.num_targets))
        targets = (total.clamp(min=1) if isinstance(total, torch.Tensor) else max(total, 1.0)) / world.dp_size
        losses, z_losses = [], []
        for index, part in enumerate(portion.micro_batches):
            last_micro_batch(self.module, index == len(portion.micro_batches) - 1)
            batch = part.to(world.device)
            with self._autocast():
                loss, z_loss = self.model.loss(batch.input_ids, batch.targets, batch.documents, targets)
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
            return  # reported already
        local = [float(numbers[key]) for key in ("loss", "z_loss") if numbers[key] is not None]
        loss, *z_loss = [total / self.world.dp_size for total in self.world.sum(local)]
        row: dict[str, Any] = {"loss": loss, **({"z_loss": z_loss[0]} if z_loss else {})}
        row |= {"lr": numbers["lr"], "grad_norm": float(numbers["grad_norm"])}
        self._check_finite(row)
        row |= {"tokens": self.step * self.clock.tokens_per_step, "windows": self._windows(self.step)}
        row |= self.clock.reading() | {"memory_gb": memory_gb(self.world.device)}
        self._write({"kind": "train", "step": self.step, **row, **self._largest(row)})

    def _largest(self, row: dict[str, Any]) -> dict[str, Any]:
        """With several processes: the longest wait for data and the largest memory of all, and whose they are."""
        if self.world.size == 1:
            return {}
        keys = ("data_wait_s", "data_wait_share", "memory_gb")
        every = self.world.by_rank([row[key] or 0.0 for key in keys])
        longest, _, largest = (max(range(len(every)), key=lambda rank: every[rank][at]) for at in range(3))
        values = dict(zip(keys, (*every[longest][:2], every[largest][2]), strict=True))
        known = {key: value for key, value in values.items() if row[key] is not None}
        return known | {"data_wait_rank": longest, "memory_rank": largest}

    def _evaluates(self) -> bool:
        """Whether an evaluation is due after the steps so far."""
        settings = self.config.train
        return self.test is not None and (self.step % settings.eval_every == 0 or self.step == settings.steps)

    def _evaluate(self) -> dict[str, Any]:
        """Evaluate, and return the row; empty if a signal stopped it."""
        assert self.test is not None
        self.module.eval()

        def stop(*_: Any) -> None:  # before each batch, in all processes alike
            if self.world.any(self.signals.received is not None):
                raise _Stopped

        hook = self.module.register_forward_pre_hook(stop)
        try:
            # Evaluations have shapes that are not worth compiling for.
            with self._autocast(), torch.compiler.set_stance("force_eager"):
                row = {"kind": "eval", "step": self.step, **self.test.run(self.model, self.world.device)}
        except _Stopped:
            return {}
        finally:
            hook.remove()
        self._write(row)
        return row

    def _reached(self, row: dict[str, Any]) -> bool:
        """Whether an evaluation has the score at which the run ends (`train.until`)."""
        settings, task = self.config.train, self.config.built_task
        if settings.until is None or task is None or not row:
            return False
        evaluated = rows.evaluation(row)
        keys = settings.until_slices or ([task.score.slice] if task.score.slice else [])
        shares = [share for key in keys if (share := evaluated.value(key)) is not None]
        if len(shares) < len(keys):
            return False
        return (sum(shares) / len(shares) if shares else evaluated.accuracy) >= settings.until

    def _interrupted(self, evaluated: bool) -> Interrupted:
        where = f"stopped after step {self.step} of {self.config.train.steps}"
        where += "" if evaluated else ", before its evaluation"
        return Interrupted(f"{where}; {self.world.broadcast(self.signals.next_step(self.world.main))}")

    def _check_weights(self, numbers: dict[str, Any]) -> None:
        """Check the weights to be saved: a step's loss and gradient only depend on the weights before it."""
        if not numbers["skipped"]:
            [loss] = self.world.sum([float(numbers["loss"])])
            self._check_finite({"loss": loss, "grad_norm": float(numbers["grad_norm"])})
        bad = [name for name, p in self.module.named_parameters() if not _local(p).isfinite().all()]
        if self.world.any(bool(bad)):
            self._diverged(f"{bad[0] if bad else 'a weight'} not finite")

    def _check_finite(self, numbers: dict[str, float]) -> None:
        bad_numbers = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if bad_numbers:
            self._diverged(", ".join(bad_numbers))

    def _diverged(self, what: str) -> None:
        first = int(self.first_bad)
        step = self.step if first < 0 else first
        since = "" if step == self.step else f" since step {step}"
        raise FloatingPointError(
            f"stopped at step {self.step}, as training diverged{since}: {what}; {self._describe_windows(step)}"
        )

    def _report_skip(self, loss: float, grad_norm: float) -> None:
        why = f"loss {loss}, gradient norm {grad_norm}; {self._describe_windows(self.step + 1)}"
        self._write({"kind": "skip", "step": self.step + 1, "windows": self._windows(self.step + 1), "why": why})

    def _windows(self, step: int) -> list[int]:
        """Numbers of the first and the last window of a step (counted from 1)."""
        size = self.config.train.batch_size
        return [(step - 1) * size, step * size - 1]

    def _describe_windows(self, step: int) -> str:
        first, last = self._windows(step)
        describe = getattr(self.stream, "describe", None)
        origin = f" ({describe(first)} to {describe(last)})" if describe else ""
        return f"its batch: windows {first} to {last}{origin}"

    def _check_lease(self) -> None:
        """Superseded if another worker has the run. Called before anything is written."""
        if self.lease is not None and not self.lease.held():
            raise Superseded(f"stopped after step {self.step}: another worker has taken this run over")

    def _write(self, row: dict[str, Any]) -> None:
        self._check_lease()
        for sink in self.sinks:
            sink.write(row)
        if self.world.main:
            self.on_row(row)

    def _on_checkpoint(self, path: Path) -> None:
        """Start the user's command in the background, in a session of its own: it may outlive this process."""
        step = int(path.name.removeprefix("step-"))
        self.on_row({"kind": "checkpoint", "step": step})  # not in metrics.jsonl: the folder shows it
        if (command := self.config.on_checkpoint) is None:
            return
        values = {"run": str(self.folder), "checkpoint": str(path), "step": str(step)}
        # In one pass, as a value may look like another placeholder. The shell's own braces are kept.
        command = re.sub(r"\{(run|checkpoint|step)\}", lambda match: shlex.quote(values[match[1]]), command)
        # The command is not one of this run's processes, so it must not get their variables.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_PROCESS_VARIABLES)}
        environment |= {f"CANONLM_{name.upper()}": value for name, value in values.items()}
        log = make_folder(self.folder, "on_checkpoint") / f"{path.name}.txt"
        with append(log) as output:
            subprocess.Popen(
                f"{command}\necho exit code $?",
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
