"""After `import canonlm`, `AutoModelForCausalLM.from_pretrained` opens our models; `import canonlm` stays fast.

transformers looks up a model type in a table of names and imports `transformers.models.TYPE` when needed. We add our
types to the table, now or when it is created, and register `canonlm`, whose names load on first use, as that module.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"


def install() -> None:
    if TABLE in sys.modules:
        _register(sys.modules[TABLE])
    else:
        sys.meta_path.insert(0, _RegisterOnImport())


def _register(table: ModuleType) -> None:
    for model_type, config in {"canonlm": "CanonLMConfig", "canon_host": "CanonHostConfig"}.items():
        table.CONFIG_MAPPING_NAMES[model_type] = config
        sys.modules[f"transformers.models.{model_type}"] = sys.modules["canonlm"]


class _RegisterOnImport(MetaPathFinder):
    """A finder that lets the usual finder load the table's module, then adds our names to the table."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != TABLE or (spec := PathFinder.find_spec(name, path, target)) is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
