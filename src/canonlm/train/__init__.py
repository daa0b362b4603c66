"""Training: one loop for playground and pretraining. `config` loads no torch; `loop` does."""

import sys
from types import ModuleType
from typing import Any

from canonlm.core.extras import import_named


class _Callable(ModuleType):
    """As `canonlm.canonize`: a package that is called as its function, `canonlm.train(recipe)`, which is above it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_named("canonlm.cli.from_python").train(*args, **options)


sys.modules[__name__].__class__ = _Callable
