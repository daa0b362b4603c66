"""One run as a SLURM job, through submitit: a task per device, requeued until the run is finished.

Each launch has a folder of its own in the run's. `launch/1/` holds the recipe, resolved; a copy of this package, so
that no later edit reaches a job that waits; and what the tasks print. `canonlm.train.signals` says what happens when
SLURM ends a job.
"""

import io
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import TorchDistributedEnvironment

import canonlm
from canonlm.errors import expected, unknown, writing
from canonlm.files import write_text
from canonlm.runs.folder import read_json
from canonlm.train.config import RunConfig

SIGNAL_DELAY_S = 120
"""Seconds from the signal that announces the time limit to the limit: for the step under way, and for saving."""

COUNTS = ["nodes", "gpus", "tasks", "cpus_per_task", "signal_delay_s"]  # gpus and tasks are per node
OPTIONS = [
    *["account", "begin", "comment", "constraint", "dependency", "exclude", "exclusive", "gres", "job_name"],
    *["licenses", "mail_type", "mail_user", "mem", "mem_per_cpu", "mem_per_gpu", "nice", "nodelist", "partition"],
    *["qos", "reservation", "switches", "wckey"],
]
"""Of sbatch, passed on as they are: `mail_type=END` is `--mail-type=END`, `exclusive=true` is `--exclusive`."""


@dataclass(frozen=True)
class Job:
    """What is to be submitted: one launch of the run in the folder `run`, with `parse`'s settings."""

    config: RunConfig
    run: Path
    settings: dict[str, Any]
    main: Callable[[list[str]], int]  # the command line, as a function: `canonlm.cli.main`

    @property
    def folder(self) -> Path:
        """The launch's own, not made yet."""
        launches = self.run.absolute() / "launch"
        taken = [int(path.name) for path in launches.glob("*") if path.name.isdigit()]
        return launches / str(max(taken, default=0) + 1)

    @property
    def script(self) -> str:
        """What sbatch gets. ValueError: the folder's path cannot stand in it."""
        executor = self._executor(self.folder)
        return executor._make_submission_file_text(executor._submitit_command_str, uid="")

    def submit(self) -> tuple[str, Path]:
        """Returns the job's id and the file where its first task writes.

        ValueError: the folder cannot be written, there is no SLURM here, or it refuses the job.
        """
        if shutil.which("sbatch") is None:
            raise expected("--slurm", "a machine from which jobs are submitted", "one without sbatch")
        folder = self.folder
        recipe, package = folder / "recipe.yaml", Path(canonlm.__file__).parent
        with writing("--out", self.run):
            folder.mkdir(parents=True)
            write_text(recipe, self.config.to_yaml())
            shutil.copytree(package, folder / "code" / "canonlm", ignore=shutil.ignore_patterns("__pycache__"))
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints what it then raises
                job = self._executor(folder).submit(task, self.main, str(recipe), str(self.run.absolute()))
        except (FailedJobError, FailedSubmissionError) as error:
            shutil.rmtree(folder)
            raise ValueError(str(error)) from None
        return job.job_id, job.paths.stdout

    def _executor(self, folder: Path) -> SlurmExecutor:
        settings = self.settings
        check_printable("--out", str(folder))
        cpus = settings.get("cpus_per_task", (self.config.train.num_threads or 1) + self.config.data.workers)
        executor = _Executor(folder)
        executor.update_parameters(
            time=settings["time"],
            nodes=settings["nodes"],
            ntasks_per_node=settings["tasks"],
            gpus_per_node=settings.get("gpus"),
            cpus_per_task=cpus,
            signal_delay_s=settings.get("signal_delay_s", SIGNAL_DELAY_S),
            stderr_to_stdout=True,
            additional_parameters={
                "job_name": self.run.name,
                "requeue": True,
                **{key: value for key, value in settings.items() if key in OPTIONS},
            },
            # A task that fails ends the others, which would wait for it. srun does not know sbatch's CPUs per task.
            srun_args=["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}"],
            setup=[
                f"export PYTHONPATH={shlex.quote(str(folder / 'code'))}${{PYTHONPATH:+:$PYTHONPATH}}",
                f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{cpus}}}",
            ],
        )
        return executor


class _Executor(SlurmExecutor):
    """One that can write its script also where there is no SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def task(main: Callable[[list[str]], int], recipe: str, run: str) -> None:
    """What every task of the job does, in the process that submitit has started.

    The training's signal handlers come after submitit's, which do not save and would requeue a job that is finished.
    """
    TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    with TemporaryDirectory() as folder:
        note = Path(folder) / "why.json"
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(note)
        code = main(["train", recipe, "--out", run, "--trust"])  # the user has said so when the job was submitted
        # Of several processes the first one says what is wrong; but here everyone has a log of its own.
        if os.environ["RANK"] != "0" and (why := read_json(note)):
            print(f"canonlm: {why['message']}", flush=True)
    if code:
        raise SystemExit(code)


def split(pairs: Iterable[str]) -> tuple[list[str], list[str]]:
    """`key=value` pairs of the job, and those of the recipe: its own keys, and all with a dot."""
    job: list[str] = []
    recipe: list[str] = []
    for pair in pairs:
        key = pair.partition("=")[0]
        (recipe if "." in key or key in RunConfig.model_fields else job).append(pair)
    return job, recipe


def parse(pairs: Iterable[str]) -> dict[str, Any]:
    """The job's settings: COUNTS as integers, `time` in minutes, OPTIONS as texts. ValueError for what cannot be, alone
    or together."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise expected("--slurm", "key=value, such as nodes=2", pair)
        if key in settings:
            raise expected(key, "one value", pair)
        check_printable(key, value)
        if key in COUNTS:
            if not re.fullmatch(r"[1-9]\d*", value):
                raise expected(key, "an integer >= 1", value)
            settings[key] = int(value)
        elif key == "time":
            settings[key] = _minutes(value)
        elif key in OPTIONS:
            settings[key] = True if value == "true" else value
        else:
            raise unknown("SLURM setting", key, [*COUNTS, "time", *OPTIONS])
    if "time" not in settings:
        raise ValueError("time: missing; expected the time limit of the job, such as time=24:00:00")
    if "gpus" not in settings and "tasks" not in settings:
        raise ValueError("gpus: missing; expected the GPUs of a node, such as gpus=8 (without GPUs: tasks=2)")
    settings = {"nodes": 1, "tasks": settings.get("gpus"), **settings}
    _check_together(settings)
    return settings


def check_printable(key: str, value: str) -> None:
    """ValueError for a value with a line end or another control character: sbatch reads its options line by line."""
    if not value.isprintable():
        raise expected(key, "a text without line ends and other control characters", value)


def _check_together(settings: dict[str, Any]) -> None:
    tasks, seconds = settings["tasks"], 60 * settings["time"]
    if (gpus := settings.get("gpus", tasks)) != tasks:
        raise expected("tasks", f"nothing beside gpus={gpus}, for every GPU has its task", tasks)
    if (gpus := _gpus_of(str(settings.get("gres")))) not in (0, tasks):
        raise expected("gres", f"as many GPUs as a node has tasks, {tasks}", settings["gres"])
    if (delay := settings.get("signal_delay_s", SIGNAL_DELAY_S)) >= seconds:
        raise expected("signal_delay_s", f"less than the job's time, {seconds} seconds", delay)
    memory = [key for key in settings if key in ("mem", "mem_per_cpu", "mem_per_gpu")]
    if len(memory) > 1:
        raise expected(memory[1], f"nothing beside {memory[0]}", settings[memory[1]])


def _gpus_of(gres: str) -> int:
    """`gpu:h100:8`: 8. `shard:1,gpu`: 1."""
    counts = re.findall(r"(?:^|,)gpu(?::[\w.-]+)??(?::(\d+))?(?=[(,]|$)", gres)
    return sum(int(count or 1) for count in counts)


def _minutes(time: str) -> int:
    """sbatch's minutes, minutes:seconds, hours:minutes:seconds, days-hours, …:minutes, …:seconds; rounded up."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    days, *rest = found.groups() if found else (None,)
    numbers = [int(part) for part in rest if part is not None]
    from_hours = days is not None or len(numbers) == 3
    hours, minutes, seconds = ([*numbers, 0, 0] if from_hours else [0, *numbers, 0, 0])[:3]
    total = (int(days or 0) * 24 + hours) * 60 + minutes + -(-seconds // 60)
    if total == 0:
        raise expected("time", "minutes, hours:minutes:seconds or days-hours", time)
    return total
