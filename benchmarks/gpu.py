"""Everything that only a GPU can show, in at most nine minutes: is it right, how fast is it, what does Canon cost?

    python benchmarks/gpu.py [--only conv,train] [--minutes 9] [--out DIR] [--wheels DIR] [--list] [--device cpu]

Groups run in the order of --list, the most important first, each in a process of its own and with a time limit, so that
a crash or a hang loses one group. Every number is printed and written to <out>/<group>.json at once; after each group,
and if the command is ended, <out>/gpu.tar.gz holds the folder. --only runs some groups, and leaves the files of the
others alone. --wheels installs the wheels of a folder, for a machine without a network. --device cpu rehearses the same
code at tiny sizes, with the kernels in Triton's interpreter if TRITON_INTERPRET=1 is set. The exit code is 1 if a group
failed. docs/gpu.md explains the numbers.
"""

import argparse
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpu_parts.rows import Missing, Results, one_line

ROOT = Path(__file__).parents[1]
OUT = {"cuda": ROOT / "benchmarks/results/gpu", "cpu": ROOT / "runs/gpu-rehearsal"}
PACKAGES = ROOT / "runs/gpu-packages"
MIN_SECONDS = 5
"""A group is not started with less time left."""


class Group(NamedTuple):
    """`seconds` is its time budget, to which the time that earlier groups did not use is added."""

    module: str
    seconds: int
    answers: str
    needs: tuple[str, ...] = ()


MODELS = ("pydantic", "transformers")
RUNS = (*MODELS, "numba", "yaml", "filelock")
GROUPS = {
    "doctor": Group("checks", 40, "is every kernel that models would use right here?", MODELS),
    "tests": Group("checks", 75, "the tests that need a GPU", ("pytest", "hypothesis")),
    "sanitizer": Group("checks", 60, "do kernels touch memory that is not theirs, or race?", ("pytest", "hypothesis")),
    "conv": Group("conv", 40, "Canon's convolution against conv1d, other kernels and a copy of the same size"),
    "train": Group("steps", 100, "what Canon costs in a training step; ours against transformers' Llama", MODELS),
    "generate": Group("steps", 45, "what Canon costs in generation", MODELS),
    "fused": Group("fused", 25, "norm, Canon and gate in one kernel against separate kernels; decoding steps"),
    "tune": Group("fused", 35, "which tile sizes are fastest", ("triton",)),
    "loss": Group("loss", 10, "the loss in chunks against its bare products", MODELS),
    "attention": Group("loss", 20, "isolated documents, by attention implementation", MODELS),
    "memory": Group("runs", 20, "predicted against measured memory", RUNS),
    "repeat": Group("runs", 15, "the same 20 steps twice: the same bits?", RUNS),
    "loop": Group("runs", 20, "copies to the GPU, and how long it idles in the training loop", RUNS),
    "fla": Group("conv", 20, "the same convolution in flash-linear-attention, where it is installed", ("triton",)),
    "play": Group(
        "runs", 30, "canonlm play depo for a while, and the sampler that feeds it", (*RUNS, "typer", "rich", "plotly")
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="groups, separated by commas")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all groups; default: 9")
    parser.add_argument("--out", type=Path, help="folder of the results; default: benchmarks/results/gpu")
    parser.add_argument(
        "--wheels", type=Path, help="install the packages of this folder, for a machine without a network"
    )
    parser.add_argument("--list", action="store_true", help="list the groups, and the question that each answers")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal")
    parser.add_argument("--group", help=argparse.SUPPRESS)  # for the processes that this command starts
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    out = options.out or OUT[options.device]
    if options.group:
        return work(options.group, options.device, out)
    if options.list:
        for name, group in GROUPS.items():
            print(f"{name:10} {group.seconds:4} s  {group.answers}")
        return 0
    names = options.only.split(",") if options.only else list(GROUPS)
    if unknown := [name for name in names if name not in GROUPS]:
        parser.error(f'--only: unknown group "{unknown[0]}"; groups: {", ".join(GROUPS)}')
    if options.device == "cuda" and (why := no_gpu()):
        print(f"gpu: {why}; --device cpu tries the same code without one", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a group's process ends, too, and results are kept
    install({package for name in names for package in GROUPS[name].needs}, options.wheels)
    states = run_all([name for name in GROUPS if name in names], options.device, out, end)
    return summary(states, out)


def no_gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        return "missing: torch, with CUDA"
    command = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return "torch finds no GPU" if subprocess.run(command, check=False).returncode else ""


def install(packages: set[str], wheels: Path | None) -> None:
    """Install the missing ones into a folder of this checkout. If pip fails, the groups report what they miss."""
    sys.path.append(str(PACKAGES))
    names = {{"yaml": "pyyaml"}.get(p, p) for p in packages if importlib.util.find_spec(p) is None} - {"triton"}
    missing = sorted(names)
    if wheels is not None:  # all of them, and nothing else: without a network pip finds no dependencies
        missing = ["--no-index", "--no-deps", *(str(file) for file in sorted(wheels.glob("*.whl")))]
    if missing:
        print(f"gpu: installing {wheels or 'what is missing: ' + ', '.join(missing)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--retries", "0", "--timeout", "5", "--upgrade"]
        with_pip = subprocess.run(
            [*pip, "--target", str(PACKAGES), *missing], capture_output=True, text=True, check=False
        )
        if with_pip.returncode:
            why = one_line((with_pip.stderr.strip().splitlines() or ["no network?"])[-1])
            print(f"gpu: pip could not install {wheels or ', '.join(missing)}: {why}", flush=True)
        importlib.invalidate_caches()


# -- the processes of groups ------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """The process of a group. It starts with its imports, and works after `go`."""

    name: str
    process: subprocess.Popen
    log: Path

    @classmethod
    def start(cls, name: str, device: str, out: Path) -> "Worker":
        out.mkdir(parents=True, exist_ok=True)
        log = out / f".{name}.log"
        command = [sys.executable, "-u", __file__, "--group", name, "--device", device, "--out", str(out)]
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", ""), str(PACKAGES)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if device == "cpu":  # the user's cache is for measurements and trials of compiled kernels
            environment["XDG_CACHE_HOME"] = str(out / ".cache")
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True, text=True
            )
        return cls(name, process, log)

    def go(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has already failed, and logged why
            self.process.stdin.write("go\n")
            self.process.stdin.close()

    def wait(self, seconds: float) -> str:
        """Wait for the process; returns how it ended, in words."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped at its limit of {seconds:.0f} s"
        finally:
            self.end()
        if code == 0:
            self.log.unlink()
            return "done"
        if code < 0:
            return f"failed: killed by {signal.Signals(-code).name}, see {self.log}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"failed: {one_line(lines[-1] if lines else f'exit code {code}')}"

    def end(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_all(names: list[str], device: str, out: Path, end: float) -> dict[str, str]:
    """Run groups one after the other; returns how each ended, in words. The next process starts early, because its
    imports take as long as some groups."""
    states = dict.fromkeys(names, "not run: no time left")
    waiting: dict[str, Worker] = {}
    try:
        for index, name in enumerate(names):
            later = sum(GROUPS[other].seconds for other in names[index + 1 :])
            remaining = end - time.monotonic()
            limit = min(remaining, max(GROUPS[name].seconds, remaining - later))
            if limit < MIN_SECONDS:
                break
            print(f"\n{name}: {GROUPS[name].answers} (at most {limit:.0f} s)", flush=True)
            start, worker = time.monotonic(), waiting.pop(name, None) or Worker.start(name, device, out)
            worker.go()
            if index + 1 < len(names):
                waiting[names[index + 1]] = Worker.start(names[index + 1], device, out)
            states[name] = worker.wait(limit)
            results = Results(out, name)
            if states[name].startswith("stopped") and not results.rows:
                states[name] = f"failed: no number within {limit:.0f} s"
            results.end(states[name], time.monotonic() - start)
            print(f"  {states[name]}", flush=True)
            archive(out)
    finally:
        for worker in waiting.values():
            worker.end()
            worker.log.unlink()
        archive(out)
    return states


def archive(out: Path) -> None:
    """All results in one file, as some machines give back only a few."""
    out.mkdir(parents=True, exist_ok=True)
    new = out / ".gpu.tar.gz.tmp"
    with tarfile.open(new, "w:gz") as tar:
        for file in sorted(path for path in out.iterdir() if path.is_file() and ".tar.gz" not in path.name):
            tar.add(file, arcname=file.name)
    new.replace(out / "gpu.tar.gz")


def work(name: str, kind: str, out: Path) -> int:
    """The main function of a group's process."""
    results, failure = Results(out, name), None
    try:
        rows = rows_of(GROUPS[name], name)
    except Exception as error:
        failure = error
    if not sys.stdin.readline():  # the parent process has died
        return 1
    results.path.unlink(missing_ok=True)  # not earlier, as there may be no time for this group
    try:
        if failure is not None:
            raise failure
        import torch
        from gpu_parts.device import Device, machine

        torch.manual_seed(0)
        device = Device(kind)
        results.begin(machine(device))
        for row in rows(device, out):
            results.add(row)
            print(row, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(str(error) if isinstance(error, Missing) else one_line(error), file=sys.stderr)
        return 1
    return 0


def rows_of(group: Group, name: str) -> Callable:
    """The group's function; importing it takes seconds."""
    if missing := [package for package in group.needs if importlib.util.find_spec(package) is None]:
        raise Missing(f"missing: {', '.join(missing)}")
    return getattr(importlib.import_module(f"gpu_parts.{group.module}"), name)


# -- the end ----------------------------------------------------------------------------------------------------------


def summary(states: dict[str, str], out: Path) -> int:
    print("\ngroup        rows  state")
    for name, state in states.items():
        print(f"{name:10} {len(Results(out, name).rows):6}  {state}")
    goals = [(name, row) for name in GROUPS for row in Results(out, name).rows if row.target]
    if goals:
        print(f"\n{'':8}{'target':10}measured")
    for name, row in goals:
        mark = {True: "met", False: "MISSED", None: "-"}[row.met]
        settings = ", ".join(f"{key} {value}" for key, value in row.settings.items())
        value = "-" if row.value is None else f"{row.value:.3f}"
        print(f"{mark:8}{row.target:10}{value:8}  {name}: {row.name} ({settings})")
    print(f"\nresults: {out}")
    if left := [name for name, state in states.items() if state.startswith(("not run", "stopped"))]:
        print(f"not finished; go on with: --only {','.join(left)}")
    return int(any(state.startswith("failed") for state in states.values()))


if __name__ == "__main__":
    raise SystemExit(main())
