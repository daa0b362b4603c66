"""A queue of runs for any number of workers, on one machine or many that share a folder.

    queue.work(root, plan)     # on this machine, on others, in a SLURM job array: any number of times, at any time

A worker claims runs by leases (`canonlm.runs.leases`) in `root/leases/`, trains each in a process of its own, and
continues where another has stopped: a run that was interrupted or killed continues from its newest checkpoint, and a
run whose worker sends no heartbeats is taken over. A run that fails MAX_FAILURES times is left alone, and the others
continue; `root/leases/NAME.failures.json` has the reasons, and removing that file lets it be tried again.

One worker at a time holds a run, and a process that has lost its lease stops before its next row, checkpoint or result.
If a process is stopped between this check and a write until another has taken over, two may write: both write complete
files of the same run, and on equal machines the same numbers.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from canonlm.core.errors import about, expected, writing
from canonlm.core.files import make_folder, time_in, write_json
from canonlm.core.untrusted import path_inside
from canonlm.launch import local
from canonlm.launch.grid import PlannedRun
from canonlm.launch.local import MAX_MESSAGE, Process, is_locked, reason, start_process
from canonlm.launch.processes import STOPPED
from canonlm.runs.folder import checkpoint_steps, read_json
from canonlm.runs.leases import Lease, Leases
from canonlm.runs.rows import one_line
from canonlm.runs.watch import Followed
from canonlm.train.signals import Signals

MAX_FAILURES = 3
INTERVAL = 20.0  # seconds between heartbeats; a silent worker's runs are taken over after five of them
POLL_SECONDS = 0.3

Plan = Callable[[], Sequence[PlannedRun]]


class Event(NamedTuple):
    """Something that happened to a run of this worker."""

    kind: Literal["started", "finished", "failed", "again", "stopped", "lost"]
    run: PlannedRun
    message: str = ""  # the reason, for failed (for good) and again (it will be tried again)

    def __str__(self) -> str:
        words = {"again": "will be tried again", "lost": "was taken over by another worker"}
        return f"{self.run.name}: {words.get(self.kind, self.kind)}" + (f" ({self.message})" if self.message else "")


@dataclass(frozen=True)
class Summary:
    finished: list[str]  # by this worker
    failed: dict[str, str]  # name and reason, of all runs of the plan, by any worker
    total: int  # runs of the plan


class Row(NamedTuple):
    """The state of a run of the plan, from its folder and its lease."""

    name: str
    state: Literal["waiting", "running", "done", "failed"]
    step: int = 0
    steps: int | None = None
    host: str = ""
    pid: int = 0
    silent: float = 0.0  # seconds since the worker's last heartbeat
    message: str = ""  # the reason of its last failure, also while it waits to be tried again


Start = Callable[[PlannedRun, int, Sequence[str], Mapping[str, str]], Process]


def work(
    root: Path,
    plan: Plan,
    *,
    jobs: int = 1,
    devices: Sequence[str] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    interval: float = INTERVAL,
    start: Start = start_process,
    on_poll: Callable[[], None] = lambda: None,
    tries: int = MAX_FAILURES,
) -> Summary:
    """Train the runs of `plan()` that no worker has finished or holds, `jobs` at a time, until all are finished or have
    failed; waits for those that others hold, and takes over the runs of dead workers.

    `plan()` is called at the start, and again whenever nothing is left to claim and something was finished since: runs
    may depend on others' results. It returns all runs each time, in the order in which they should begin. Names are
    unique within `root`; run folders may lie anywhere.

    devices: values for CUDA_VISIBLE_DEVICES, one per job in turns; default: the GPUs of this machine.
    start: `start(run, slot, devices, environment)` begins a run; default: `canonlm train` in its folder.
    on_poll: called several times a second. tries: how often a run may fail.

    KeyboardInterrupt: after SIGINT, SIGTERM, SIGUSR1, SIGUSR2 or a closed terminal; every run has saved its state, and
    its lease is released. A second Ctrl-C does not wait for the saving. On SLURM the job is requeued (see
    `canonlm.train.signals`). ValueError: the folder cannot be used, or two runs have one name. For the main thread.
    """
    if jobs < 1:
        raise expected("--jobs", "an integer >= 1", jobs)
    with writing("--out", root):
        folder = make_folder(root, "leases")
    on = local.gpus() if devices is None else devices
    return _Worker(folder, plan, jobs, on, on_event, on_poll, interval, start, tries).run()


def state(root: Path, plan: Plan) -> list[Row]:
    """The states of the runs of a plan. Writes nothing but a temporary file, to read the file system's clock."""
    folder = path_inside(root, "leases")
    owners, rows = Leases(folder, INTERVAL).owners(), []
    for run in plan():
        followed = Followed(run.folder / "metrics.jsonl")
        followed.read()
        steps, failed = run.config.train.steps, failures(folder, run.name)
        message = failed[-1]["message"] if failed else ""
        row = Row(run.name, "waiting", followed.step, steps, message=message)
        if _is_finished(run):
            row = row._replace(state="done", step=steps, message="")
        elif len(failed) >= MAX_FAILURES:
            row = row._replace(state="failed")
        elif run.name in owners:
            owner, silent = owners[run.name]
            row = row._replace(state="running", host=owner.host, pid=owner.pid, silent=silent)
        rows.append(row)
    return rows


class _Running(NamedTuple):
    run: PlannedRun
    slot: int
    lease: Lease
    process: Process
    checkpoint: int  # the step of the newest when it started


@dataclass
class _Worker:
    folder: Path  # of the leases
    plan: Plan
    jobs: int
    devices: Sequence[str]
    on_event: Callable[[Event], None]
    on_poll: Callable[[], None]
    interval: float
    start: Start
    tries: int

    def __post_init__(self) -> None:
        self.leases, self.heartbeat = Leases(self.folder, self.interval), _Heartbeat(self.interval)
        self.pause = min(POLL_SECONDS, self.interval / 4)
        self.total, self.todo = 0, deque[PlannedRun]()
        self.held: list[PlannedRun] = []  # by other workers; or just failed, so that other runs come first
        self.plan_outdated = False  # whether something was settled since the last call of `plan`
        self.running: list[_Running] = []
        self.finished: list[str] = []
        self.failed: dict[str, str] = {}
        self.settled: set[str] = set()  # finished or failed, by any worker

    def run(self) -> Summary:
        with Signals(hangup=True) as signals, self.heartbeat:
            try:
                self._work(signals)
                stopped = signals.received is not None
            finally:
                self._stop(signals)
            if stopped:
                next_step = signals.next_step(main=True)
                raise KeyboardInterrupt(next_step)
        return Summary(self.finished, self.failed, self.total)

    def _work(self, signals: Signals) -> None:
        self._update_plan()
        while signals.received is None:
            self.on_poll()
            busy = self._reap()
            while signals.received is None and len(self.running) < self.jobs and (claimed := self._claim()):
                self._begin(*claimed)
                busy = True
            if len(self.running) < self.jobs and self.plan_outdated:
                self._update_plan()
            elif not (self.running or self.todo or self.held):
                self.leases.remove(self.settled)
                return
            else:
                self.todo.extend(self.held)
                self.held = []
            if not busy:
                time.sleep(self.pause)

    def _update_plan(self) -> None:
        plan = self.plan()
        runs = {run.name: run for run in plan}
        if twice := [run.name for run in plan if runs[run.name].folder != run.folder]:
            raise ValueError(f"two runs have the name {twice[0]}")
        for run in plan:
            if run.folder.is_relative_to(self.folder.parent):
                path_inside(self.folder.parent, str(run.folder.relative_to(self.folder.parent)))
        mine = {running.run.name for running in self.running}
        self.total = len(runs)
        self.todo = deque(run for run in runs.values() if run.name not in self.settled | mine)
        self.held, self.plan_outdated = [], False

    def _claim(self) -> tuple[PlannedRun, Lease] | None:
        """Claim the next run that is free."""
        listing = self.leases.listed() if self.todo else {}  # once for all of them
        while self.todo:
            run = self.todo.popleft()
            if self._is_settled(run):
                continue
            if (lease := self.leases.claim(run.name, listing)) is None:
                self.held.append(run)
                continue
            # Checked again: another worker may have finished it, and released it, before the claim.
            _refresh(run.folder)
            if self._is_settled(run):
                lease.release()
            elif is_locked(run.folder):  # by a training that no queue has started, or that is just ending
                lease.release()
                self.held.append(run)
            else:
                return run, lease
        return None

    def _is_settled(self, run: PlannedRun) -> bool:
        if not _is_finished(run):
            failed = failures(self.folder, run.name)
            if len(failed) < self.tries:
                return False
            self.failed[run.name] = failed[-1]["message"]
        self.settled.add(run.name)
        self.plan_outdated = True
        return True

    def _begin(self, run: PlannedRun, lease: Lease) -> None:
        slot = min(set(range(self.jobs)) - {running.slot for running in self.running})
        newest = _newest(run)
        # Without SLURM's variables, as a run must not requeue the worker's job.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        try:
            process = self.start(run, slot, self.devices, environment | lease.environment)
        except (ValueError, OSError) as error:
            self._failed(run, lease, about(error, run.folder) if isinstance(error, OSError) else str(error))
            return
        self.heartbeat.leases.append(lease)
        self.running.append(_Running(run, slot, lease, process, newest))
        self.on_event(Event("started", run))

    def _reap(self) -> bool:
        """Handle running runs that have ended. Returns whether there was one."""
        before = len(self.running)
        for running in list(self.running):
            run, lease = running.run, running.lease
            if (code := running.process.poll()) is None and lease not in self.heartbeat.lost:
                continue
            if code is None:
                running.process.kill()
                running.process.wait()
            self.running.remove(running)
            self.heartbeat.forget(lease)
            if _is_finished(run):
                self.finished.append(run.name)
                self.settled.add(run.name)
                self.plan_outdated = True
                lease.release()
                self.on_event(Event("finished", run))
            elif not lease.held():
                self.held.append(run)
                self.on_event(Event("lost", run))
            elif code == STOPPED or (code and code < 0 and running.checkpoint != _newest(run)):
                # It was stopped or killed after new progress, so it will continue from there.
                lease.release()
                self.held.append(run)
                self.on_event(Event("again", run, reason(run.folder, code)))
            else:
                self._failed(run, lease, reason(run.folder, code) if code else "it ended without a result")
        return len(self.running) < before

    def _failed(self, run: PlannedRun, lease: Lease, message: str) -> None:
        failed = [*failures(self.folder, run.name), {"host": socket.gethostname(), "message": message}]
        write_json(_failures_of(self.folder, run.name), failed)
        lease.release()
        if not self._is_settled(run):
            self.held.append(run)
        self.on_event(Event("failed" if run.name in self.failed else "again", run, message))

    def _stop(self, signals: Signals) -> None:
        """Leave no run running: each saves its state, while its lease is kept."""
        for running in self.running:
            local.end(running.process)
        signals.let_interrupt()
        for running in self.running:
            running.process.wait()
            with suppress(OSError):
                running.lease.release()
            self.on_event(Event("stopped", running.run))


class _Heartbeat:
    """A thread that sends the heartbeats of this worker's leases, and detects when one is lost."""

    def __init__(self, interval: float) -> None:
        self.leases: list[Lease] = []
        self.lost: set[Lease] = set()
        self._interval, self._end = interval, threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def forget(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.lost.discard(lease)

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            for lease in list(self.leases):
                with suppress(OSError):  # the file system may answer at the next heartbeat
                    if not lease.beat():
                        self.lost.add(lease)


def _is_finished(run: PlannedRun) -> bool:
    return (run.folder / "result.json").exists()


def _newest(run: PlannedRun) -> int:
    """The step of a run's newest checkpoint."""
    return max(checkpoint_steps(run.folder / "checkpoints"), default=0)


def _failures_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.failures.json"


def failures(folder: Path, name: str) -> list[dict[str, str]]:
    """Where and why a run has failed so far, each reason in one line. ValueError: the file holds something else."""
    path = _failures_of(folder, name)
    listed = read_json(path)
    failed = [] if listed is None else listed
    if not isinstance(failed, list) or not all(
        isinstance(one, dict) and {str} == {type(one.get(key)) for key in ("host", "message")} for one in failed
    ):
        raise expected(str(path), "a list of failures, each with a host and a message (remove it to try again)", failed)
    return [one | {"message": one_line(one["message"], 2 * MAX_MESSAGE)} for one in failed]


def _refresh(folder: Path) -> None:
    """Change the folder, so that a file system that caches missing files (NFS) looks again."""
    with suppress(FileNotFoundError):  # not begun yet
        time_in(folder)
