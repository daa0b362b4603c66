"""The synthetic tasks: no torch, every sample a pure function of (seed, split, window, j).

Importing this package imports all its modules, and each task registers itself: there is no list of tasks.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from canonlm.tasks.base import Task, find, get, names, register, registered
from canonlm.tasks.describe import Measure, Scale, Score
from canonlm.tasks.function import task
from canonlm.tasks.packing import Windows
from canonlm.tasks.random import SPLITS, TEST, TRAIN, VALID, VALIDATION
from canonlm.tasks.records import Answer, Instance, Placed, Query, Sample, Slice, Verdict, Vocab
from canonlm.tasks.spec import TaskSpec

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "SPLITS", "TEST", "TRAIN", "VALID", "VALIDATION", "Answer", "Instance", "Measure", "Placed", "Query", "Sample",
    "Scale", "Score", "Slice", "Task", "TaskSpec", "Verdict", "Vocab", "Windows", "find", "get", "names", "register",
    "registered", "task",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The built-in task classes by name: `canonlm.tasks.Depo`."""
    classes = {cls.__name__: cls for cls in map(find, names())}
    if name not in classes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return classes[name]
