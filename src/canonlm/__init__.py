"""canonlm: compare language-model architectures on synthetic pretraining tasks; Canon layers for your models.

    tasks             the synthetic tasks: tasks.get("depo", N=8, K=2).sample("test", seed=0, index=0)
    models            our decoder for all architectures, and the interface to any other model
    runs              run folders: their contents, and the identity of a run
    play, train       the commands of these names, as functions that return such a data frame
    load_runs         all measurements of runs, as a data frame with a row per measurement
    CanonLayer        the layer, for a model of your own
    canonize          Canon layers in any decoder of transformers; decanonize takes them out, describe says beforehand
                      where they would go
    check             checks that a model gives the same output with caches, padding, batches and beams
    load_published    the published checkpoints, in all their formats

Names are loaded on first use, so that `import canonlm` (and the command line's `--help`) stays quick.
"""

from typing import TYPE_CHECKING, Any

from canonlm.core.auto_register import install
from canonlm.core.extras import import_named

__version__ = "0.1.0"

if TYPE_CHECKING:
    from canonlm import models as models
    from canonlm import runs as runs
    from canonlm import tasks as tasks
    from canonlm.canon import CanonLayer as CanonLayer
    from canonlm.canonize import canonize as canonize  # the package, called
    from canonlm.canonize import check
    from canonlm.canonize import decanonize as decanonize
    from canonlm.canonize import describe as describe
    from canonlm.canonize.canonized_model import CanonHostConfig as CanonHostConfig
    from canonlm.cli.from_python import play as play
    from canonlm.cli.from_python import train as train
    from canonlm.experiments.published.runs import load_runs as load_runs
    from canonlm.models.config import CanonLMConfig as CanonLMConfig
    from canonlm.models.modeling import CanonLMForCausalLM as CanonLMForCausalLM
    from canonlm.models.published import load_published as load_published

_MODULE_OF = {
    "CanonHostConfig": "canonlm.canonize.canonized_model",
    "CanonLayer": "canonlm.canon",
    "CanonLMConfig": "canonlm.models",
    "CanonLMForCausalLM": "canonlm.models",
    "decanonize": "canonlm.canonize",
    "describe": "canonlm.canonize",
    "load_published": "canonlm.models.published",
    "load_runs": "canonlm.experiments.published.runs",
    "play": "canonlm.cli.from_python",
}
_SUBPACKAGES = {
    "canon",
    "canonize",
    "core",
    "data",
    "experiments",
    "launch",
    "models",
    "ops",
    "report",
    "runs",
    "suites",
    "tasks",
    "train",
}

__all__ = [
    "CanonHostConfig",
    "CanonLMConfig",
    "CanonLMForCausalLM",
    "CanonLayer",
    "__version__",
    "canonize",
    "check",
    "decanonize",
    "describe",
    "load_published",
    "load_runs",
    "models",
    "play",
    "runs",
    "tasks",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_named(_MODULE_OF[name]), name)
    if name == "check":
        return import_named("canonlm.canonize.check")
    if name in _SUBPACKAGES:
        return import_named(f"canonlm.{name}")
    raise AttributeError(f"module 'canonlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBPACKAGES, "check"})


install()
