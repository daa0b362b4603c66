"""The process that `canonlm.launch.fork_server` starts: it imports everything, and forks for every command.

A request is a line of JSON: a command to start (`Request`), or a signal to send to one. A reply is a line with the
exit code of a command that has ended, negative if a signal killed it. It ends when its input does, and so do its
commands then (`canonlm.train.signals.PARENT`).
"""

import gc
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05
READ = 1 << 16


def main() -> int:
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # an import that prints must not write into the replies
    import canonlm.cli.live
    import canonlm.train.build
    import canonlm.train.loop  # noqa: F401

    gc.collect()
    gc.freeze()  # so that collections in the forks do not copy the memory of what is imported
    request = serve(requests, replies)
    return 0 if request is None else run(request)


def serve(requests: int, replies: int) -> dict[str, Any] | None:
    """Fork for every command until there are no more requests. Returns the request in the fork that is for it."""
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


def run(request: dict[str, Any]) -> int:
    """Run a `canonlm` command as if this process had been started for it alone."""
    from canonlm.cli import main
    from canonlm.core.files import append
    from canonlm.train.signals import PARENT

    os.setsid()
    with append(Path(request["log"])) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(request["environment"], **{PARENT: str(os.getppid())})
    sys.argv = ["canonlm", *request["arguments"]]
    return main(request["arguments"])


if __name__ == "__main__":
    sys.exit(main())
