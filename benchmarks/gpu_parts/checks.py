"""What is right on this machine: `canonlm doctor`, and the tests that need a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_parts.device import Device
from gpu_parts.rows import Row, not_available

ROOT = Path(__file__).parents[2]
FILES = ["tests/gpu", "tests/ops/test_kernels_on_gpu.py", "tests/models/test_decoders_on_gpu.py"]
ALONE = ["--confcutdir", "tests/gpu", "tests/gpu/test_kernels.py"]  # these need torch and Triton only
PYTEST = [sys.executable, "-m", "pytest"]
LINE = re.compile(r"(tests/\S+::.+?) (PASSED|FAILED|ERROR)|(PASSED|FAILED|ERROR) (tests/\S+::.+?)\s*$")


def doctor(device: Device, out: Path) -> Iterator[Row]:
    """As `canonlm doctor`: one row for each kernel and dtype, its largest error of values as a share of the largest
    number."""
    from canonlm.ops.registry import trials

    bad = []
    for _, row in trials(device.device):
        settings = {key: row[key] for key in ("kernel", "dtype", "state")}
        more = {"gradients": row["gradients"]} if "gradients" in row else {}
        yield Row("error of a kernel", settings, row.get("values"), "of the largest", note=row["detail"], more=more)
        bad += [row["kernel"]] if row["state"] in ("wrong", "not tried") else []
    if bad:
        raise RuntimeError(f"wrong here, or not tried: {', '.join(bad)}")


def tests(device: Device, out: Path) -> Iterator[Row]:
    """One row for each test: 1 passed, 0 failed. On many cores, several at a time: they compile more than they run."""
    command = [*PYTEST, "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "gpu"]
    if importlib.util.find_spec("xdist") is not None and (cores := os.cpu_count() or 1) > 4:
        command += ["-n", str(min(8, cores // 2))]
    command += FILES if importlib.util.find_spec("pydantic") is not None else ALONE
    environment = {"OMP_NUM_THREADS": "1"} | ({} if device.is_gpu else {"CANONLM_REHEARSE": "1"})
    states: dict[str, str] = {}
    for line in lines_of(command, out / "tests.txt", environment):
        if match := LINE.search(line):
            name = (match[1] or match[4]).partition(" - ")[0].removeprefix("tests/")
            if name not in states:  # pytest lists those that failed once more at its end
                states[name] = match[2] or match[3]
                yield Row("test", {"name": name}, float(states[name] == "PASSED"), "passed")
    failed, count = [name for name, state in states.items() if state != "PASSED"], len(states)
    if failed or not count:
        raise RuntimeError(f"{len(failed)} of {count} tests failed, see tests.txt: {', '.join(failed)}")
    yield Row("tests that passed", {}, count, "tests")


TOOLS = {"memcheck": "dtype1", "racecheck": "steps or dtype1 and (normed or gated)"}
"""Of compute-sanitizer, and which tests of the kernels run under it (dtype1: bfloat16), as it makes them slow."""


def sanitizer(device: Device, out: Path) -> Iterator[Row]:
    """Errors that compute-sanitizer finds in the kernels' tests; after `tests`, which have compiled the kernels."""
    if shutil.which("compute-sanitizer") is None or not device.is_gpu:
        yield not_available("errors", {}, "compute-sanitizer is not on the PATH" if device.is_gpu else "needs a GPU")
        return
    running = {}
    for tool, chosen in TOOLS.items():
        command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", *PYTEST, "-o", "addopts="]
        command += ["-p", "no:cacheprovider", *ALONE, "-k", chosen]
        # Each tensor in memory of its own, or a kernel could leave one and meet its neighbour.
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
        with (out / f"{tool}.txt").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "4"} | alone
            running[tool] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    for tool, process in running.items():
        process.wait()
        text = (out / f"{tool}.txt").read_text()
        errors = re.search(r"SUMMARY: (\d+) (?:errors?|hazards?)", text)
        passed = re.search(r"(\d+) passed", text)
        if errors is None or passed is None:
            raise RuntimeError(f"{tool} wrote no summary, see {out / f'{tool}.txt'}")
        yield Row("errors", {"tool": tool}, float(errors[1]), "", target="<= 0", more={"tests": passed[1]})


def lines_of(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[str]:
    """What the command prints, line by line, which is also written to the log."""
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            yield line
