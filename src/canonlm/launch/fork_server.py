"""Start `canonlm` commands without importing torch and transformers again for each.

    process = start(["train", "config.yaml"], os.environ, log)    # as subprocess.Popen: poll, wait, terminate, kill

The imports take a process six seconds, as long as a tiny run. So one process (`python -m canonlm.launch.fork_server`)
imports everything once, and forks for every command. It never computes anything, so it has no threads and no GPU, which
a fork would lose.

A request is a line of JSON: a command to start, or a signal to send to one. A reply is a line with the exit code of a
command that has ended, negative if a signal killed it. The process ends when its input does, and so do its commands
then (`canonlm.train.signals.PARENT`).
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from canonlm.core.files import append
from canonlm.train.signals import PARENT

READ = 1 << 16
POLL_SECONDS = 0.05


class Started:
    """A command that a `Starter` has started. The methods are those of `subprocess.Popen`."""

    def __init__(self, starter: "Starter", number: int) -> None:
        self.starter, self.number = starter, number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.starter.receive(0)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self.starter.receive(None)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self.starter.send({"id": self.number, "signal": number})

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Starter:
    """A process that forks for commands, all with the libraries that its environment configures. What it prints itself,
    such as an import that fails, is appended to `log`."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        with append(log) as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "canonlm.launch.fork_server"],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout.fileno()
        self._rest = b""
        self.running: dict[int, Started] = {}
        self._count = 0
        self.ended = False

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Started:
        """Start `canonlm ARGUMENTS` in the current folder; its output is appended to `log`."""
        assert not self.ended
        started = self.running[self._count] = Started(self, self._count)
        self._count += 1
        request = {"arguments": list(arguments), "environment": dict(environment), "log": os.path.abspath(log)}
        self.send({"id": started.number, "folder": os.getcwd(), **request})
        return started

    def send(self, request: Mapping[str, object]) -> None:
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            self.receive(None)

    def receive(self, seconds: float | None) -> None:
        """Read the replies that there are; waits for one for this time, None: without limit."""
        if self.ended or not select.select([self._replies], [], [], seconds)[0]:
            return
        data = os.read(self._replies, READ)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for reply in map(json.loads, lines):
            self.running.pop(reply["id"]).returncode = reply["code"]
        if not data:  # its commands stop, too: `canonlm.train.signals.PARENT`
            self.ended = True
            code = self.process.wait() or 1
            for started in self.running.values():
                started.returncode = code
            self.running.clear()

    def close(self) -> None:
        """End the process, and with it the commands that still run."""
        self.ended = True
        with suppress(BrokenPipeError):
            self._requests.close()
        self.process.wait()


_last: tuple[dict[str, str], Starter] | None = None


def start(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Started:
    """Start `canonlm ARGUMENTS`; its output is appended to `log`. The first call starts the process that forks, and so
    does a call with another environment, except for variables of our own."""
    global _last
    libraries = {name: value for name, value in environment.items() if not name.startswith("CANONLM_")}
    if _last is None or _last[1].ended or _last[0] != libraries:
        if _last is not None and not _last[1].running:
            _last[1].close()
        starter = Starter(environment, log)
        atexit.register(starter.close)
        _last = libraries, starter
    return _last[1].start(arguments, environment, log)


# -- the process that forks -------------------------------------------------------------------------------------------


def main() -> None:
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # an import that prints must not write into the replies
    import rich.live  # noqa: F401
    import typer  # noqa: F401

    import canonlm.train.build
    import canonlm.train.loop  # noqa: F401

    gc.collect()
    gc.freeze()  # so that collections in the forks do not copy the memory of what is imported
    if (request := serve(requests, replies)) is not None:
        run(request)


def serve(requests: int, replies: int) -> dict[str, Any] | None:
    """Fork a process for every request, until no more come. Returns the request, in the process that has to run it."""
    running: dict[int, int] = {}  # process id -> id of the request
    rest = b""
    while True:
        if select.select([requests], [], [], POLL_SECONDS if running else None)[0]:
            if not (data := os.read(requests, READ)):
                return None
            *lines, rest = (rest + data).split(b"\n")
            for request in map(json.loads, lines):
                if "signal" in request:
                    for process, number in running.items():
                        if number == request["id"]:
                            os.kill(process, request["signal"])
                elif process := os.fork():
                    running[process] = request["id"]
                else:
                    os.close(requests)
                    os.close(replies)
                    return request
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                reply = {"id": running.pop(process), "code": os.waitstatus_to_exitcode(status)}
                os.write(replies, json.dumps(reply).encode() + b"\n")


def run(request: dict[str, Any]) -> None:
    """Run `python -m canonlm` as if this process had been started for it alone."""
    os.setsid()
    if not sys.flags.safe_path:
        sys.path[0] = request["folder"]  # as `python -m` does
    os.chdir(request["folder"])
    with append(Path(request["log"])) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(request["environment"], **{PARENT: str(os.getppid())})
    sys.argv = ["canonlm", *request["arguments"]]
    runpy.run_module("canonlm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
