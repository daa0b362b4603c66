"""Several processes of one run: their environment, their output, and that none is left behind.

Most tests use a stand-in for the training; those at the end use the real one.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from canonlm.cli import main
from canonlm.launch import processes
from canonlm.launch.processes import Outcome, free_port, run

CHILD = """\
import json, os, pathlib, signal, sys, time
folder, rank = pathlib.Path(FOLDER), os.environ["RANK"]
plan = json.loads((folder / "plan.json").read_text()).get(rank, {})
got = []
for name in plan.get("handles", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"]):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
(folder / f"environment-{rank}").write_text(json.dumps({name: os.environ[name] for name in names}))
print(plan.get("says", f"rank {rank} speaking"), flush=True)
(folder / f"began-{rank}").touch()
while "after" in plan and not (folder / f"told-{plan['after']}").exists():
    time.sleep(0.01)
end = time.monotonic() + plan.get("seconds", 0)
while time.monotonic() < end and (not got or plan.get("deaf")):
    time.sleep(0.01)
if got:
    time.sleep(plan.get("saves", 0))
if "why" in plan:
    message, printed = plan["why"]
    note = {"message": message, "printed": printed, "timestamp": int(time.time()), "time": time.time()}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(note))
    (folder / f"told-{rank}").touch()
    time.sleep(plan.get("dies", 0))
if "kill" in plan:
    os.kill(os.getpid(), plan["kill"])
if got:
    (folder / f"saved-{rank}").write_text(" ".join(got))
    sys.exit(130)
sys.exit(plan.get("code", 0))
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(processes, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)


@pytest.fixture
def child(tmp_path):
    """`child({"1": {"seconds": …, "code": …}})`: the command of a run whose rank 1 only waits and exits with a code."""

    def make(plan):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        script = tmp_path / "child.py"
        script.write_text(CHILD.replace("FOLDER", repr(str(tmp_path))))
        return [sys.executable, "-S", str(script)]

    return make


def when_begun(folder, count, *numbers):
    """When all processes have begun, send this process the signals, one after the other."""

    def act():
        while len(list(folder.glob("began-*"))) < count:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    threading.Thread(target=act).start()


def pids_of(folder):
    """The processes that run a script in this folder."""
    result = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in result.splitlines() if str(folder / "child.py") in line]


def test_the_environment_equals_torchruns(child, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run(child({}), 3, tmp_path / "logs") == Outcome(0)
    environments = [json.loads((tmp_path / f"environment-{rank}").read_text()) for rank in range(3)]
    assert [(t["RANK"], t["LOCAL_RANK"]) for t in environments] == [("0", "0"), ("1", "1"), ("2", "2")]
    port = int(environments[0]["MASTER_PORT"])
    assert 1024 < port < 65536
    for t in environments:
        assert (t["WORLD_SIZE"], t["LOCAL_WORLD_SIZE"], t["OMP_NUM_THREADS"]) == ("3", "3", "2")
        assert (t["MASTER_ADDR"], t["MASTER_PORT"]) == ("127.0.0.1", str(port))
    assert capfd.readouterr().out == "rank 0 speaking\n"
    for rank in (1, 2):
        assert (tmp_path / f"logs/rank-{rank}.txt").read_text() == f"rank {rank} speaking\n"
    assert not (tmp_path / "logs/rank-0.txt").exists()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    run(child({}), 3, tmp_path / "logs")
    assert json.loads((tmp_path / "environment-2").read_text())["OMP_NUM_THREADS"] == "5"


def test_when_one_process_dies_the_others_are_stopped(child, tmp_path):
    log = tmp_path / "logs" / "rank-2.txt"
    log.parent.mkdir()
    log.write_text("of an earlier start\n")
    deaf = {"seconds": 600, "deaf": True, "handles": ["SIGTERM"]}
    plan = {"0": {"seconds": 600, "handles": []}, "1": deaf, "2": {"kill": signal.SIGKILL, "says": "step 3\nstep 4"}}
    began = time.monotonic()
    outcome = run(child(plan), 3, log.parent)
    assert time.monotonic() - began < 300
    assert outcome == Outcome(137, f"rank 2 was killed by SIGKILL, so the run was ended: step 4 (whole log: {log})")
    assert pids_of(tmp_path) == []
    assert log.read_text() == "of an earlier start\nstep 3\nstep 4\n"


LONG = {"seconds": 60}
OF_RANK_1 = "rank 1 ended with exit code {}, so the run was ended: {} (whole log: {{}})"


@pytest.mark.parametrize(
    ("plan", "code", "message"),
    [
        ({"0": LONG, "1": {"code": 3, "says": ""}}, 3, OF_RANK_1.format(3, "no message")),  # in this start
        ({"0": LONG, "1": {"code": 2, "says": "canonlm: no such device"}}, 2, OF_RANK_1.format(2, "no such device")),
        ({"0": {"code": 1}, "1": LONG}, 1, ""),  # the first process speaks for itself
        ({"0": {"kill": 11}, "1": LONG}, 139, "rank 0 was killed by SIGSEGV, so the run was ended"),
        # A refusal by all is reported only by the first. It may be the last to end; it has time to print the reason.
        *(
            ({"0": {"seconds": 0.2, "code": c}, "1": {"code": c, "says": s}}, c, "")
            for c, s in ((2, "a warning"), (1, ""))
        ),
    ],
    ids=["mute", "second refuses", "first", "first killed", "all refuse", "all fail"],
)
def test_the_process_that_failed_is_reported(child, tmp_path, monkeypatch, plan, code, message):
    if LONG not in plan.values():  # all end by themselves, even on a busy machine
        monkeypatch.setattr(processes, "SETTLE_SECONDS", 60.0)
    log = tmp_path / "logs" / "rank-1.txt"
    log.parent.mkdir()
    log.write_text("of an earlier start\n")
    assert run(child(plan), 2, log.parent) == Outcome(code, message.format(log))


BOOM, LOST = ["RuntimeError: boom\nand more", False], ["RuntimeError: Connection closed by peer", False]


@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [
        # The process that lost its partner is the first to end, and prints the most.
        ({"0": {"after": 1, "code": 1, "why": LOST}, "1": {"code": 3, "why": BOOM, "dies": 0.2}}, 3, "rank 1"),
        ({"0": {"code": 3, "why": BOOM, "dies": 0.2}, "1": {"after": 0, "code": 1, "why": LOST}}, 3, "rank 0"),
        ({"0": {"seconds": 60}, "1": {"code": 3, "why": BOOM}}, 3, "rank 1"),
        ({"0": {"after": 1, "code": 3, "why": BOOM}, "1": {"code": 3, "why": BOOM}}, 3, "rank 0"),
        # A line from the first process is not repeated.
        ({"0": {"code": 2, "why": ["no", True]}, "1": {"after": 0, "code": 2, "why": ["no", True]}}, 2, None),
        ({"0": {"code": 2, "why": ["no", True]}, "1": {"after": 0, "code": 1, "why": LOST}}, 2, None),
        ({"0": {"after": 1, "code": 1, "why": LOST}, "1": {"code": 2, "why": ["boom", True]}}, 2, "rank 1"),
    ],
    ids=["second", "first", "second alone", "both", "both refuse", "first refuses", "second refuses"],
)
def test_the_first_process_that_failed_is_named(child, tmp_path, monkeypatch, plan, code, words):
    if not any(each.get("seconds") == 60 for each in plan.values()):  # all end by themselves, even on a busy machine
        monkeypatch.setattr(processes, "SETTLE_SECONDS", 60.0)
    outcome = run(child(plan), 2, tmp_path / "logs")
    message = "" if words is None else f"{words} ended with exit code {code}, so the run was ended: "
    assert outcome.code == code
    assert outcome.message.startswith(message)
    assert bool(outcome.message) == bool(words)
    assert "\n" not in outcome.message
    if words:
        assert "boom" in outcome.message
        assert ("(whole log: " in outcome.message) == (words == "rank 1")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("number", "passed"),
    [
        (signal.SIGINT, "SIGINT"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGHUP, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
        (signal.SIGUSR2, "SIGUSR2"),
    ],
)
def test_a_signal_is_forwarded_once_and_saving_is_waited_for(child, tmp_path, number, passed):
    """Even if the others are quicker, and if the signal comes again."""
    before = signal.getsignal(number)
    plan = {"0": {"seconds": 60, "saves": 0.8}, "1": {"seconds": 60}}
    when_begun(tmp_path, 2, number, *([number] if number != signal.SIGINT else []))
    assert run(child(plan), 2, tmp_path / "logs") == Outcome(130)
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [passed, passed]
    assert signal.getsignal(number) is before


def both(**plan):
    return {"0": plan, "1": plan}


HUNG = (
    "rank 0 did not end within 0.3 s after the signal, so the run was ended; run it again to continue from the newest "
)
KILLED = "rank 1 was killed by SIGKILL, so the run was ended: rank 1 speaking (whole log: {})"


@pytest.mark.parametrize(
    ("plan", "signals", "code", "message"),
    [
        (both(seconds=600, saves=600), (signal.SIGTERM, signal.SIGINT), 130, ""),  # a second Ctrl-C does not wait
        (both(seconds=600, deaf=True), (signal.SIGTERM,), 1, f"{HUNG}checkpoint"),
        # Before the training began, the default action ends one process; another hangs waiting for it.
        ({"0": {"seconds": 60, "handles": []}, "1": {"seconds": 60, "deaf": True}}, (signal.SIGTERM,), 130, ""),
        # Of two that save, one is killed before or after the other has saved its part.
        *(
            (
                {"0": LONG | {"saves": saves}, "1": LONG | {"saves": 0.15, "kill": signal.SIGKILL}},
                (signal.SIGUSR1,),
                137,
                KILLED,
            )
            for saves in (0.3, 0)
        ),
    ],
    ids=["twice", "ignored", "too early", "killed first", "killed last"],
)
def test_how_a_stop_can_end(child, tmp_path, monkeypatch, plan, signals, code, message):
    monkeypatch.setattr(processes, "SAVE_SECONDS", 0.3 if HUNG in message else 600.0)
    when_begun(tmp_path, 2, *signals)
    began = time.monotonic()
    log = tmp_path / "logs" / "rank-1.txt"
    assert run(child(plan), 2, log.parent) == Outcome(code, message.format(log))
    assert time.monotonic() - began < 300
    assert pids_of(tmp_path) == []


def test_the_last_line_of_a_process_that_is_quicker_than_its_start_is_seen(child, tmp_path, monkeypatch):
    start = subprocess.Popen

    def slow_start(command, *, env, **options):
        process = start(command, env=env, **options)
        while not (tmp_path / f"began-{env['RANK']}").exists():
            time.sleep(0.01)
        return process

    monkeypatch.setattr(processes.subprocess, "Popen", slow_start)
    log = tmp_path / "logs" / "rank-1.txt"
    killed = run(child({"0": {"seconds": 60}, "1": {"kill": signal.SIGKILL}}), 2, log.parent)
    assert killed == Outcome(137, KILLED.format(log))


def test_a_signal_reaches_a_stopped_process(child, tmp_path):
    """The others wait for it, and only SIGKILL and SIGCONT reach it."""
    plan = {"0": {"seconds": 600}, "1": {"seconds": 600}}
    when_begun(tmp_path, 2, signal.SIGTERM)
    command = child(plan)
    script = tmp_path / "child.py"
    stop = '(folder / f"began-{rank}").touch()\n'
    script.write_text(script.read_text().replace(stop, f"{stop}if rank == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"))
    assert run(command, 2, tmp_path / "logs") == Outcome(130)
    assert (tmp_path / "saved-1").read_text() == "SIGTERM"


def test_an_internal_error_leaves_no_process_behind(child, tmp_path, monkeypatch):
    def fail(*_):
        while len(list(tmp_path.glob("began-*"))) < 2:
            time.sleep(0.01)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(processes, "_wait", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        run(child({"0": {"seconds": 60}, "1": {"seconds": 60}}), 2, tmp_path / "logs")
    assert pids_of(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_folder_that_cannot_be_written(child, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match=r"--out: expected a folder that can be written \(Not a directory\)"):
        run(child({"0": {"seconds": 60}}), 2, tmp_path / "run" / "logs")
    assert pids_of(tmp_path) == []


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tiny, tmp_path):
    settings = {"steps": 30, "device": "cpu", "log_every": 1, "eval_every": 1000, "checkpoint_every": 1000}
    return str(tiny.yaml(tmp_path / "tiny.yaml", train={**settings, "optim": {"schedule": "constant"}}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "canonlm launch needs --local N or --slurm"),
        (["--local", "2", "--slurm"], "--local cannot be used with --slurm"),
        (["--local", "0"], "--local: expected an integer >= 1, got 0"),
        (["--local", "2", "--dry-run"], "--dry-run only works with --slurm"),
        (["--local", "2", "nodes=2"], 'unknown setting "nodes"'),
        (["--local", "2", "train.step=5"], 'unknown setting "train.step". Did you mean "train.steps"?'),
        (["--local", "3"], "train.batch_size: expected a multiple of 3, the number of processes"),
        (["--slurm", "tasks=3", "time=5"], "train.batch_size: expected a multiple of 3, the number of processes"),
        (["--slurm", "tasks=2", "time=5", "train.step=5"], 'unknown setting "train.step"'),
        (["--slurm", "gpus=2", "time=5"], "train.device: cpu cannot be used with gpus=2"),
        (["--slurm", "tasks=2", "time=1", "--dry-run"], "signal_delay_s: expected less than the job's time,"),
        (["--slurm", "tasks=2", "time=5", "train_steps=5"], 'unknown SLURM setting "train_steps"'),
    ],
)
def test_mistakes_are_reported_before_anything_starts(recipe, tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.setattr(processes, "run", lambda *_: pytest.fail("started"))
    assert main(["launch", recipe, *arguments, "--out", str(tmp_path / "run")]) == 2
    output = capfd.readouterr()
    assert output.err.startswith(f"canonlm: {message}")
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert not (tmp_path / "run").exists()


def test_no_more_processes_than_gpus(recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("canonlm.train.build.pick_device", lambda name: "cuda")
    monkeypatch.setattr("canonlm.launch.local.gpus", lambda: ["0"])
    assert main(["launch", recipe, "--local", "2", "train.device=auto", "--out", str(tmp_path / "run")]) == 2
    assert capfd.readouterr().err == "canonlm: --local: expected at most 1, the GPUs of this machine, got 2\n"


def started(*command):
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


BROKEN = """\
import os, sys
from canonlm.cli import main
from canonlm.train.loop import _Run
optimize = _Run._optimize
def fail(self, batch):
    if self.step == 3 and os.environ["RANK"] == WHO:
        raise RuntimeError("no luck")
    return optimize(self, batch)
_Run._optimize = fail
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def broken(recipe, tmp_path):
    """`broken(rank)`: the command of a training in which this rank fails at its fourth step."""

    def make(rank):
        (tmp_path / "broken.py").write_text(BROKEN.replace("WHO", repr(str(rank))))
        return [str(tmp_path / "broken.py"), "train", recipe, "--out", str(tmp_path / "run")]

    return make


@pytest.mark.slow
def test_a_real_failure_is_reported_last(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SETTLE_SECONDS", 30.0)
    log = tmp_path / "logs" / "rank-1.txt"
    message = f"rank 1 ended with exit code 1, so the run was ended: RuntimeError: no luck (whole log: {log})"
    assert run([sys.executable, *broken(1)], 2, tmp_path / "logs") == Outcome(1, message)


@pytest.mark.slow
def test_torchrun_reports_it_too(broken):
    with started("torch.distributed.run", "--nproc-per-node", "2", *broken(1)) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "RuntimeError: no luck" in output.partition("Failures:")[2], output


def _rank(rank, port, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    sys.exit(main(arguments))


@pytest.fixture
def by_two_ranks(start):
    """`by_two_ranks(arguments)`: the command in two processes with the variables of torchrun, to its end."""

    def run(arguments):
        port = free_port()
        ranks = [start(_rank, rank, port, arguments) for rank in (0, 1)]
        for process in ranks:
            process.join(300)
        assert [process.exitcode for process in ranks] == [0, 0]

    return run


@pytest.mark.slow
def test_a_real_run_equals_torchruns_bit_for_bit_and_survives_ctrl_c(recipe, tiny, tmp_path, by_two_ranks):
    settings = [recipe, "train.steps=60", "--out"]
    by_two_ranks(["train", *settings, str(tmp_path / "undisturbed")])
    with started("canonlm", "launch", "--local", "2", *settings, str(tmp_path / "run")) as process:
        while not process.stdout.readline().startswith("step "):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 130
        assert output.splitlines()[-1].startswith("canonlm: stopped after step ")
        assert output.count("canonlm:") == 1
    by_two_ranks(["train", *settings, str(tmp_path / "run")])
    assert tiny.rows(tmp_path / "run") == tiny.rows(tmp_path / "undisturbed")
