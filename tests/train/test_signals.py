"""Signals are recorded and handlers restored; on SLURM we requeue a job if and only if SLURM would not."""

import os
import signal
import sys
import threading
import time

import pytest

from canonlm.train import signals
from canonlm.train.signals import Signals

# The output of `scontrol show job` after each action on a job (SLURM 22.05).
RUNNING = """\
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   PreemptEligibleTime=2026-01-20T21:58:45 PreemptTime=None
"""
IN_GRACE_TIME = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-01-20T21:59:51")
CANCELLED = RUNNING.replace("RUNNING", "COMPLETING").replace("0:0", "0:15")
CANCELLED_IN_GRACE_TIME = IN_GRACE_TIME.replace("RUNNING", "COMPLETING").replace("0:0", "0:15")
REQUEUED_BY_SLURM = """\
   JobState=COMPLETING Reason=None Dependency=(null)
   Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0
"""
AGAIN, REQUEUED = "run it again to continue", "job 12 is requeued and will continue"
EVERY = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """`slurm(shown)`: this process becomes job 12, for which `scontrol show job` prints `shown`; returns its calls."""

    def be_a_job(shown, fails=""):
        refuse = f"if sys.argv[1] == 'requeue': sys.exit({fails!r})" if fails else ""
        script = tmp_path / "scontrol"
        script.write_text(
            f"#!{sys.executable} -S\nimport sys\nprint(*sys.argv[1:], file=open({str(tmp_path / 'calls')!r}, 'a'))\n"
            f"if sys.argv[1] == 'show': print({shown!r})\n{refuse}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        return lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []

    return be_a_job


def ask(number, main=True):
    with Signals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == number
        return signals.next_step(main)


def test_the_first_signal_is_recorded_and_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in EVERY}
    with Signals() as signals:
        assert signals.received is None
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGUSR2
    assert {number: signal.getsignal(number) for number in EVERY} == before
    with Signals() as signals:
        assert signals.received is None


@pytest.mark.parametrize("number", EVERY)
def test_outside_slurm_a_signal_means_save_and_stop(slurm, monkeypatch, number):
    scontrol_calls = slurm(IN_GRACE_TIME)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert ask(number) == AGAIN
    assert scontrol_calls() == []


@pytest.mark.parametrize(
    ("number", "main", "shown", "answer", "calls"),
    [
        *((number, False, RUNNING, AGAIN, []) for number in (signal.SIGUSR1, signal.SIGUSR2)),
        *((number, True, RUNNING, REQUEUED, ["requeue 12"]) for number in (signal.SIGUSR1, signal.SIGUSR2)),
        # A cancelled job must not return, and a job that SLURM requeues must not be requeued twice.
        *((signal.SIGTERM, True, shown, "SLURM starts job 12 again if it preempted it", ["show job 12"])
          for shown in (RUNNING, CANCELLED, CANCELLED_IN_GRACE_TIME, REQUEUED_BY_SLURM)),
        (signal.SIGTERM, True, IN_GRACE_TIME, REQUEUED, ["show job 12", "requeue 12"]),
        (signal.SIGINT, True, IN_GRACE_TIME, AGAIN, []),  # somebody typed it
    ],
)  # fmt: skip
def test_the_main_process_requeues_if_slurm_would_not(slurm, number, main, shown, answer, calls):
    scontrol_calls = slurm(shown)
    assert ask(number, main) == answer
    assert scontrol_calls() == calls


def test_a_signal_that_reached_another_rank_first(slurm, monkeypatch):
    scontrol_calls = slurm(RUNNING)
    with Signals() as folder:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        assert folder.next_step(main=True) == REQUEUED
    assert scontrol_calls() == ["requeue 12"]
    monkeypatch.setattr(signals, "LATE_SECONDS", 0.2)
    with Signals() as folder:
        assert folder.next_step(main=True) == AGAIN


def test_a_refusal_by_slurm_is_reported(slurm, monkeypatch, tmp_path):
    slurm(RUNNING, fails="Requested operation is presently disabled\nfor job 12")
    what = "job 12 could not be requeued (Requested operation is presently disabled for job 12)"
    assert ask(signal.SIGUSR1) == f"{what}; submit it again to continue"
    (tmp_path / "scontrol").write_text(f"#!{sys.executable} -S\nimport time\ntime.sleep(600)\n")
    monkeypatch.setattr(signals, "SCONTROL_SECONDS", 0.2)
    began = time.monotonic()
    assert "timed out after 0.2 seconds" in ask(signal.SIGUSR1)
    assert time.monotonic() - began < 300
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "No such file or directory: 'scontrol'" in ask(signal.SIGUSR1)
