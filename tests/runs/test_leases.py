"""One owner at a time, for any interleaving of several workers' file operations, even if workers die or sleep."""

import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from canonlm.runs import leases
from canonlm.runs.leases import Leases

INTERVAL = 10.0
SCHEDULES, STRETCHES = 60, 50


class Dead(BaseException):
    """Raised in a worker that is killed, at its next file operation."""


class Workers:
    """Threads that run one at a time, each up to its next file operation."""

    def __init__(self):
        self.waiting, self.scheduler = {}, threading.Semaphore(0)
        self.threads, self.killed, self.switching = {}, set(), True

    def add(self, name, program):
        def run():
            self.waiting[name].acquire()
            try:
                if name not in self.killed:
                    program()
            except Dead:
                pass
            finally:
                del self.threads[name]
                self.scheduler.release()

        self.waiting[name] = threading.Semaphore(0)
        self.threads[name] = threading.Thread(target=run, name=name, daemon=True)
        self.threads[name].start()

    def step(self, name):
        if name in self.threads:
            self.waiting[name].release()
            self.scheduler.acquire()

    def before_file_operation(self):
        name = threading.current_thread().name
        if not self.switching:
            return
        if name in self.waiting and name not in self.killed:
            self.scheduler.release()
            self.waiting[name].acquire()
        if name in self.killed:
            raise Dead


class Shared:
    """A run that three workers want: each claims it, sends heartbeats, and finishes or releases it."""

    def __init__(self, folder, rng, monkeypatch):
        self.folder, self.rng, self.now, self.ticks = folder, rng, 0.0, 0
        self.workers, self.owned, self.finished, self.generation = Workers(), {}, [], 0
        operations = (os, "listdir"), (os, "link"), (leases, "open_regular"), (Path, "unlink"), (leases, "create")
        for owner, name in operations:
            monkeypatch.setattr(owner, name, self._switching(getattr(owner, name)))
        utime = os.utime
        monkeypatch.setattr(os, "utime", lambda file: utime(file, ns=(0, self._tick())))
        for name in "abc":
            self.start(name)

    def _switching(self, function):
        def first_others(*args, **kwargs):
            self.workers.before_file_operation()
            return function(*args, **kwargs)

        return first_others

    def _tick(self):
        self.ticks += 1
        return self.ticks

    def start(self, name):
        def work():
            claims, listing = Leases(self.folder, INTERVAL, clock=lambda: self.now), None
            while not self.finished:
                if self.rng.random() < 0.5:  # else that of an earlier claim, or none
                    listing = claims.listed()
                lease = claims.claim("run", listing)
                if lease is None:
                    continue
                self.owned[name] = lease
                self.generation = max(self.generation, int(lease.path.name.split(".")[1]))
                works = not self.finished and all(lease.beat() for _ in range(self.rng.randint(1, 15)))
                if works and self.rng.random() < 0.2:
                    self._finish(lease)
                del self.owned[name]  # finished, or stopped so that others continue
                lease.release()

        self.workers.add(name, work)

    def kill(self, name, again=True):
        self.workers.killed.add(name)
        self.workers.step(name)
        self.workers.killed.discard(name)
        self.owned.pop(name, None)
        if again:
            self.start(name)

    def _finish(self, lease):
        """Checks and writes at once, because no lease can exclude a pause between the two."""
        if self._holds(lease):
            self.finished.append(lease.id)

    def _holds(self, lease):
        self.workers.switching = False
        try:
            return lease.held()
        finally:
            self.workers.switching = True

    def check(self):
        holders = [name for name, lease in self.owned.items() if self._holds(lease)]
        assert len(holders) <= 1, holders
        assert len(self.finished) <= 1


def test_one_owner_at_a_time(tmp_path):
    """Any order of file operations; workers are killed and started again; time passes, so that a worker that sleeps for
    a moment is taken for dead. In the end the remaining worker finishes."""
    takeovers = 0
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(leases, "SILENT", 0)
            (tmp_path / str(seed)).mkdir()
            shared = Shared(tmp_path / str(seed), rng, monkeypatch)
            for _ in range(STRETCHES):
                name = rng.choice("abc")
                if (chance := rng.random()) < 0.1:
                    shared.kill(name)
                elif chance < 0.3:
                    shared.now += INTERVAL
                for _ in range(rng.randint(1, 12)):
                    shared.workers.step(name)
                    shared.check()
            shared.kill("a", again=False)
            shared.kill("b", again=False)
            while shared.workers.threads:
                shared.workers.step("c")
                shared.check()
                shared.now += INTERVAL
            assert len(shared.finished) == 1
            takeovers += shared.generation > 1
    assert takeovers > SCHEDULES / 4


@pytest.fixture
def clock(monkeypatch):
    """`clock.now`, in seconds, and heartbeats that differ even if they follow one another quickly."""
    state, utime = SimpleNamespace(now=0.0, ticks=0), os.utime

    def touch(file, times=None):
        state.ticks += 1
        utime(file, ns=(0, state.ticks))

    monkeypatch.setattr(os, "utime", touch)
    return state


def claims(folder, clock):
    return Leases(folder, INTERVAL, clock=lambda: clock.now)


def test_an_owner_is_considered_dead_after_five_missed_heartbeats(tmp_path, clock):
    lease, other = claims(tmp_path, clock).claim("run"), claims(tmp_path, clock)
    for beat in (True, True, False):
        for _ in range(11):  # the first check starts the count
            assert other.claim("run") is None
            clock.now += INTERVAL / 2
        assert lease.held()
        assert not beat or lease.beat()
    clock.now += 0.01
    taken = other.claim("run")
    assert taken.held()
    assert not lease.held()
    assert not lease.beat()
    lease.release()  # it does not own it any more
    assert taken.held()
    taken.release()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_slept_does_not_consider_others_dead(tmp_path, clock):
    claims(tmp_path, clock).claim("run")
    other = claims(tmp_path, clock)
    for _ in range(6):
        assert other.claim("run") is None
        clock.now += 1000 * INTERVAL
    assert other.claim("run") is not None


def test_the_folder_is_listed_once_for_all_runs_that_others_hold(tmp_path, clock, monkeypatch):
    names, other = [f"run{number}" for number in range(5)], claims(tmp_path, clock)
    leases_held = [claims(tmp_path, clock).claim(name) for name in names]
    listing = other.listed()
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda folder: pytest.fail("it lists the folder"))
        assert [other.claim(name, listing) for name in names] == [None] * 5
    leases_held[0].release()
    assert other.claim("run0", listing) is None  # the next listing shows it
    assert other.claim("run0", other.listed()).held()
    assert claims(tmp_path, clock).claim("run0", {}) is None


def test_a_claim_with_an_old_listing_withdraws_when_another_worker_has_taken_over(tmp_path, clock):
    slow, other = claims(tmp_path, clock), claims(tmp_path, clock)
    listing = slow.listed()
    claims(tmp_path, clock).claim("run")
    while (taken := other.claim("run")) is None:
        clock.now += INTERVAL
    assert slow.claim("run", listing) is None
    assert taken.held()
    assert list(tmp_path.iterdir()) == [taken.path]


def test_a_claim_whose_answer_is_lost(tmp_path, clock, monkeypatch):
    """NFS repeats a request without a reply, and then finds that the link exists: its own."""
    link = os.link

    def twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert claims(tmp_path, clock).claim("run").held()


def test_a_file_system_without_hard_links(tmp_path, clock, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(
        ValueError, match=r"^leases: expected a file system with hard links \(Operation not permitted\)"
    ):
        claims(tmp_path, clock).claim("run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path, clock):
    with pytest.raises(
        ValueError, match=r"^leases: expected a folder that can be written \(No such file .*got .*/no\"$"
    ):
        claims(tmp_path / "no", clock).claim("run")


def test_names_with_dots_and_damaged_leases(tmp_path, clock):
    mine, other = claims(tmp_path, clock), claims(tmp_path, clock)
    (tmp_path / "a-lr0.1.7.json").write_text("")  # as a crash of its machine may leave it
    (tmp_path / "a-lr0.1.failures.json").write_text("[]")
    assert mine.claim("a-lr0").held()
    assert other.claim("a-lr0.1") is None
    assert {name: owner.pid for name, (owner, _) in other.owners().items()} == {"a-lr0": os.getpid(), "a-lr0.1": 0}
    while (taken := other.claim("a-lr0.1")) is None:
        clock.now += 60
        assert clock.now < 600
    assert taken.path.name == "a-lr0.1.8.json"


IMPOSSIBLE = {
    **{f"interval {value}": f'{{"id": "x", "host": "h", "pid": 1, "start": 0, "interval": {value}}}'
       for value in ("0", "-5", "NaN", "1e300", "1e999", '"a"', "[]")},
    "pid": '{"id": "x", "host": "h", "pid": 1e999, "start": 0, "interval": 1}',
    "list": "[1]", "nested": "[" * 100_000, "not UTF-8": b"\xff", "long": " " * 10**6,
}  # fmt: skip


@pytest.mark.parametrize("content", [*IMPOSSIBLE, "fifo", "device", "folder", "nowhere"])
def test_impossible_leases_are_expired(content, tmp_path, clock):
    lease = tmp_path / "run.3.json"
    if content in IMPOSSIBLE:
        text = IMPOSSIBLE[content]
        lease.write_bytes(text if isinstance(text, bytes) else text.encode())
    else:
        {"fifo": os.mkfifo, "folder": type(lease).mkdir, "device": lambda path: path.symlink_to("/dev/zero"),
         "nowhere": lambda path: path.symlink_to("nowhere")}[content](lease)  # fmt: skip
    worker = claims(tmp_path, clock)
    worker.owners()
    taken = worker.claim("run")
    assert taken.path.name == "run.4.json"
    assert taken.held()
