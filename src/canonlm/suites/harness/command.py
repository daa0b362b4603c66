"""The harness's command line, with our models and tasks added to its own."""

import sys
from collections.abc import Sequence
from typing import Any

from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import setup_logging

import canonlm.suites.harness.lm  # noqa: F401  # registers our models
from canonlm.suites.harness import TASKS
from canonlm.suites.harness.opening import open_tasks, reachable, unknown_task

_NOT_FOUND = "Tasks not found: "


def run(arguments: Sequence[str]) -> None:
    """Run `lm-eval` with these arguments. It prints tables and help, and ends the process if arguments are wrong.

    ValueError: an unknown task (with the closest names), data that cannot be reached.
    """
    setup_logging()
    previous, sys.argv = sys.argv, ["lm-eval", *arguments]  # where the harness reads them
    try:
        command = HarnessCLI()
        parsed = command.parse_args()
        include = _include(parsed)
        if hasattr(parsed, "include_path"):
            parsed.include_path = [TASKS, *([include] if include else [])]
        with reachable():
            command.execute(parsed)
    except ValueError as error:
        missing = str(error).removeprefix(_NOT_FOUND).split(", ")
        if str(error).startswith(_NOT_FOUND):
            raise unknown_task(open_tasks(include), missing[0]) from None
        raise
    finally:
        sys.argv = previous


def _include(parsed: Any) -> str | None:
    """The user's own folder of tasks, from the command line or from a configuration file."""
    if (path := getattr(parsed, "include_path", None)) is not None:
        return path
    config = getattr(parsed, "config", None)
    return EvaluatorConfig.load_yaml_config(config).get("include_path") if config else None
