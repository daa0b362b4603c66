"""Executors of tasks: processes on this machine, SLURM, or Ray; the last two are datatrove's."""

import inspect
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from canonlm.core.errors import expected, unknown
from canonlm.core.extras import needed

_TYPES: dict[str, tuple[Any, str]] = {
    "int": (int | float, "a number"),
    "float": (int | float, "a number"),
    "bool": (bool, "true or false"),
    "dict": (dict, 'pairs such as "{account: me}"'),
}
"""The beginning of an annotation: the type of a value that was text, and its name in errors."""

OURS = {"self", "pipeline", "tasks", "workers", "logging_dir", "depends", "skip_completed"}
"""Arguments of datatrove's executors that users cannot set."""


def execute(
    kind: str, steps: list[PipelineStep], last: PipelineStep, tasks: int, workers: int, folder: Path, options: Mapping
) -> bool:
    """Run `steps` for every task that is not marked as done in `folder`. True: they ran. False: they were submitted to
    SLURM, and `last` too, to run after them."""
    if kind == "local":
        Local(steps, tasks, workers, str(folder)).run()
    elif kind == "ray":
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        RayPipelineExecutor(steps, tasks, workers, logging_dir=str(folder), **options).run()
    else:
        options = {"job_name": "canonlm-data", "qos": None, **options}
        slurm = Slurm(steps, tasks, workers=workers, logging_dir=str(folder), **options)
        # The last job runs even if tasks failed: it reports that in one line.
        end = {**options, "job_name": f"{options['job_name']}-index", "run_on_dependency_fail": True}
        # Jobs inherit PATH, and datatrove calls its programs, which lie beside this Python, by name.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        try:
            with _variable("PATH", path):
                Slurm([last], 1, depends=slurm, logging_dir=str(folder / "index"), **end).run()
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            raise expected("--executor", f"a cluster whose sbatch accepts the job ({error})", kind) from None
    return kind != "slurm"


def checked(kind: str, options: Mapping[str, str], out: Path) -> dict[str, Any]:
    """Options of an executor, converted from text to their types. ValueError: an unknown or a missing option, or a
    folder `out` that the executor cannot name."""
    if kind not in _EXECUTORS:
        raise unknown("executor", kind, _EXECUTORS)
    if kind == "ray":
        needed("ray", "--executor ray")
    known = {} if kind == "local" else dict(inspect.signature(_EXECUTORS[kind].__init__).parameters)
    known = {name: parameter for name, parameter in known.items() if name not in OURS}
    for name in options:
        if not known:
            raise expected(name, f"no options for --executor {kind}", options[name])
        if name not in known:
            raise unknown(f"option of --executor {kind}", name, known, "options")
    # datatrove writes it into a script for the shell without quotes, and SLURM fills in names with % or \.
    if kind == "slurm" and not re.fullmatch(r"[\w/.,:=@+~^\x80-\U0010ffff-]+", path := str(out.absolute())):
        raise expected("OUT", "a path of letters, digits and /._- for --executor slurm", path)
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"{name}: missing; --executor {kind} needs {name}=…")
    return {name: _converted(name, value, str(known[name].annotation)) for name, value in options.items()}


def _converted(name: str, value: str, kind: str) -> Any:
    import yaml

    if kind.startswith("str"):
        return value  # a time such as 4:00:00, which YAML would read as a number
    try:
        converted = yaml.safe_load(value)
    except yaml.YAMLError:
        converted = ...
    types, what = next(
        (known for start, known in _TYPES.items() if kind.startswith(start)), (object, "a value in YAML")
    )
    is_bool = isinstance(converted, bool) and what == "a number"  # for Python, true is one
    if converted is ... or is_bool or not isinstance(converted, types):
        raise expected(name, what, value)
    return converted


class Local(LocalPipelineExecutor):
    """datatrove's tasks, logs and completion marks, in our own process pool.

    datatrove's pool waits forever for a process that the system killed, leaves one behind when the command is killed,
    and logs to the terminal.
    """

    def __init__(self, steps: list[PipelineStep], tasks: int, workers: int, folder: str) -> None:
        super().__init__(steps, tasks, workers, folder)

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        in_this_process = min(self.workers, len(ranks)) <= 1
        # The tokenizers library reads from the environment whether it may use several threads.
        with _variable("TOKENIZERS_PARALLELISM", "true" if in_this_process and self.workers > 1 else "false"):
            if in_this_process:
                for rank in ranks:
                    self.run_task(rank)
            else:
                self._run_in_pool(ranks)

    def run_task(self, rank: int) -> None:
        logger.disable("datatrove")
        try:
            self._run_for_rank(rank)
        finally:
            logger.enable("datatrove")

    def _run_in_pool(self, ranks: list[int]) -> None:
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        size = min(self.workers, len(ranks))
        pool = ProcessPoolExecutor(size, mp_context=context, initializer=_end_with_parent)
        try:
            for future in as_completed([pool.submit(self.run_task, rank) for rank in ranks]):
                future.result()
        except BrokenProcessPool:
            what = "fewer: a process was killed, maybe for lack of memory (the same command continues)"
            raise expected("--workers", what, self.workers) from None
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """In a process of the pool: end when the command ends for any reason, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_after_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


class Slurm(SlurmPipelineExecutor):
    """datatrove's jobs, without the one that adds up statistics: nobody reads them, and after a failed task it would
    wait forever."""

    def launch_merge_stats(self) -> None:
        pass


_EXECUTORS: dict[str, type[PipelineExecutor]] = {
    "local": Local,
    "slurm": Slurm,
    "ray": RayPipelineExecutor,
}
