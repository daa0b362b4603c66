"""Measures a run's training speed and its waiting for data, without evaluations and checkpoints."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
Reading = dict[str, float | None]


class Clock:
    """Training time without evaluations and checkpoints. The first steps of a process are warm-up and do not count
    towards the speed; everything counts towards `elapsed_s`, which starts at `before_s` if a run is continued.

    `flops_per_token` of the model and `peak_flops` of one device (per second) give the MFU: the model's own arithmetic
    as a share of the peak of all `devices`. It is None if either is not known.
    """

    WARMUP_STEPS = 3

    def __init__(
        self,
        tokens_per_step: int,
        *,
        before_s: float = 0.0,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        devices: int = 1,
        device: torch.device | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self._peak_tokens_per_s = peak_flops * devices / flops_per_token if peak_flops and flops_per_token else None
        self._device = device
        self._now = now
        self._start = self._idle_now() - before_s
        self._steps = 0  # of this process
        self._counted = self._seconds = 0.0  # steps and seconds in all readings so far
        self._restart(self._start + before_s)

    def tick(self) -> None:
        """A step is done."""
        self._steps += 1
        self._since_mark += 1
        if self._steps == self.WARMUP_STEPS:
            self._restart(self._idle_now())

    @contextmanager
    def paused(self) -> Generator[None]:
        """Time within this context does not count as training: an evaluation, a checkpoint."""
        start = self._idle_now()
        try:
            yield
        finally:
            self._paused_s += self._idle_now() - start

    def waiting(self, batches: Iterable[T]) -> Generator[T]:
        """The batches. The time to get each counts as waiting for data."""
        source = iter(batches)
        while True:
            start = self._now()
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self._waited += self._now() - start
            yield batch

    def reading(self) -> Reading:
        """`tokens_per_s`, `mfu`, `data_wait_s` and `data_wait_share` since the last reading, or since the warm-up (None
        during it), and `elapsed_s`. `canonlm.runs.rows` explains them."""
        now, speed, mfu, waited, wait_share = self._idle_now(), None, None, None, None
        if self._steps > self.WARMUP_STEPS:
            seconds, waited = now - self._mark - self._paused_s, self._waited
            self._counted, self._seconds = self._counted + self._since_mark, self._seconds + seconds
            speed, wait_share = self.tokens_per_step * self._since_mark / seconds, waited / seconds
            mfu = speed / self._peak_tokens_per_s if self._peak_tokens_per_s else None
        self._restart(now)
        return {
            "tokens_per_s": speed,
            "mfu": mfu,
            "data_wait_s": waited,
            "data_wait_share": wait_share,
            "elapsed_s": now - self._start,
        }

    def result(self) -> Reading:
        """`train_seconds` of the run, and `tokens_per_s` of this process, None if all its steps were warm-up.

        To be called after the last reading."""
        speed = self.tokens_per_step * self._counted / self._seconds if self._counted else None
        return {"tokens_per_s": speed, "train_seconds": self._idle_now() - self._start}

    def _restart(self, now: float) -> None:
        self._mark, self._paused_s, self._waited, self._since_mark = now, 0.0, 0.0, 0

    def _idle_now(self) -> float:
        """The time after the device has finished all its work: it may be steps behind the loop."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()
