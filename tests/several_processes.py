"""Starts a program whose processes compute together, and ends all of them if it does not end by itself."""

import contextlib
import json
import os
import signal
import subprocess
import sys


def results_of(script, folder, *arguments, seconds, environment):
    """The content of FOLDER/results.json after `script FOLDER ARGUMENTS SECONDS`. AssertionError, with the logs of the
    processes: it failed, or did not end."""
    command = [sys.executable, str(script), str(folder), *arguments, str(seconds)]
    first = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
    try:
        code = first.wait(seconds + 60)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert code == 0, "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
    return json.loads((folder / "results.json").read_text())
