"""Runs that several workers share: each is completed once, as if no worker had been killed."""

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from contextlib import suppress

import pytest
from filelock import FileLock

from canonlm.cli import main
from canonlm.launch import queue
from canonlm.launch.grid import PlannedRun
from canonlm.runs.folder import checkpoint_steps
from canonlm.runs.leases import Lease, Leases
from canonlm.train.checkpoint import Checkpoints, path_of
from canonlm.train.load_config import create_folder
from canonlm.train.loop import train
from canonlm.train.signals import Superseded


def append(path, line):
    """Append a line in one write, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def begun(log):
    return log.read_text().count("begins")


class StandIn:
    """Stands in for a training, in the worker's process: writes a row and a result after some milliseconds."""

    def __init__(self, run, slot, devices, environment):
        id, _, path = environment["CANONLM_LEASE"].partition(":")
        self.run, self.lease, self.log = run, Lease(type(run.folder)(path), id), run.folder.parent / "log"

    def poll(self):
        with suppress(FileNotFoundError):  # no longer on hold
            if begun(self.log) >= int(self.log.with_name("hold").read_text()):
                return None
        folder, me = self.run.folder, f"{self.run.name} {os.getpid()}"
        append(self.log, f"begins {me}")
        folder.mkdir(exist_ok=True)
        append(folder / "metrics.jsonl", json.dumps({"kind": "train", "step": 1}))
        time.sleep(0.001)
        if not self.lease.held():
            append(self.log, f"loses {me}")
            append(folder / "log.txt", "stopped")
            return 130
        temporary = folder / f".{self.lease.id}.tmp"
        temporary.write_text(str(os.getpid()))
        try:
            os.link(temporary, folder / "result.json")
        except FileExistsError:
            append(self.log, f"repeats {me}")
        return 0


def workers_with_kills(root, number, workers, kills, interval):
    """Returns the names of the runs, the lines of their log, and the processes that were killed. Until the last kill,
    half of the runs do not begin: workers on a busy machine would otherwise end before it."""
    (root / "log").touch()
    (root / "hold").write_text(str(number // 2))
    runs = [PlannedRun(f"run{i}", root / f"run{i}", None) for i in range(number)]
    context, rng, killed = multiprocessing.get_context("fork"), random.Random(number), set()

    def begin():
        options = {"devices": (), "interval": interval, "start": StandIn}
        process = context.Process(target=queue.work, args=(root, lambda: runs), kwargs=options)
        process.start()
        return process

    living = [begin() for _ in range(workers)]
    for target in sorted(rng.sample(range(number // 4), kills)):
        while begun(root / "log") < target:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.05))
        process = living.pop(rng.randrange(workers))
        assert process.exitcode is None, f"a worker ended with {process.exitcode} before the work was done"
        process.kill()
        process.join()
        killed.add(process.pid)
        living.append(begin())
    (root / "hold").unlink()
    for process in living:
        process.join()
    assert [process.exitcode for process in living] == [0] * workers
    return [run.name for run in runs], (root / "log").read_text().splitlines(), killed


@pytest.mark.parametrize(
    ("number", "workers", "kills", "interval"),
    [(200, 3, 3, 0.1), pytest.param(1_000, 8, 20, 0.4, marks=pytest.mark.slow)],
)
def test_every_run_is_completed_once(tmp_path, number, workers, kills, interval):
    names, log, killed = workers_with_kills(tmp_path, number, workers, kills, interval)
    lines = [line.split() for line in log]
    ends = [("ends", name, (tmp_path / name / "result.json").read_text()) for name in names]
    assert not [line for line in lines if line[0] == "repeats"]
    # Runs that began and did not end were killed.
    begun = Counter((name, pid) for what, name, pid in lines if what == "begins")
    begun.subtract((name, pid) for what, name, pid in (*lines, *ends) if what != "begins")
    assert {int(pid) for (_, pid), count in begun.items() if count} <= killed
    assert min(begun.values()) >= 0
    assert len(killed) == kills
    assert list((tmp_path / "leases").iterdir()) == []


# -- one worker and the outcomes of its runs --------------------------------------------------------------------------


class Scripted:
    """A run that at each start follows the next item of its script: an exit code, or None to run until it is ended.
    `saves`: it leaves a checkpoint first."""

    def __init__(self, run, lease, what, saves):
        self.run, self.lease, self.code = run, lease, what
        run.folder.mkdir(parents=True, exist_ok=True)
        if saves or what != -9:  # a process may be killed before it has a log
            with (run.folder / "log.txt").open("a") as log:
                log.write(f"canonlm: exit {what}\n")
        if saves:
            folder = run.folder / "checkpoints"
            path_of(folder, 99_999_999 + len(checkpoint_steps(folder))).mkdir(parents=True)
        if what == 0:
            (run.folder / "result.json").write_text("{}")

    def poll(self):
        return self.code

    def wait(self):
        return self.code

    def terminate(self):
        (self.run.folder / "saved").write_text(str(self.lease.held()))
        self.code = 130

    kill = terminate

    def send_signal(self, number):
        assert number == signal.SIGCONT


@pytest.fixture
def play(tmp_path):
    """`play({"a": [1, 0]})`: run a fails at its first start and ends at the second. Returns the summary and the events
    as texts; `play.starts` counts."""

    def work(scripts, plan=None, saves=False, on_event=lambda event: None, **options):
        events = []

        def start(run, slot, devices, environment):
            id, _, path = environment["CANONLM_LEASE"].partition(":")
            assert Lease(type(tmp_path)(path), id).held()
            slots.append((slot, tuple(devices)))
            return Scripted(run, Lease(type(tmp_path)(path), id), scripts[run.name].pop(0), saves)

        def note(event):
            events.append(f"{event.kind} {event.run.name}")
            on_event(event)

        runs = [PlannedRun(name, tmp_path / "runs" / name, None) for name in scripts]
        slots = work.slots = []
        options = {"interval": 0.02, "devices": (), **options}
        try:
            return queue.work(tmp_path, plan or (lambda: runs), start=start, on_event=note, **options)
        finally:
            work.events = events

    return work


def test_a_run_that_fails_three_times_is_skipped_and_others_continue(play, tiny, tmp_path):
    summary = play({"bad": [2, 1, 1], "odd": [1, 0], "good": [0]})
    log = tmp_path / "runs" / "bad" / "log.txt"
    assert summary == queue.Summary(["good", "odd"], {"bad": f"exit 1 (whole log: {log})"}, 3)
    assert play.events == [
        *("started bad", "again bad", "started odd", "again odd", "started good", "finished good"),
        *("started bad", "again bad", "started odd", "finished odd", "started bad", "failed bad"),
    ]
    runs = [PlannedRun(name, tmp_path / "runs" / name, tiny()) for name in ("bad", "odd", "new", "held")]
    lease = Leases(tmp_path / "leases", 1.0).claim("held")
    rows = queue.state(tmp_path, lambda: runs)
    assert [row[:6] for row in rows] == [
        *(("bad", "failed", 0, 40, "", 0), ("odd", "done", 40, 40, "", 0), ("new", "waiting", 0, 40, "", 0)),
        ("held", "running", 0, 40, socket.gethostname(), os.getpid()),
    ]
    assert [row.message for row in rows] == [f"exit 1 (whole log: {log})", "", "", ""]
    assert 0 <= rows[-1].silent < 60
    lease.release()
    # It stays failed for later workers, until the file is removed.
    assert play({"bad": []}).failed.keys() == {"bad"}
    (tmp_path / "leases" / "bad.failures.json").unlink()
    assert play({"bad": [0]}) == queue.Summary(["bad"], {}, 1)


FAILURE = {"host": "here", "message": "exit 1"}
DAMAGED = {
    "no list": json.dumps(FAILURE),
    "no failure": "[3]",
    "no host": '[{"message": "exit 1"}]',
    "message of three": json.dumps([FAILURE, FAILURE | {"message": 3}]),
    "cut": json.dumps([FAILURE])[:-1],
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_failures_are_one_line_and_nothing_starts(content, play, tiny, tmp_path):
    (tmp_path / "leases").mkdir()
    path = tmp_path / "leases" / "a.failures.json"
    path.write_text(content)
    runs = [PlannedRun("a", tmp_path / "runs" / "a", tiny())]
    for call in (lambda: play({"a": [0]}), lambda: queue.state(tmp_path, lambda: runs)):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: ") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
    assert play.slots == []
    path.unlink()
    assert play({"a": [0]}).finished == ["a"]


def test_a_reason_from_somebody_elses_file_stays_one_line(play, tmp_path):
    (tmp_path / "leases").mkdir()
    message = "exit 1\ncanonlm: all is well\x1b[2J" + "m" * 100_000
    (tmp_path / "leases" / "a.failures.json").write_text(json.dumps([FAILURE | {"message": message}] * 3))
    shown = play({"a": []}).failed["a"]
    assert shown.startswith("exit 1\ufffdcanonlm: all is well\ufffd[2Jmmm")
    assert len(shown) <= 1_000


def test_a_run_that_another_process_trains_is_waited_for(play, tmp_path):
    """A training that no worker has started holds the lock of its folder, and no lease."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    polls = []

    def on_poll():
        polls.append(list(play.slots))
        if len(polls) == 4:
            other.release()

    with FileLock(tmp_path / "runs" / "a" / ".lock") as other:
        assert play({"a": [0], "b": [0]}, on_poll=on_poll).finished == ["b", "a"]
    assert play.events == ["started b", "finished b", "started a", "finished a"]
    assert [len(slots) for slots in polls[:4]] == [0, 1, 1, 1]


def test_a_current_folder_that_is_gone_is_named(tmp_path, monkeypatch):
    def start(*_):
        os.getcwd()  # as it is told to the run's process

    run = PlannedRun("a", tmp_path / "runs" / "a", None)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    summary = queue.work(tmp_path, lambda: [run], devices=(), start=start, tries=1)
    assert summary.failed == {"a": "the current folder: No such file or directory"}


def test_a_killed_run_resumes_unless_it_makes_no_progress(play):
    assert play({"a": [-9, 130, -9, -15, -9, 0]}, saves=True).failed == {}
    assert play.events.count("again a") == 5
    assert "killed by SIGKILL" in play({"b": [-9, -9, -9]}).failed["b"]


def test_runs_that_become_possible_when_others_are_finished(play, tmp_path):
    """And the plan is not computed again before a run has finished."""
    questions = []

    def plan():
        questions.append(len(questions))
        first, second = (PlannedRun(name, tmp_path / "runs" / name, None) for name in ("tune", "test"))
        return [first, second] if (first.folder / "result.json").exists() else [first]

    assert play({"tune": [1, 1, 0], "test": [0]}, plan) == queue.Summary(["tune", "test"], {}, 2)
    assert len(questions) == 3


def test_jobs_have_separate_slots(play):
    play({name: [0] for name in "abcd"}, jobs=3, devices=["5", "7"])
    assert play.slots[:3] == [(slot, ("5", "7")) for slot in range(3)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_waits_for_saving_and_releases_the_lease(play, tmp_path, number):
    def stop(event):
        if event == ("started", event.run, "") and event.run.name == "b":
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="run it again to continue"):
        play({"a": [None], "b": [None], "c": [None]}, jobs=2, on_event=stop)
    assert [(tmp_path / "runs" / name / "saved").exists() for name in "abc"] == [True, True, False]
    assert (tmp_path / "runs" / "a" / "saved").read_text() == "True"  # its lease was kept until then
    assert list((tmp_path / "leases").iterdir()) == []
    assert signal.getsignal(number) == before


def test_a_worker_that_lost_a_lease_stops_the_run(play, tmp_path):
    taken = []

    def take(event):
        if event.kind == "started" and not taken:
            [lease] = (tmp_path / "leases").glob("a.*.json")
            lease.unlink()
            taken.append(Leases(tmp_path / "leases", 0.02).claim("a"))
        if event.kind == "lost":
            (tmp_path / "runs" / "a" / "result.json").write_text("{}")  # written by the other worker
            taken[0].release()

    assert play({"a": [None]}, on_event=take) == queue.Summary([], {}, 1)
    assert play.events == ["started a", "lost a"]
    assert (tmp_path / "runs" / "a" / "saved").read_text() == "False"


def test_two_runs_of_one_name(play, tmp_path):
    runs = [PlannedRun("a", tmp_path / folder, None) for folder in "bc"]
    with pytest.raises(ValueError, match=r"^two runs have the name a$"):
        play({}, lambda: runs)


# -- with real trainings ----------------------------------------------------------------------------------------------


def test_a_run_whose_folder_is_taken_after_the_claim_is_waited_for(tiny, tmp_path, monkeypatch):
    """Two commands that start at once both find the folder free: a process takes it seconds later."""
    run, events = PlannedRun("a", tmp_path / "a", tiny(train={"steps": 2})), []
    other = FileLock(run.folder / ".lock")

    class InThisProcess:
        def __init__(self, run, slot, devices, environment):
            create_folder(run.folder, run.config)
            if not events:
                other.acquire()
            monkeypatch.setenv("CANONLM_LEASE", environment["CANONLM_LEASE"])
            self.code = main(["train", str(run.folder / "config.yaml"), "--trust", "--out", str(run.folder)])

        def poll(self):
            return self.code

    def on_poll():
        if len(events) == 2:
            other.release()

    options = {"devices": (), "start": InThisProcess, "on_poll": on_poll, "on_event": lambda e: events.append(e.kind)}
    assert queue.work(tmp_path, lambda: [run], **options, tries=1).finished == ["a"]  # `canonlm play`: one try
    assert events == ["started", "again", "started", "finished"]


@pytest.mark.slow
def test_a_training_run_that_lost_its_lease_stops_writing(tiny, reference, tmp_path, monkeypatch):
    """As after a long pause, when rows, checkpoints and the result belong to another worker."""
    lease = Leases(tmp_path, 1.0).claim("run")
    monkeypatch.setenv(*next(iter(lease.environment.items())))
    folder = tmp_path / "run"

    def lose(row):
        if row["step"] == 12:
            while not (folder / "checkpoints" / "step-00000010").exists():  # a thread writes it
                time.sleep(0.01)
            lease.path.unlink()

    with pytest.raises(Superseded, match=r"^stopped after step 15: another worker has taken this run over$"):
        train(tiny(), folder, lose)
    assert [row["step"] for row in tiny.rows(folder)][-1] == 12
    assert tiny.checkpoints(folder) == ["step-00000010"]
    monkeypatch.delenv("CANONLM_LEASE")
    train(tiny(), folder)
    tiny.same(folder, reference)


def test_a_checkpoint_that_is_being_written_when_the_lease_is_lost(tiny, tmp_path, monkeypatch):
    lease = Leases(tmp_path, 1.0).claim("run")
    monkeypatch.setenv(*next(iter(lease.environment.items())))
    finish = Checkpoints._finish

    def lose_first(self, *arguments):
        lease.path.unlink()
        finish(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_finish", lose_first)
    with pytest.raises(Superseded):
        train(tiny(), tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def _work(root, configs):
    runs = [PlannedRun(name, root / name, config) for name, config in configs.items()]
    queue.work(root, lambda: runs, jobs=2, interval=1.0)


@pytest.mark.slow
def test_a_killed_worker_changes_no_result(tiny, tmp_path, start):
    """Two workers, three trainings, kill -9 of one while it has two of them; losses and weights to the bit."""
    settings = {"checkpoint_every": 25, "eval_every": 50}
    # seed0 is long enough that the kill finds it in the middle, however the machine divides its time.
    configs = {f"seed{seed}": tiny(train={**settings, "steps": 50 if seed else 400, "seed": seed}) for seed in range(3)}
    root = tmp_path / "many"
    first = start(_work, root, configs)
    metrics = root / "seed0" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 12):
        time.sleep(0.01)
        assert first.exitcode is None
    second = start(_work, root, configs)
    first.kill()
    second.join()
    assert second.exitcode == 0
    for name, config in configs.items():
        train(config, tmp_path / "reference" / name)
        tiny.same(root / name, tmp_path / "reference" / name, saved_when_stopped=True)
    assert "stopped after step" in (root / "seed0" / "log.txt").read_text()
