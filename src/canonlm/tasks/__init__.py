"""The synthetic tasks: no torch, every sample a pure function of (seed, split, window, j).

Every file and package in here is imported, and what registers itself is a task: there is no list to keep.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from canonlm.tasks.compiled import cache_by_content

with cache_by_content():
    from canonlm.tasks.base import (
        Instance,
        Placed,
        Query,
        Sample,
        Slice,
        Task,
        Verdict,
        Vocab,
        find,
        get,
        names,
        register,
        registered,
    )
    from canonlm.tasks.describe import Measure, Scale, Score
    from canonlm.tasks.packing import Windows
    from canonlm.tasks.random import SPLITS, TEST, TRAIN, VALID
    from canonlm.tasks.spec import TaskSpec

    for _module in iter_modules(__path__):
        import_module(f"{__name__}.{_module.name}")

__all__ = [
    "SPLITS", "TEST", "TRAIN", "VALID", "Instance", "Measure", "Placed", "Query", "Sample", "Scale", "Score", "Slice",
    "Task", "TaskSpec", "Verdict", "Vocab", "Windows", "find", "get", "names", "register", "registered",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The classes of our tasks: `canonlm.tasks.Depo`."""
    classes = {cls.__name__: cls for cls in map(find, names())}
    if name not in classes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return classes[name]
