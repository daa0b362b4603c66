"""After `import canonlm`, `AutoModelForCausalLM.from_pretrained` opens our models, and PEFT knows which of their
modules to adapt; `import canonlm` stays fast.

Both look up a model type in tables of names. We add our types to these tables, now or when they are imported.
transformers then imports `transformers.models.TYPE`: we register `canonlm`, whose names load on first use, as that
module.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

IN_MAMBA2 = {"q_proj": "C_proj", "k_proj": "B_proj", "v_proj": "x_proj", "o_proj": "out_proj"}
"""The projections of Mamba2 that are queries, keys, values and output, were it linear attention."""


def install() -> None:
    for table, register in TABLES.items():
        if table in sys.modules:
            register(sys.modules[table])
        else:
            sys.meta_path.insert(0, _RegisterOnImport(table, register))


def _register_types(table: ModuleType) -> None:
    for model_type, config in {"canonlm": "CanonLMConfig", "canon_host": "CanonHostConfig"}.items():
        table.CONFIG_MAPPING_NAMES[model_type] = config
        sys.modules[f"transformers.models.{model_type}"] = sys.modules["canonlm"]


def _register_targets(tables: ModuleType) -> None:
    """A canonized model has its host's type. Our decoder has Llama's names, so its methods have Llama's modules."""
    for name, table in vars(tables).items():
        if name.endswith("_MODULES_MAPPING") and isinstance(table, dict) and "llama" in table:
            modules = list(table["llama"])
            table["canonlm"] = [*modules, *(IN_MAMBA2[module] for module in modules if module in IN_MAMBA2)]


TABLES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _register_types,
    "peft.utils.constants": _register_targets,
}


class _RegisterOnImport(MetaPathFinder):
    """A finder that lets the usual finder load a table's module, then adds our names to the table."""

    def __init__(self, table: str, register: Callable[[ModuleType], None]) -> None:
        self.table, self.register = table, register

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != self.table or (spec := PathFinder.find_spec(name, path, target)) is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            self.register(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
