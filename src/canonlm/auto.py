"""After `import canonlm`, `AutoModelForCausalLM.from_pretrained` opens our models; `import canonlm` stays fast.

transformers looks a model type up in a table of names and imports `transformers.models.TYPE` when it needs it. We add
our name to the table, now or when it is made, and `canonlm` itself, whose names load on first use, as that module.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"


def install() -> None:
    if TABLE in sys.modules:
        _announce(sys.modules[TABLE])
    else:
        sys.meta_path.insert(0, _WhenTableIsMade())


def _announce(table: ModuleType) -> None:
    for model_type, config in {"canonlm": "CanonLMConfig", "canon_host": "CanonHostConfig"}.items():
        table.CONFIG_MAPPING_NAMES[model_type] = config
        sys.modules[f"transformers.models.{model_type}"] = sys.modules["canonlm"]


class _WhenTableIsMade(MetaPathFinder):
    """A finder that lets the usual finder load the table's module, then adds our names to the table."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != TABLE or (spec := PathFinder.find_spec(name, path, target)) is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_announce(module: ModuleType) -> None:
            load(module)
            _announce(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = load_and_announce  # type: ignore[method-assign]
        return spec
