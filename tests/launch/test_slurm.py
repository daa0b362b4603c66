"""Runs as SLURM jobs: what is submitted, and, with a real SLURM on this machine, that a run survives preemption.

`make test-slurm` runs the second part.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import yaml
from slurm_cluster import cluster, missing

import canonlm
from canonlm.cli import main
from canonlm.launch import slurm
from canonlm.launch.slurm import parse, split, training, workers
from canonlm.runs.folder import to_yaml
from canonlm.runs.rows import TIMINGS
from canonlm.train.config import resolve
from canonlm.train.load_config import create_folder
from canonlm.train.loop import train

# A checkpoint that is saved only on a signal.
TRAIN = {"device": "cpu", "log_every": 1, "eval_every": 500, "checkpoint_every": 1_000_000}


@pytest.fixture
def config(tiny):
    return tiny(train=TRAIN)


# -- what is submitted ------------------------------------------------------------------------------------------------


def test_settings_of_the_job_and_of_the_recipe(config):
    pairs = ["nodes=2", "arch=llama", "gpus=8", "train.steps=7", "trian.steps=7", "qos=long", "task={name: depo}"]
    assert split(pairs) == (["nodes=2", "gpus=8", "qos=long"], [pairs[1], *pairs[3:5], pairs[6]])
    assert not {"time", *slurm.COUNTS, *slurm.OPTIONS} & set(config.model_dump())


MINUTES = {
    **{"90": 90, "0:01": 1, "10:00": 10, "10:01": 11, "24:00:00": 24 * 60, "1:30:30": 91, "2-0": 48 * 60},
    **{"2-3": 51 * 60, "1-02:03": 26 * 60 + 3, "1-02:03:04": 26 * 60 + 4},
}


@pytest.mark.parametrize(("time", "minutes"), MINUTES.items())
def test_times(time, minutes):
    assert parse(["tasks=1", f"time={time}", "signal_delay_s=1"])["time"] == minutes


def test_counts_and_options():
    assert parse(["time=5", "gpus=8", "nodes=16", "mail_user=007", "exclusive=true"]) == {
        **{"time": 5, "gpus": 8, "tasks": 8, "nodes": 16},
        **{"mail_user": "007", "exclusive": True},
    }
    assert parse(["time=5", "tasks=2"]) == {"time": 5, "tasks": 2, "nodes": 1}
    assert parse(["time=5", "gpus=8", "tasks=8", "gres=gpu:h100:8"])["tasks"] == 8
    for gres in ("gpu:8", "gpu:h100:8(S:0-1)", "nvme:1,gpu:a:4,gpu:b:4", "gpu:h100=8", "nvme:1"):
        assert parse(["time=5", "tasks=8", f"gres={gres}"])["gres"] == gres
    assert parse(["time=5", "tasks=1", "gres=gpu:h100"])["tasks"] == 1
    assert parse(["time=5", "tasks=2", "signal_delay_s=299"])["signal_delay_s"] == 299


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["partion=low"],
         'unknown SLURM setting "partion". Did you mean "partition"? SLURM settings: account, begin, '),
        (["gpus=all"], 'gpus: expected an integer >= 1, got "all"'),
        (["nodes=0"], 'nodes: expected an integer >= 1, got "0"'),
        (["time=1h"], 'time: expected minutes, hours:minutes:seconds or days-hours, got "1h"'),
        (["time=0"], 'time: expected minutes, hours:minutes:seconds or days-hours, got "0"'),
        (["gpus=8"], "time: missing; expected the time limit of the job, such as time=24:00:00"),
        (["time=5"], "gpus: missing; expected the GPUs of a node, such as gpus=8 (without GPUs: tasks=2)"),
        (["nodes"], '--slurm: expected key=value, such as nodes=2, got "nodes"'),
        (["time=5", "gpus=8", "tasks=4"], "tasks=4 cannot be used with gpus=8: every GPU has one task"),
        (["time=5", "gpus=8", "gres=gpu:4"], "gres=gpu:4 cannot be used with 8 tasks on a node"),
        (["time=5", "tasks=8", "gres=nvme,gpu:h100"], "gres=nvme,gpu:h100 cannot be used with 8 tasks on a node"),
        (["time=5", "tasks=2", "signal_delay_s=300"],
         "signal_delay_s: expected less than the job's time, 300 seconds, got 300"),
        (["time=2", "tasks=2"], "signal_delay_s: expected less than the job's time, 120 seconds, got 120"),
        (["time=5", "tasks=2", "mem=8G", "mem_per_cpu=1G"], "mem cannot be used with mem_per_cpu"),
        (["time=5", "tasks=2", "time=9"], "time is given twice"),
        (["restarts=-1"], 'restarts: expected an integer >= 0, got "-1"'),
    ],
)  # fmt: skip
def test_invalid_settings(pairs, message):
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}.*\Z"):
        parse(pairs)


def options(script):
    """The options of an sbatch script: {"nodes": "2", "requeue": None}."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return {key: value if equals else None for key, equals, value in (line.partition("=") for line in lines)}


def test_the_script(config, tmp_path):
    """The options are sbatch's, with submitit's defaults for the others."""
    given = ["nodes=16", "gpus=8", "cpus_per_task=12", "account=7", "qos=long", "time=24:00:00", "reservation=r"]
    script = training(config, tmp_path / "a run", parse(given), main).script
    launch = tmp_path / "a run" / "launch" / "1"
    assert options(script) == {
        **{"nodes": "16", "gpus-per-node": "8", "ntasks-per-node": "8", "cpus-per-task": "12", "time": "1440"},
        **{"account": "7", "qos": "long", "reservation": "r", "job-name": "'a run'", "wckey": "submitit"},
        **{"requeue": None, "open-mode": "append", "signal": "USR2@120", "output": f"'{launch}/%j_0_log.out'"},
    }
    assert f"export PYTHONPATH='{launch}/code'${{PYTHONPATH:+:$PYTHONPATH}}" in script
    assert "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-12}" in script
    [srun] = [line for line in script.splitlines() if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1 --cpus-per-task=12" in srun
    assert list(tmp_path.iterdir()) == []
    delayed = training(config, tmp_path, parse(["tasks=2", "time=9", "signal_delay_s=30"]), main).script
    assert options(delayed)["signal"] == "USR2@30"
    assert "gpus-per-node" not in options(delayed)


def test_a_dry_run_does_not_need_the_text(config, tmp_path, capsys):
    recipe = config.model_dump() | {"task": None, "text": {"sources": {"web": {"path": "/nowhere"}}}}
    recipe["data"]["loss_on"] = "all"
    (tmp_path / "run.yaml").write_text(to_yaml(recipe))
    command = ["launch", str(tmp_path / "run.yaml"), "--slurm", "tasks=2", "time=5", "--out", str(tmp_path / "run")]
    assert main([*command, "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "#SBATCH --ntasks-per-node=2" in output.out
    start = "canonlm: the text was not read, and the model not checked: text.sources.web.path: "
    assert output.err.startswith(start)
    for more in ([], ["--dry-run", "train.optim.lr=x"]):
        assert main([*command, *more]) == 2
    assert not (tmp_path / "run").exists()


def test_the_script_of_workers(tmp_path):
    """The script is an array of jobs; a worker that ends does not end the others of its job."""
    script = workers(tmp_path, ["work", "."], 16, parse(["gpus=2", "time=60", "qos=long"]), main).script
    expected = {"array": "0-15%16", "gpus-per-node": "2", "ntasks-per-node": "2", "qos": "long", "time": "60"}
    assert options(script).items() >= expected.items()
    assert "--kill-on-bad-exit" not in script
    assert "requeue " not in script
    with pytest.raises(ValueError, match=r"^restarts only works with canonlm launch: other workers continue the runs"):
        workers(tmp_path, [], 1, parse(["tasks=1", "time=9", "restarts=1"]), main)
    assert options(workers(tmp_path, [], 1, parse(["tasks=1", "time=9"]), main).script).get("array") is None


STUBS = {
    "srun": """mkdir -p $RUN/checkpoints; bash -c "$ATTEMPT" """,
    "scontrol": """if [ $1 = show ]; then echo "   JobState=$STATE Reason=None"; else echo $@ >> $RUN/requeued; fi""",
}


def attempt(script, run, what, state="RUNNING"):
    """Run the script of a job in `run` whose tasks do `what`. Returns its exit code, whether it was requeued, and what
    its shell printed."""
    run.joinpath("launch", "1").mkdir(parents=True, exist_ok=True)
    for name, text in STUBS.items():
        stub = run / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{text}\n")
        stub.chmod(0o755)
    environment = {"PATH": f"{run / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "STATE": state}
    environment |= {"RUN": str(run), "ATTEMPT": f"cd $RUN; {what}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    requeued = run / "requeued"
    if again := requeued.exists():
        assert requeued.read_text() == "requeue 12\n"
        requeued.unlink()
    return done.returncode, again, done.stdout


def test_an_unexpected_end_is_requeued_while_there_is_progress(config, tmp_path):
    script = training(config, tmp_path, parse(["tasks=2", "time=5", "restarts=2"]), main).script
    ended = "canonlm: a task ended unexpectedly (exit code 137)"
    early = (137, False, f"{ended}, before a checkpoint: the job is not requeued\n")
    assert attempt(script, tmp_path, "exit 137") == early
    will = f"{ended}; job 12 is requeued and will continue after step"
    steps = [f"mkdir checkpoints/step-{step:08d}; exit 137" for step in (9, 99_999_999, 100_000_000)]
    assert attempt(script, tmp_path, steps[0]) == (137, True, f"{will} 00000009 (restart 1 of 2)\n")
    assert attempt(script, tmp_path, "mkdir checkpoints/.step-00000010.tmp; exit 137") == early
    assert attempt(script, tmp_path, "rmdir checkpoints/step-*; exit 137") == early
    assert attempt(script, tmp_path, steps[1]) == (137, True, f"{will} 99999999 (restart 2 of 2)\n")
    late = f"{ended}: the job is not requeued, as restarts=2 is reached\n"
    assert attempt(script, tmp_path, steps[2]) == (137, False, late)
    assert attempt(script, tmp_path, "mkdir checkpoints/step-00000300") == (0, False, "")


def test_expected_ends_are_not_requeued(config, tmp_path):
    """A reason that a task has printed would come again; SLURM itself decides about jobs that it has stopped."""
    script = training(config, tmp_path, parse(["tasks=2", "time=5"]), main).script
    saved = "mkdir -p checkpoints/step-00000009; exit"
    assert attempt(script, tmp_path, f"touch launch/1/reported; {saved} 1") == (1, False, "")
    (tmp_path / "checkpoints" / "step-00000009").rmdir()
    for state in ("CANCELLED", "TIMEOUT", "PREEMPTED"):
        assert attempt(script, tmp_path, f"{saved} 143", state) == (143, False, "")
        (tmp_path / "checkpoints" / "step-00000009").rmdir()
    code, again, _ = attempt(script, tmp_path, f"{saved} 143")  # the earlier attempt's reason does not count
    assert (code, again) == (143, True)
    never = training(config, tmp_path / "b", parse(["tasks=2", "time=5", "restarts=0"]), main).script
    assert attempt(never, tmp_path / "b", f"{saved} 143")[:2] == (143, False)


def test_workers_of_a_node_have_a_gpu_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    seen = []
    for count in (0, 2):  # without GPUs, the variable stays
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        slurm.worker(lambda args: seen.append((args, os.environ["CUDA_VISIBLE_DEVICES"])) or 0, ["work"], True)
    assert seen == [(["work"], "3,5"), (["work"], "5")]
    with pytest.raises(SystemExit, match=r"^1$"):
        slurm.worker(lambda arguments: 1, [], False)


def test_a_task_does_not_end_before_the_first_one_has_printed_the_error(tmp_path, monkeypatch):
    """srun ends all tasks with one. The others wait, but not forever: the first task may have no error."""
    reported, waits = tmp_path / slurm.REPORTED, []
    monkeypatch.setattr(slurm, "TorchDistributedEnvironment", Mock())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # the task sets it, and this gives it back
    monkeypatch.setenv("RANK", "1")

    def wait(seconds):
        assert not reported.exists()
        waits.append(seconds)
        if len(waits) == 3:
            reported.touch()

    def ended():
        with pytest.raises(SystemExit, match=r"^2$"):
            slurm.task(lambda arguments: 2, str(tmp_path / "recipe.yaml"), "")

    monkeypatch.setattr(slurm, "sleep", wait)
    ended()
    assert len(waits) == 3
    monkeypatch.setattr(slurm, "REPORT_S", 0)
    reported.unlink()
    ended()
    monkeypatch.setenv("RANK", "0")
    reported.unlink()
    ended()
    assert len(waits) == 3
    assert reported.exists()


@pytest.mark.parametrize(("workers", "threads", "cores"), [(1, None, 2), (0, None, 1), (3, None, 4), (2, 6, 8)])
def test_cores_for_training_and_data_workers(tiny, tmp_path, workers, threads, cores):
    config = tiny(data={"workers": workers}, train={"num_threads": threads})
    script = training(config, tmp_path, parse(["tasks=2", "time=5"]), main).script
    assert options(script)["cpus-per-task"] == str(cores)
    assert f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{cores}}}" in script
    assert f"--cpus-per-task={cores} " in script


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """`sbatch(says, code)`: an sbatch that only prints `says` and exits with `code`."""

    def make(says, code=0):
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin" / "sbatch"
        script.write_text(
            f"#!{sys.executable} -S\nimport sys\nprint({says!r}, file=sys.std{'err' if code else 'out'})\n"
        )
        script.write_text(script.read_text() + f"sys.exit({code})\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return make


def test_files_of_a_launch(config, tmp_path, sbatch):
    """A task started from it runs the copied code with the full recipe, even if the installed code has moved."""
    sbatch("Submitted batch job 12")
    run = tmp_path / "run"
    job = training(config, run, parse(["tasks=2", "time=5"]), main)
    assert job.submit() == [("12", run / "launch" / "1" / "12_0_log.out")]
    launch = run / "launch" / "1"
    assert resolve(yaml.safe_load((launch / "recipe.yaml").read_text())) == config
    sources = Path(canonlm.__file__).parent
    for source in sources.rglob("*.yaml"):
        assert (launch / "code" / "canonlm" / source.relative_to(sources)).read_bytes() == source.read_bytes()
    assert not list(launch.rglob("__pycache__"))
    assert job.submit()[0][1] == run / "launch" / "2" / "12_0_log.out"

    program = "import os, sys; print('the copy', sys.argv, *(os.environ[key] for key in ('RANK', 'WORLD_SIZE')))"
    (launch / "code" / "canonlm" / "cli" / "__init__.py").write_text(
        f"def main(args):\n    {program.replace('sys.argv', 'args')}\n"
        """    open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{"message": "no such text"}')\n"""
        "    return 130\n"
    )
    [setup] = [line for line in job.script.splitlines() if line.startswith("export PYTHONPATH")]
    [srun] = [line for line in job.script.splitlines() if line.startswith("srun ")]
    command = f"{setup}\n{srun[srun.index(sys.executable) :]}".replace("/launch/3", "/launch/1")
    (launch / "reported").write_text("by the first task")
    slurms = {"JOB_ID": "12", "PROCID": "1", "LOCALID": "1", "NTASKS": "2", "JOB_NUM_NODES": "1", "NODEID": "0"}
    environment = {f"SLURM_{key}": value for key, value in slurms.items()} | {"SUBMITIT_EXECUTOR": "slurm"}
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    arguments = ["train", str(launch / "recipe.yaml"), "--out", str(run), "--trust"]
    assert f"the copy {arguments} 1 2" in done.stdout.splitlines(), done.stderr
    assert "canonlm: no such text" in done.stdout.splitlines()  # the first task prints this, in another log
    assert done.returncode == 130
    assert (launch / "reported").read_text() == ""  # written again


def test_a_refusal_by_sbatch_leaves_nothing(config, tmp_path, sbatch, capfd):
    sbatch("sbatch: error: invalid partition specified: nope", code=1)
    with pytest.raises(ValueError, match=r"^sbatch: error: invalid partition specified: nope$"):
        training(config, tmp_path / "run", parse(["tasks=2", "time=5", "partition=nope"]), main).submit()
    assert list((tmp_path / "run" / "launch").iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["80%a", "a\\b"])  # SLURM fills in no %j in a path with a backslash
def test_a_folder_whose_name_slurm_would_change(config, tmp_path, name, sbatch):
    sbatch("Submitted batch job 12")
    jobs = training(config, tmp_path / name, parse(["time=5", "tasks=2"]), None)
    for ask in (lambda: jobs.script, jobs.submit):
        with pytest.raises(ValueError, match=rf"--out: expected a folder without % and \\ in its .*{re.escape(name)}"):
            ask()
    assert not (tmp_path / name).exists()


def test_without_slurm(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--slurm needs the command sbatch"):
        training(config, tmp_path / "run", parse(["tasks=2", "time=5"]), main).submit()
    assert list(tmp_path.iterdir()) == []


# -- a real SLURM -----------------------------------------------------------------------------------------------------

STEPS = 1000  # enough to be interrupted four times


@pytest.fixture
def real_slurm(request, monkeypatch):
    """A cluster; its parameter: the seconds that processes have to end after SIGTERM."""
    if missing():
        pytest.fail(f"{', '.join(missing())} missing: `make test-slurm` installs slurm-wlm and munge")
    with TemporaryDirectory(prefix="slurm-") as folder, cluster(Path(folder), getattr(request, "param", 60)) as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        yield


def command(*arguments):
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


def launch(*arguments):
    return command(sys.executable, "-m", "canonlm", "launch", *arguments)


def until(ready, what, seconds=240):
    deadline = time.monotonic() + seconds
    while not (result := ready()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
    return result


def rows(run):
    path = run / "metrics.jsonl"
    full = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in full]


def task_pids(job):
    """`scontrol listpids`: PID JOBID STEPID LOCALID GLOBALID; the batch script is a step of another name."""
    lines = [line.split() for line in command("scontrol", "listpids", job).splitlines()[1:]]
    tasks = sorted((int(local), int(pid)) for pid, _, step, local, _ in lines if step == "0" and local.isdigit())
    result = [pid for _, pid in tasks]
    assert len(result) == 2, lines
    return result


@pytest.mark.slurm
def test_a_preempted_run_ends_as_if_undisturbed(tiny, tmp_path, real_slurm):
    """Preempted, preempted with a grace time, stopped at its time limit, cancelled; then continued to the end."""
    settings = [tiny.yaml(tmp_path / "tiny.yaml", train=TRAIN), f"train.steps={STEPS}"]
    launch(*settings, "--local", "2", "--out", tmp_path / "undisturbed")
    run, stopped_at = tmp_path / "run", []
    job_settings = ["--slurm", "--out", run, "tasks=2", "partition=low", "time=30", "signal_delay_s=290"]
    job_settings += ["cpus_per_task=1"]  # the cluster has two

    def begin():
        output = launch(*settings, *job_settings)
        number, log = re.fullmatch(r"job (\d+) is in the queue; its log: (.*)\n", output).groups()
        return number, Path(log)

    def log_text():
        return log.read_text() if log.exists() else "nothing"

    def stopped():
        return re.findall(r"^canonlm: stopped after step (\d+) of \d+; (.*)$", log_text(), re.MULTILINE)

    def send_away(act, times, then):
        """Wait for progress, act, wait until it has saved."""
        until(lambda: len(rows(run)) > sum(stopped_at[-1:]) + 20, log_text)
        act()
        until(lambda: len(stopped()) == times, log_text)
        step, output = stopped()[-1]
        assert output == then
        stopped_at.append(int(step))
        assert f"step-{stopped_at[-1]:08d}" in os.listdir(run / "checkpoints")

    def preempt():
        command("sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 1")

    number, log = begin()
    send_away(preempt, 1, f"SLURM starts job {number} again if it preempted it")
    # A job that saves and exits within the grace time counts as completed: SLURM would not start it again.
    command("scontrol", "update", "PartitionName=low", "GraceTime=120")
    send_away(preempt, 2, f"job {number} is requeued and will continue")
    command("scontrol", "update", "PartitionName=low", "GraceTime=0")

    def come_to_the_limit():
        """The signal is due 10 s after the start; SLURM checks every 30 s, and its signal wakes sleeping processes."""
        for pid in task_pids(number):
            os.kill(pid, signal.SIGSTOP)
        command("scontrol", "update", f"JobId={number}", "TimeLimit=5")

    send_away(come_to_the_limit, 3, f"job {number} is requeued and will continue")
    command("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    send_away(lambda: command("scancel", number), 4, f"SLURM starts job {number} again if it preempted it")
    until(lambda: not command("squeue", "--noheader"), log_text)
    assert "JobState=CANCELLED" in command("scontrol", "show", "job", number)
    assert "Restarts=3" in command("scontrol", "show", "job", number)

    number, log = begin()
    until(lambda: not command("squeue", "--noheader"), log_text)
    assert "JobState=COMPLETED" in command("scontrol", "show", "job", number)
    assert 0 < stopped_at[0] < stopped_at[1] < stopped_at[2] < stopped_at[3] < STEPS
    assert rows(run) == rows(tmp_path / "undisturbed")
    assert len(rows(run)) > STEPS
    assert not (run / "metrics.discarded.jsonl").exists()
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, tmp_path / "undisturbed")]
    assert results[0]["final"] == results[1]["final"]
    assert json.loads((run / "env.json").read_text())["processes"] == 2


# slurmctld repeats a signal after a minute if slurmd has not answered within 10 s, and so kills the requeued job, which
# has started by then. (Other clusters let it wait for two minutes: cred_expire.)
@pytest.mark.slurm
@pytest.mark.parametrize("real_slurm", [5], indirect=True)
def test_a_run_that_ends_unexpectedly_goes_on(tiny, tmp_path, real_slurm):
    """Killed after a checkpoint, once more than allowed; killed before any; frozen after one; then left alone."""
    steps = 900
    recipe = tiny.yaml(tmp_path / "tiny.yaml", train=TRAIN | {"checkpoint_every": 100}, parallel={"timeout": 10})
    launch(recipe, f"train.steps={steps}", "--local", "2", "--out", tmp_path / "undisturbed")
    run, job_settings = tmp_path / "run", ["--slurm", "tasks=2", "time=30", "cpus_per_task=1"]

    def begin(*more, out=run):
        output = launch(recipe, *job_settings, "--out", out, *(more or [f"train.steps={steps}"]))
        number, log = re.fullmatch(r"job (\d+) is in the queue; its log: (.*)\n", output).groups()
        return number, Path(log), lambda: Path(log).read_text() if Path(log).exists() else "nothing"

    def newest():
        return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)

    def send(number, text, kind, after, task=1):
        """Send a signal to a task once there are rows of `after`, and wait until the job's shell says so."""
        until(lambda: len(rows(run)) > after, text)
        count = text().count("a task ended unexpectedly")
        os.kill(task_pids(number)[task], kind)
        until(lambda: text().count("a task ended unexpectedly") > count, text)
        return [line for line in text().splitlines() if "a task ended unexpectedly" in line][-1]

    def settled(number, text, state, restarts):
        until(lambda: not command("squeue", "--noheader"), text)
        job = command("scontrol", "show", "job", number)
        assert f"JobState={state}" in job, text()
        assert f"Restarts={restarts}" in job

    number, _, text = begin("restarts=1", f"train.steps={steps}")
    line = send(number, text, signal.SIGKILL, 120)
    assert f"; job {number} is requeued and will continue after step 00000" in line
    line = send(number, text, signal.SIGKILL, newest() + 130, task=0)
    assert line.endswith("the job is not requeued, as restarts=1 is reached")
    settled(number, text, "FAILED", 1)

    saved = newest()
    assert 200 <= saved < steps
    number, _, text = begin()
    until(lambda: "Loading pickle" in text(), text)
    line = send(number, text, signal.SIGKILL, 0)
    assert newest() == saved
    assert line.endswith(", before a checkpoint: the job is not requeued")
    settled(number, text, "FAILED", 0)

    number, log, text = begin()
    line = send(number, text, signal.SIGSTOP, newest() + 130)
    assert "(restart 1 of 10)" in line
    assert "has sent no heartbeat for 10 s" in text()
    settled(number, text, "COMPLETED", 1)
    assert rows(run) == rows(tmp_path / "undisturbed")
    assert len(rows(run)) > steps
    assert (log.parent / "restarts.txt").read_text().count("\n") == 1

    # Errors that would come again. The second job waits for the first.
    diverging = begin("train.steps=50", "train.optim.lr=1e30", "train.checkpoint_every=1", out=tmp_path / "diverging")
    wrong = begin("train.steps=50", out=tmp_path / "wrong")
    recipe_of_job = wrong[1].parent / "recipe.yaml"
    recipe_of_job.write_text(recipe_of_job.read_text().replace("batch_size:", "batch_sice:"))
    settled(diverging[0], diverging[2], "FAILED", 0)
    settled(wrong[0], wrong[2], "FAILED", 0)
    assert os.listdir(tmp_path / "diverging" / "checkpoints")
    for says, (_, _, text) in {"as training diverged": diverging, "batch_sice": wrong}.items():
        assert says in text()
        assert "unexpectedly" not in text()


@pytest.mark.slurm
def test_an_array_of_workers_shares_a_folder(tiny, tmp_path, real_slurm):
    """One job of two is preempted: its run is saved, released and continued; all end as if nothing had happened."""
    root, steps = tmp_path / "many", 300
    for seed in range(4):
        create_folder(root / f"seed{seed}", tiny(train={**TRAIN, "seed": seed, "steps": steps, "num_threads": 1}))
    settings = ["array=2", "tasks=1", "cpus_per_task=1", "time=30", "partition=low"]
    output = command(sys.executable, "-m", "canonlm", "work", root, "--slurm", *settings)
    assert re.match(r"2 jobs are in the queue, (\d+)_0 to \1_1; the log of the first: ", output)

    def log_text():
        return "\n".join(path.read_text() for path in (root / "launch" / "1").glob("*.out"))

    until(lambda: len(list(root.glob("seed*/metrics.jsonl"))) == 2, log_text)
    command("sbatch", "--partition=high", "--ntasks=1", "--output=/dev/null", "--wrap=sleep 1")
    until(lambda: "interrupted; " in log_text(), log_text)
    until(lambda: not command("squeue", "--noheader"), log_text)
    assert log_text().count("started") == 5
    assert "all 4 runs are settled" in log_text()
    for seed in range(4):
        reference = tmp_path / f"reference{seed}"
        train(tiny(train={**TRAIN, "seed": seed, "steps": steps, "num_threads": 1}), reference)
        assert rows(root / f"seed{seed}") == rows(reference)
