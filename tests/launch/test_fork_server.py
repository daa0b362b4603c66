"""Commands as forks of one process: as if each had been started by itself."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from canonlm.launch import fork_server, local
from canonlm.launch.grid import PlannedRun
from canonlm.train.load_config import create_folder
from canonlm.train.loop import train


@pytest.fixture
def server(tmp_path):
    """The process that other tests of this worker use, too. pytest sets its variable again for fixtures."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return fork_server.start(["--version"], environment, tmp_path / "first.txt").starter


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_output_and_exit_code_are_those_of_each_command(server, tmp_path):
    logs = [tmp_path / name for name in ("version", "mistake", "again")]
    commands = [["--version"], ["play", "depoo"], ["--version"]]
    started = [server.start(command, os.environ, log) for command, log in zip(commands, logs, strict=True)]
    assert [process.wait() for process in started] == [0, 2, 0]
    assert logs[0].read_text().startswith("canonlm ")
    assert logs[0].read_text() == logs[2].read_text()
    assert logs[1].read_text().startswith('canonlm: unknown task "depoo". Did you mean "depo"?')


def test_commands_run_in_the_current_folder(server, tmp_path, monkeypatch):
    """With the modules of that folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("print('own is imported from here')\n")
    assert server.start(["data", "show", "own:Task"], os.environ, tmp_path / "log.txt").wait() == 2
    assert "own is imported from here\n" in (tmp_path / "log.txt").read_text()


def test_a_run_is_the_same_bit_for_bit(tiny, tmp_path):
    """Also one that begins while another is in the middle."""
    runs = []
    for seed in range(2):
        config = tiny(train={"seed": seed})
        create_folder(tmp_path / f"seed{seed}", config)
        runs.append(PlannedRun(f"seed{seed}", tmp_path / f"seed{seed}", config))
    assert local.can_fork([], config.train.num_threads)
    started = [local.start_process(run, slot, [], os.environ) for slot, run in enumerate(runs)]
    assert [type(process) for process in started] == [fork_server.Started] * 2
    assert [process.wait() for process in started] == [0, 0]
    for run in runs:
        train(run.config, tmp_path / f"reference-{run.name}")
        tiny.same(run.folder, tmp_path / f"reference-{run.name}")


@pytest.fixture
def long_run(tiny, tmp_path):
    """`long_run(server)`: a process that trains for minutes, and the id of that process."""

    def begin(server):
        path, folder = tiny.yaml(tmp_path / "run.yaml", train={"steps": 10**6, "eval_every": 10**6}), tmp_path / "run"
        arguments = ["train", str(path), "--out", str(folder)]
        process = server.start(arguments, os.environ | {"CANONLM_PARENT": "1"}, tmp_path / "log.txt")
        wait_for((folder / "metrics.jsonl").exists)
        [process_id] = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _prints_into(path, tmp_path)]
        return process, process_id

    return begin


def _prints_into(process, folder):
    try:
        return (process / "fd" / "1").readlink() == folder / "log.txt"
    except OSError:
        return False


@pytest.mark.parametrize(("name", "code"), [("terminate", 130), ("kill", -signal.SIGKILL)])
def test_signals_reach_the_command(server, long_run, tmp_path, name, code):
    process, process_id = long_run(server)
    assert process.poll() is None
    assert os.getsid(process_id) == process_id  # Ctrl-C in a terminal does not reach it
    getattr(process, name)()
    assert process.wait() == code
    assert process.poll() == code
    getattr(process, name)()  # does nothing
    assert ("stopped after step" in (tmp_path / "log.txt").read_text()) == (code == 130)


@pytest.mark.slow
def test_commands_stop_when_the_starter_is_killed(long_run, tmp_path):
    """They save first."""
    server = fork_server.Starter(os.environ, tmp_path / "starter.txt")
    process, process_id = long_run(server)
    server.process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_for(lambda: not Path(f"/proc/{process_id}").exists())
    assert "stopped after step" in (tmp_path / "log.txt").read_text()
    assert server.ended


def test_imports_that_fail_are_in_the_log(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')\n")
    server = fork_server.Starter(os.environ | {"PYTHONPATH": str(tmp_path)}, tmp_path / "log.txt")
    assert server.start(["--version"], os.environ, tmp_path / "log.txt").wait() == 1
    assert local.reason(tmp_path, 1) == f"ImportError: torch is broken (whole log: {tmp_path / 'log.txt'})"
    server.close()


class NoProcess:
    """A `Starter` without a process."""

    def __init__(self, environment, log):
        self.running, self.ended = {}, False

    def start(self, arguments, environment, log):
        return self

    def close(self):
        self.ended = True


def test_one_process_for_one_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "Starter", NoProcess)
    monkeypatch.setattr(fork_server, "_last", None)
    monkeypatch.setattr(fork_server.atexit, "register", lambda end: None)

    def begin():
        return fork_server.start(["--version"], os.environ, tmp_path / "log.txt")

    first = begin()
    monkeypatch.setenv("CANONLM_LEASE", json.dumps({"of": "one run"}))
    monkeypatch.chdir(tmp_path)
    assert begin() is first
    monkeypatch.setenv("NO_COLOR", "1")
    assert begin() is not first
    assert first.ended


@pytest.mark.parametrize(("devices", "threads"), [(["0"], 1), ([], 2), ([], None)])
def test_runs_that_a_fork_could_change_get_a_separate_process(devices, threads):
    assert not local.can_fork(devices, threads)
