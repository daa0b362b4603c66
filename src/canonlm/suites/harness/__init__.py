"""EleutherAI's lm-evaluation-harness (the extra `eval`) with our models in it, groups of its tasks, and our own tasks.

lm.py          any model that `canonlm eval` opens, as a model of the harness
opening.py     finds its tasks by name and opens them
run.py         evaluates them, one after the other, with standard errors
tasks/         YAML: groups of its tasks, and tasks of ours for any model of the harness
questions.py   our retrieval suites as tasks, for these YAML files
twice.py       the retrieval tasks with their text repeated
"""

from pathlib import Path

from canonlm.core.extras import needed

TASKS = Path(__file__).parent / "tasks"
"""For `--include_path` of the harness."""


def require() -> None:
    """ValueError where the harness is not installed."""
    needed("lm_eval", "the lm-evaluation-harness", package="lm-eval")
