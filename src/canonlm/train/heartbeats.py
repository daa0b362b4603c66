"""Heartbeats of the processes of a run: a process that is frozen, or whose machine is gone, is named and ends the run.

The processes wait for each other in every step, so one that stops answering would stop all of them without a word. A
thread in each process counts in the store that they share. The first process watches the counts of all; the others
watch the first one's, and whether the store answers, as the first process usually serves it.

Only a silent process ends the run: one that computes for long still counts. A pause of this process itself (a machine
that slept) does not make the others look silent, as a check counts at most the interval between two checks.

Heartbeats also say how many exchanges a process has begun. When those of no process change and some have fewer, the
others wait for them: the first process names them, and goes on.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch._C._distributed_c10d as c10d
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from canonlm.core.errors import expected
from canonlm.train.signals import note_failure

T = TypeVar("T")

LEFT = "left"


def join(rank: int, size: int, timeout: float) -> Store:
    """The store of all processes, once every one has joined. ValueError that names those that have not within this
    time (in seconds)."""
    store = _connect(rank, size, timeout, serves=rank == 0)
    names = [_name(other) for other in range(size)]
    store.set(_name(rank), _about(0))
    try:
        _within(timeout + 1, lambda: store.wait(names, timedelta(seconds=timeout)))
    except (DistError, TimeoutError):
        try:
            missing = _within(1, lambda: [other for other in range(size) if not store.check([names[other]])])
        except (DistError, TimeoutError):
            missing = [0]
        raise ValueError(_late(missing, timeout)) from None
    return store


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`. TimeoutError if it takes longer: a store's calls wait for a frozen server without end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # an executor's thread would keep this process alive
    return future.result(seconds)


def _connect(rank: int, size: int, timeout: float, serves: bool = False) -> Store:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address:
        raise expected("MASTER_ADDR", "the address of the first process, as a launcher sets it", address)
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise expected("MASTER_PORT", "a port of the first process, as a launcher sets it", port)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process serves it
    limit = timedelta(seconds=timeout)
    try:
        store = _within(
            timeout + 1,
            lambda: TCPStore(
                address, int(port), size, serves and not by_agent, limit, wait_for_workers=False, multi_tenant=True
            ),
        )
    except (DistError, TimeoutError) as error:
        if serves and not by_agent:
            first_line = str(error).strip().partition("\n")[0]
            raise ValueError(f"MASTER_PORT: rank 0 cannot listen on {port} ({first_line})") from None
        raise ValueError(_late([0], timeout)) from None
    return PrefixStore(f"canonlm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _late(missing: list[int], timeout: float) -> str:
    who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
    return f"{who} not joined the run within {timeout:g} s (parallel.start_timeout)"


class Heartbeats:
    """Within this context, threads send this process's heartbeats and watch the others', and call `fail(message)` once
    if one is silent for `timeout` seconds; by default the process then ends."""

    def __init__(self, rank: int, size: int, timeout: float, fail: Callable[[str], None] | None = None) -> None:
        self._rank, self._timeout, self._fail = rank, timeout, fail or self._end_process
        self._interval = min(5.0, timeout / 10)
        # A connection of its own, as the other may be waiting; `_watch` is the first to notice that it does not answer.
        self._store = _connect(rank, size, 3 * timeout)
        self._watched = [other for other in (range(size) if rank == 0 else [0]) if other != rank]
        self._seen = dict.fromkeys(self._watched, b"")  # what they last said
        self._answers = self._exchanges = 0  # of the store; of this process
        self._counts: dict[int, int] = {}  # exchanges of all processes, and for how long they have not changed
        self._still = 0.0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._talk, self._watch)]

    def __enter__(self) -> "Heartbeats":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        with suppress(DistError, TimeoutError):  # it is not missed from now on: it may end before the others
            _within(self._interval, lambda: self._store.set(_name(self._rank), LEFT))

    def _talk(self) -> None:
        """Send heartbeats and read those of others, which may wait for a frozen server without end."""
        try:
            while not self._end.wait(self._interval):
                self._answers, self._exchanges = self._answers + 1, _exchanges()
                self._store.set(_name(self._rank), _about(self._answers, self._exchanges))
                for other in self._watched:
                    self._seen[other] = self._store.get(_name(other))
        except DistError:
            self._end.set()  # the server has ended, which the launcher notices

    def _watch(self) -> None:
        last, silent = dict.fromkeys([*self._watched, -1], b"-"), dict.fromkeys([*self._watched, -1], 0.0)
        looked = time.monotonic()
        while not self._end.wait(self._interval):
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * self._interval), now
            for other, about in {-1: b"%d" % self._answers, **self._seen}.items():
                silent[other] = 0.0 if about in (LEFT.encode(), b"") or about != last[other] else silent[other] + passed
                last[other] = about
                if silent[other] >= self._timeout and not self._end.is_set():
                    who = max(other, 0)  # -1: the store, which the first process serves
                    return self._fail(
                        f"{self._who(who)} has sent no heartbeat for {self._timeout:g} s (parallel.timeout)"
                    )
            if self._rank == 0 and (behind := self._behind(passed)):
                names = ", ".join(map(self._who, behind[:3])) + f" and {len(behind) - 3} more" * (len(behind) > 3)
                line = f"canonlm: for {self._timeout:g} s, the other processes have waited for {names}"
                print(line, file=sys.stderr, flush=True)

    def _behind(self, passed: float) -> list[int]:
        """The processes for which the others have waited for `timeout` seconds, once they have."""
        words = {rank: about.split() for rank, about in self._seen.items()}
        counts = {0: self._exchanges, **{rank: int(heard[1]) for rank, heard in words.items() if len(heard) > 1}}
        before, self._still = self._still, self._still + passed if counts == self._counts else 0.0
        self._counts = counts
        fewest = min(counts.values())
        stalled = before < self._timeout <= self._still and fewest < max(counts.values())
        return [rank for rank, count in sorted(counts.items()) if count == fewest] if stalled else []

    def _who(self, rank: int) -> str:
        about = self._seen.get(rank, b"").decode() if rank != self._rank else _about(0)
        return f"rank {rank}" + (f" ({about.split(maxsplit=2)[2]})" if about else "")

    def _end_process(self, message: str) -> None:
        """End this process at once: its main thread waits for the silent one, and cannot be interrupted. The launcher
        then ends the others."""
        print(f"canonlm: {message}; run it again to continue", file=sys.stderr, flush=True)
        note_failure(message, printed=self._rank == 0)
        os._exit(1)


def _name(rank: int) -> str:
    return f"heartbeat-{rank}"


def _about(count: int, exchanges: int = 0) -> str:
    return f"{count} {exchanges} process {os.getpid()} on {socket.gethostname()}"


def _exchanges() -> int:
    """The number of exchanges that this process has begun so far in all its groups, by torch's flight recorder; 0 if it
    records none, as with gloo in torch 2.10."""
    recorders = [getattr(c10d, f"_dump_{name}_trace_json", None) for name in ("fr", "nccl")]
    groups = [group for dump in recorders if dump for group in json.loads(dump(False)).get("pg_status", {}).values()]
    return sum(int(group.get("last_enqueued_collective", 0)) for group in groups)
