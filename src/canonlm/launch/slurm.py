"""One run as a SLURM job, or workers for many runs as a job array, through submitit: a task per device, requeued until
everything is finished.

Each launch has a folder in the run's folder. `launch/1/` has the resolved recipe, a copy of this package, so that later
edits do not affect a waiting job, and the output of the tasks. For the end of a job, see `canonlm.train.signals`.
"""

import io
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import TorchDistributedEnvironment

import canonlm
from canonlm.core.errors import expected, unknown, writing
from canonlm.core.files import make_folder, write_text
from canonlm.launch.local import gpus
from canonlm.runs.folder import read_json
from canonlm.train.config import RunConfig

SIGNAL_DELAY_S = 120
"""Seconds from the signal that announces the time limit to the limit: time for the current step, and for saving."""

RESTARTS = 10
"""The default of `restarts`. A restart needs a newer checkpoint, so this only bounds runs that fail again and again."""

COUNTS = ["nodes", "gpus", "tasks", "cpus_per_task", "signal_delay_s"]  # gpus and tasks are per node

REPORTED = "reported"
"""A file in a launch's folder: a task was stopped, or failed for a reason that it printed and that would come again."""

REPORT_S = 30.0
"""Max seconds that the other tasks wait for the first one's report, which never comes if it has no error."""

# No task can decide, as srun ends all of them when one dies. So the job's shell does, before srun and after it.
BEFORE_SRUN = """\
newest() {{ ls {checkpoints} 2>/dev/null | sed -n 's/^step-\\([0-9]*\\)$/\\1/p' | sort -n | tail -n 1; }}
rm -f {reported}
before=$(newest)"""
AFTER_SRUN = """\
code=$?
if [ $code -ne 0 ] && [ ! -e {reported} ] && scontrol show job $SLURM_JOB_ID | grep -q JobState=RUNNING; then
  step=$(newest) count=$(cat {counted} 2>/dev/null | wc -l) ended="canonlm: a task ended unexpectedly (exit code $code)"
  if [ "${{step:-0}}" -le "${{before:-0}}" ]; then echo "$ended, before a checkpoint: the job is not requeued"
  elif [ "$count" -ge {restarts} ]; then echo "$ended: the job is not requeued, as restarts={restarts} is reached"
  else
    restart="restart $((count + 1)) of {restarts}"
    echo "$ended; job $SLURM_JOB_ID is requeued and will continue after step $step ($restart)"
    echo "exit code $code, step $step" >> {counted} && scontrol requeue $SLURM_JOB_ID ||
      echo "canonlm: job $SLURM_JOB_ID could not be requeued; submit it again to continue"
  fi
fi
exit $code"""

OPTIONS = [
    *["account", "begin", "comment", "constraint", "dependency", "exclude", "exclusive", "gres", "job_name"],
    *["licenses", "mail_type", "mail_user", "mem", "mem_per_cpu", "mem_per_gpu", "nice", "nodelist", "partition"],
    *["qos", "reservation", "switches", "wckey"],
]
"""Options of sbatch, passed on unchanged: `mail_type=END` is `--mail-type=END`, `exclusive=true` is `--exclusive`."""


def training(config: RunConfig, run: Path, settings: dict[str, Any], main: Callable[[list[str]], int]) -> "Jobs":
    """A job that trains the run in the folder `run`. main: the command line, as a function: `canonlm.cli.main`."""

    def call(launch: Path) -> tuple[Any, ...]:
        return task, main, str(launch / "recipe.yaml"), str(run.absolute())

    cpus = (config.train.num_threads or 1) + config.data.workers
    restarts = settings.get("restarts", RESTARTS)
    # A failed task ends the others, which would wait for it.
    return Jobs(run, settings, call, cpus, 1, ("--kill-on-bad-exit=1",), config.to_yaml(), restarts)


def workers(
    root: Path, arguments: list[str], count: int, settings: dict[str, Any], main: Callable[[list[str]], int]
) -> "Jobs":
    """`count` jobs. Each of their tasks is a worker for the runs in the folder `root`. `arguments`: those of the
    command line."""
    if "restarts" in settings:
        raise ValueError("restarts only works with canonlm launch: other workers continue the runs of one that died")
    return Jobs(root, settings, lambda launch: (worker, main, arguments, "gpus" in settings), 2, count)


@dataclass(frozen=True)
class Jobs:
    """Jobs, as an array if there are several. run: the folder of their launches. settings: from `parse`. call: returns
    the function that every task calls, and its arguments, for a launch's folder. cpus: per task, unless the settings
    have `cpus_per_task`. recipe: the content of `recipe.yaml` in a launch's folder. restarts: how often
    a job is requeued after an unexpected end that has left a newer checkpoint; None for workers."""

    run: Path
    settings: dict[str, Any]
    call: Callable[[Path], tuple[Any, ...]]
    cpus: int
    count: int = 1
    srun_args: tuple[str, ...] = ()
    recipe: str | None = None
    restarts: int | None = None

    @property
    def script(self) -> str:
        """The script for sbatch. ValueError: it cannot contain the folder's path."""
        executor = self._executor(_next_launch(self.run))
        executor.parameters.update({"map_count": self.count} if self.count > 1 else {})
        return executor._make_submission_file_text(executor._submitit_command_str, uid="")

    def submit(self) -> list[tuple[str, Path]]:
        """Submit the jobs, from a new launch folder with a copy of this package; returns each job's id and the output
        file of its first task.

        ValueError: the folder cannot be written, this machine has no SLURM, or SLURM refuses the job.
        """
        if shutil.which("sbatch") is None:
            raise ValueError("--slurm needs the command sbatch, which this machine does not have")
        folder, package = _next_launch(self.run), Path(canonlm.__file__).parent
        submitter = self._executor(folder)
        with writing("--out", self.run):
            make_folder(folder.parents[1], folder.parent.name)
            folder.mkdir()
            if self.recipe is not None:
                write_text(folder / "recipe.yaml", self.recipe)
            shutil.copytree(package, folder / "code" / "canonlm", ignore=shutil.ignore_patterns("__pycache__"))
        try:
            # submitit prints the error before it raises it.
            with redirect_stderr(io.StringIO()), submitter.batch() if self.count > 1 else nullcontext():
                jobs = [submitter.submit(*self.call(folder)) for _ in range(self.count)]
        except (FailedJobError, FailedSubmissionError) as error:
            shutil.rmtree(folder)
            raise ValueError(str(error)) from None
        return [(job.job_id, job.paths.stdout) for job in jobs]

    def _executor(self, folder: Path) -> SlurmExecutor:
        """The executor that writes the script of a launch."""
        settings, cpus = self.settings, self.settings.get("cpus_per_task", self.cpus)
        paths = {"checkpoints": self.run.absolute() / "checkpoints", "reported": folder / REPORTED}
        paths |= {"counted": folder / "restarts.txt"}
        words = {name: shlex.quote(str(path)) for name, path in paths.items()} | {"restarts": str(self.restarts)}
        around = [text.format(**words) for text in (BEFORE_SRUN, AFTER_SRUN) if self.restarts is not None]
        executor = _Executor(folder)
        executor.update_parameters(
            time=settings["time"],
            nodes=settings["nodes"],
            ntasks_per_node=settings["tasks"],
            gpus_per_node=settings.get("gpus"),
            cpus_per_task=cpus,
            array_parallelism=self.count,
            signal_delay_s=settings.get("signal_delay_s", SIGNAL_DELAY_S),
            stderr_to_stdout=True,
            additional_parameters={
                "job_name": self.run.absolute().name,
                "requeue": True,
                **{key: value for key, value in settings.items() if key in OPTIONS},
            },
            # srun does not inherit sbatch's CPUs per task.
            srun_args=[*self.srun_args, f"--cpus-per-task={cpus}"],
            setup=[
                f"export PYTHONPATH={shlex.quote(str(folder / 'code'))}${{PYTHONPATH:+:$PYTHONPATH}}",
                f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{cpus}}}",
                *around[:1],
            ],
            teardown=around[1:],
        )
        return executor


def _next_launch(run: Path) -> Path:
    """The folder of the next launch. ValueError: sbatch's options cannot contain its path."""
    launches = run.absolute() / "launch"
    check_printable("--out", str(launches))
    if re.search(r"[%\\]", str(launches)):
        raise expected("--out", r"a folder without % and \ in its path, as SLURM fills in such names", str(launches))
    numbers = [int(path.name) for path in launches.glob("*") if path.name.isdigit()]
    return launches / str(max(numbers, default=0) + 1)


class _Executor(SlurmExecutor):
    """An executor that can write its script without SLURM on this machine."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def task(main: Callable[[list[str]], int], recipe: str, run: str) -> None:
    """Train in a task of the job, in the process that submitit has started.

    The training's signal handlers replace submitit's, which do not save and would requeue a finished job.
    """
    TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    with TemporaryDirectory() as folder:
        note = Path(folder) / "why.json"
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(note)
        code = main(["train", recipe, "--out", run, "--trust"])  # the user trusted it when the job was submitted
        # Only the first process prints errors; but in a job every task has a log of its own.
        if os.environ["RANK"] != "0" and (why := read_json(note)):
            print(f"canonlm: {why['message']}", flush=True)
    if code:
        reported, end = Path(recipe).with_name(REPORTED), monotonic() + REPORT_S
        while os.environ["RANK"] != "0" and not reported.exists() and monotonic() < end:
            sleep(0.1)  # srun ends the first process with this one: it may still have to print the same error
        write_text(reported, "")
        raise SystemExit(code)


def worker(main: Callable[[list[str]], int], arguments: list[str], one_gpu_each: bool) -> None:
    """Run a worker in a task of a job. The workers of a node share its GPUs, one for each."""
    if one_gpu_each and (devices := gpus()):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(os.environ["SLURM_LOCALID"]) % len(devices)]
    if code := main(arguments):
        raise SystemExit(code)


def split(pairs: Iterable[str]) -> tuple[list[str], list[str]]:
    """(`key=value` pairs of the job, those of the recipe: keys of RunConfig and all with a dot)."""
    job: list[str] = []
    recipe: list[str] = []
    for pair in pairs:
        key = pair.partition("=")[0]
        (recipe if "." in key or key in RunConfig.model_fields else job).append(pair)
    return job, recipe


def parse(pairs: Iterable[str]) -> dict[str, Any]:
    """The job's settings: COUNTS and `restarts` as integers, `time` in minutes, OPTIONS as texts. ValueError for a
    wrong setting, or settings that exclude each other."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise expected("--slurm", "key=value, such as nodes=2", pair)
        if key in settings:
            raise ValueError(f"{key} is given twice")
        check_printable(key, value)
        if key in COUNTS:
            if not re.fullmatch(r"[1-9]\d*", value):
                raise expected(key, "an integer >= 1", value)
            settings[key] = int(value)
        elif key == "restarts":
            if not re.fullmatch(r"\d+", value):
                raise expected(key, "an integer >= 0", value)
            settings[key] = int(value)
        elif key == "time":
            settings[key] = _minutes(value)
        elif key in OPTIONS:
            settings[key] = True if value == "true" else value
        else:
            raise unknown("SLURM setting", key, [*COUNTS, "restarts", "time", *OPTIONS])
    if "time" not in settings:
        raise ValueError("time: missing; expected the time limit of the job, such as time=24:00:00")
    if "gpus" not in settings and "tasks" not in settings:
        raise ValueError("gpus: missing; expected the GPUs of a node, such as gpus=8 (without GPUs: tasks=2)")
    settings = {"nodes": 1, "tasks": settings.get("gpus"), **settings}
    _check_combination(settings)
    return settings


def check_printable(key: str, value: str) -> None:
    """ValueError for a value with a line end or another control character: sbatch reads its options line by line."""
    if not value.isprintable():
        raise expected(key, "a text without line ends or other control characters", value)


def _check_combination(settings: dict[str, Any]) -> None:
    tasks, seconds = settings["tasks"], 60 * settings["time"]
    if (gpus := settings.get("gpus", tasks)) != tasks:
        raise ValueError(f"tasks={tasks} cannot be used with gpus={gpus}: every GPU has one task")
    if (gpus := _gpus_of(str(settings.get("gres")))) not in (0, tasks):
        raise ValueError(f"gres={settings['gres']} cannot be used with {tasks} tasks on a node: every GPU has one task")
    if (delay := settings.get("signal_delay_s", SIGNAL_DELAY_S)) >= seconds:
        raise expected("signal_delay_s", f"less than the job's time, {seconds} seconds", delay)
    memory = [key for key in settings if key in ("mem", "mem_per_cpu", "mem_per_gpu")]
    if len(memory) > 1:
        raise ValueError(f"{memory[0]} cannot be used with {memory[1]}")


def _gpus_of(gres: str) -> int:
    """`gpu:h100:8`: 8. `shard:1,gpu`: 1."""
    counts = re.findall(r"(?:^|,)gpu(?::[\w.-]+)??(?::(\d+))?(?=[(,]|$)", gres)
    return sum(int(count or 1) for count in counts)


def _minutes(time: str) -> int:
    """sbatch's minutes, minutes:seconds, hours:minutes:seconds, days-hours, …:minutes, …:seconds; rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    days, *rest = match.groups() if match else (None,)
    numbers = [int(part) for part in rest if part is not None]
    from_hours = days is not None or len(numbers) == 3
    hours, minutes, seconds = ([*numbers, 0, 0] if from_hours else [0, *numbers, 0, 0])[:3]
    total = (int(days or 0) * 24 + hours) * 60 + minutes + -(-seconds // 60)
    if total == 0:
        raise expected("time", "minutes, hours:minutes:seconds or days-hours", time)
    return total
