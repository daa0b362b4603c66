"""EleutherAI's lm-evaluation-harness (the extra `eval`) with our models in it, groups of its tasks, and our own tasks.

lm.py          any model that `canonlm eval` opens, as a model of the harness
opening.py     its tasks, found by name and opened
run.py         asks them, one after the other, with standard errors
tasks/         YAML: groups of its tasks, and tasks of ours that it can ask any model
questions.py   what the YAML of our retrieval suites calls
twice.py       the retrieval tasks with everything told twice
"""

from importlib.util import find_spec
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
"""What `--include_path` of the harness takes."""


def require() -> None:
    """ValueError where the harness is not installed."""
    if find_spec("lm_eval") is None:
        raise ValueError("the lm-evaluation-harness is not installed: pip install 'canonlm[eval]'")
