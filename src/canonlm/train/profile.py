"""`profile: "10:13"`: a Chrome trace of the operators in steps 10, 11 and 12."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

from canonlm.core.errors import expected
from canonlm.core.files import make_folder, temporary_folder


def bounds(steps: Any) -> tuple[int, int]:
    """`"10:13"`: (10, 13). InvalidSetting for anything but a string of two integers, 1 <= start < stop."""
    start, _, stop = steps.partition(":") if isinstance(steps, str) else ("", "", "")
    if not (start.isdecimal() and stop.isdecimal() and 1 <= int(start) < int(stop)):
        raise expected("profile", 'start:stop with 1 <= start < stop, such as "10:13" for steps 10, 11, 12', steps)
    return int(start), int(stop)


class Profile:
    """A context around the loop of a run that has done `done` steps; the loop calls `step` after each step. Does
    nothing if `steps` is None. Steps count from 1, as in the rows of `metrics.jsonl`.

    Writes `folder/profile/steps-10-13-rank0.json.gz`, for https://ui.perfetto.dev or chrome://tracing. If a process
    begins or ends within these steps, the trace and its name cover only the steps that it ran.
    """

    def __init__(self, steps: str | None, folder: Path, rank: int, done: int) -> None:
        first, stop = bounds(steps) if steps else (0, 0)
        self._recording = _record(first, stop, folder / "profile", rank, done + 1)

    def __enter__(self) -> "Profile":
        next(self._recording, None)
        return self

    def step(self) -> None:
        next(self._recording, None)

    def __exit__(self, *_: Any) -> None:
        self._recording.close()


def _record(start: int, stop: int, folder: Path, rank: int, step: int) -> Generator[None]:
    """Record the trace: yields while each step runs; `step` is the first. If closed early, it writes what it has."""
    from torch.profiler import profile, record_function

    if step >= stop:
        return
    while step < start - 1:
        yield
        step += 1
    profiler = profile()
    profiler.prepare_trace()
    if step < start:  # a step to warm up, as the profiler's own first moments are slow
        yield
        step += 1
    profiler.start_trace()
    first = step
    try:
        while step < stop:
            with record_function(f"step {step}"):
                yield
            step += 1
    finally:
        profiler.stop_trace()
        make_folder(folder.parent, folder.name)
        name = f"steps-{first}-{min(step + 1, stop)}-rank{rank}.json.gz"
        with temporary_folder(folder / name) as temporary:
            profiler.export_chrome_trace(str(temporary / name))
            (temporary / name).replace(folder / name)
