"""Estimates the time of runs on this machine from timed steps of each model, then from finished runs."""

import time
from collections.abc import Callable, Collection, Iterable

from canonlm.launch.plan import measure_speed, tokens_of
from canonlm.train.build import build_model
from canonlm.train.config import RunConfig
from canonlm.train.flops import flops_per_token

START_SECONDS = 10.0
"""Seconds from the start of a process to its first step."""


def timed(config: RunConfig) -> float:
    """Seconds per token, measured on some steps of the model."""
    return flops_per_token(build_model(config, "meta"), config.data.seq_len) / measure_speed([config])


class Pace:
    """Predicts the time that runs take. seconds_per_token: called once for each task and architecture."""

    def __init__(
        self,
        jobs: int,
        seconds_per_token: Callable[[RunConfig], float] = timed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs, self.seconds_per_token, self.clock = jobs, seconds_per_token, clock
        self._measured: dict[tuple[object, ...], float] = {}
        self._running: dict[str, float] = {}  # when each began
        self._elapsed = self._predicted = 0.0  # seconds of all finished runs

    def predicted(self, config: RunConfig) -> float:
        """Seconds of a complete run, by the timed steps alone."""
        key = (config.task or {}).get("name"), config.arch, config.model.model_dump_json()
        if key not in self._measured:
            self._measured[key] = self.seconds_per_token(config)
        return START_SECONDS + tokens_of(config) * self._measured[key]

    def started(self, name: str) -> None:
        self._running[name] = self.clock()

    def ended(self, name: str, config: RunConfig, finished: bool) -> None:
        """finished: whether the run counts as a measurement."""
        begin = self._running.pop(name, None)
        if finished and begin is not None:
            self._elapsed += self.clock() - begin
            self._predicted += self.predicted(config)

    def left(self, runs: Iterable[tuple[str, RunConfig]], done: Collection[str] = ()) -> float:
        """Seconds until all of these runs are done, `jobs` at a time."""
        ratio = self._elapsed / self._predicted if self._predicted else 1.0
        now, total, longest = self.clock(), 0.0, 0.0
        for name, config in runs:
            if name not in done:
                seconds = ratio * self.predicted(config) - (now - self._running.get(name, now))
                total, longest = total + max(0.0, seconds), max(longest, seconds)
        return max(total / self.jobs, longest)
