"""Our sources as flat modules beside a saved model's weights, for machines without canonlm.

transformers loads a folder's code by copying a file and all files that it imports by `from .x import y`; it does not
follow sub-packages. So the statements that a model needs, comments included, go into one file per module, side by side,
and only the imports between them are rewritten.
"""

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path

INSTALLED = {"torch", "transformers", "packaging", "safetensors", "triton", *sys.stdlib_module_names}
"""Packages that the code may import: torch, transformers and their dependencies (triton on a GPU)."""

LINE_LENGTH = 120


REPLACEMENTS = dict.fromkeys(
    (
        "canonlm.ops.kernels.api",
        "canonlm.ops.kernels.dispatch",
        "canonlm.ops.causal_conv_cpu",
        "canonlm.ops.numba_decays",
    ),
    "canonlm.ops.kernels.stub",
)
"""Modules that another module replaces in a folder."""


def source_of(home: str) -> str:
    return inspect.getsource(importlib.import_module(REPLACEMENTS.get(home, home)))


def flat_modules(entries: Iterable[str], source: Callable[[str], str] = source_of) -> dict[str, str]:
    """The source code that these classes need, by flat module name: "modeling", "config", "attention", …

    entries: paths, such as `canonlm.models.config.CanonLMConfig`. source: returns a module's source for its path.
    """
    modules: dict[str, Module] = {}
    pending = list(entries)
    while pending:
        home, _, name = pending.pop().rpartition(".")
        if home not in modules:
            modules[home] = Module(home, source(home))
        pending += modules[home].keep(name)
    code = b"\n".join(line for home in sorted(modules) for line in modules[home].lines)
    copy = hashlib.sha256(code).hexdigest()[:8]
    texts = {flat(home): module.text(copy) for home, module in modules.items()}
    if len(texts) < len(modules):
        raise RuntimeError(f"two of these have the same flat name: {', '.join(sorted(modules))}")
    return texts


def write_modules(texts: Mapping[str, str], folder: str | PathLike) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
    license = Path(__file__).parents[1] / "LICENSE"
    Path(folder, "LICENSE").write_text(license.read_text(encoding="utf-8"), encoding="utf-8")


def flat(path: str) -> str:
    """`canonlm.models.config` -> `config`, `canonlm.models.config.CanonLMConfig` -> `config.CanonLMConfig`"""
    parts = path.split(".")
    return ".".join(parts[-2:] if parts[-1][0].isupper() else parts[-1:])


class Module:
    """One of our modules, reduced to the top-level statements that are needed, and those that they use."""

    def __init__(self, home: str, source: str) -> None:
        self.home, self.lines = home, source.encode().splitlines()  # the parser counts columns in bytes
        self.tree = ast.parse(source)
        self.binders: dict[str, list[ast.stmt]] = defaultdict(list)
        for node in self.tree.body:
            if (names := bound_names(node)) is None:
                raise self._refused(node)
            for name in names:
                self.binders[name].append(node)
        self.used: set[str] = set()
        imports = [node for node in _imports_of(self.tree) if _root(node) == "canonlm"]
        self.ours = {_name(alias): f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        # No `from . import fla` in a folder: transformers would not copy fla.py. So `fla.run(x)` becomes `run(x)`.
        # members["fla"]: its names that are used.
        self.members: dict[str, set[str]] = {name: set() for name, path in self.ours.items() if _is_module(path)}
        self.edits: set[tuple[int, int, int, str]] = set()  # line, columns, replacement

    def keep(self, name: str) -> Iterator[str]:
        """Keep the statements that bind `name`. Yields the paths of the names that they need from our other modules."""
        if name not in self.binders:
            raise RuntimeError(f"{self.home} does not define {name}")
        if name in self.used:
            return
        self.used.add(name)
        if name in self.ours:
            if _is_for_types(self.binders[name][0]):
                yield from self.keep("TYPE_CHECKING")
            yield self.ours[name]
            return
        for node in (node for statement in self.binders[name] for node in ast.walk(statement)):
            match node:
                case ast.Import() | ast.ImportFrom() if _root(node) not in INSTALLED:
                    raise self._refused(node)
                case ast.Attribute(value=ast.Name() as module) if module.id in self.members:
                    yield self._member(module, node.attr)
                case (
                    ast.Name(id=used)
                    | ast.arg(annotation=ast.Constant(value=str(used)))
                    | ast.AnnAssign(value=ast.Constant(value=str(used)))
                ) if used in self.binders:
                    yield from self.keep(used)
                case ast.Constant(value=str(text)) if text.startswith("canonlm::"):
                    # PyTorch finds operators by name: the last one defined would serve all copies, of any version.
                    self._edit(node, '"canonlm::', '"canonlm_{copy}::')

    def _refused(self, node: ast.stmt) -> RuntimeError:
        return RuntimeError(f"{self.home}, line {node.lineno}: not supported in a folder: {ast.unparse(node)}")

    def _member(self, module: ast.Name, name: str) -> str:
        if name in self.binders or any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(self.tree)):
            raise RuntimeError(f"{self.home}, line {module.lineno}: {name} is ambiguous without {module.id}")
        self.used.add(module.id)
        self.members[module.id].add(name)
        self._edit(module, f"{module.id}.", "")
        return f"{self.ours[module.id]}.{name}"

    def _edit(self, node: ast.expr, old: str, new: str) -> None:
        self.edits.add((node.lineno - 1, node.col_offset, node.col_offset + len(old.encode()), new))

    def text(self, copy: str) -> str:
        """The source of the kept statements, with the comments above and the docstring below each. `copy`
        distinguishes this code's operators from another's."""
        lines = list(self.lines)
        for row, start, end, new in sorted(self.edits, reverse=True):
            lines[row] = lines[row][:start] + new.format(copy=copy).encode() + lines[row][end:]
        texts = [f"# Generated by canonlm {_version()} from {REPLACEMENTS.get(self.home, self.home)}".encode()]
        last, keeping = 0, True
        for node in self.tree.body:
            own = lines[node.lineno - 1 : node.end_lineno]
            is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            keeping = not self.used.isdisjoint(bound_names(node) or ()) or (keeping and is_string)
            if keeping:
                texts += lines[last : node.lineno - 1]
                texts += self._imports(node) if isinstance(node, ast.ImportFrom) else own
                if isinstance(node, ast.If):
                    texts[-len(own) :] = [
                        own[0],
                        *(b"    " + line for i in _imports_of(node) for line in self._imports(i)),
                    ]
            last = node.lineno - 1 + len(own)
        return b"\n".join([*texts, b""]).decode()

    def _imports(self, node: ast.ImportFrom) -> Iterator[bytes]:
        """The lines of an import, of the names that are used."""
        names: dict[str, list[str]] = {}
        for alias in node.names:
            name = _name(alias)
            if name in self.members:
                names[f".{flat(self.ours[name])}"] = sorted(self.members[name])
            elif name in self.used:
                module = f".{flat(self.ours[name].rpartition('.')[0])}" if name in self.ours else str(node.module)
                names.setdefault(module, []).append(ast.unparse(alias))
        for module, parts in names.items():
            line = f"from {module} import {', '.join(parts)}"
            if len(line) > LINE_LENGTH:
                line = f"from {module} import (\n    " + ",\n    ".join(parts) + ",\n)"
            yield line.encode()


def _root(node: ast.Import | ast.ImportFrom) -> str:
    """The package that an import is from."""
    return (node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]


def _name(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def bound_names(node: ast.stmt) -> list[str] | None:
    """The names that a top-level statement binds, or whose value it changes; None: unknown without running it."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return [_name(alias) for alias in node.names]
        case ast.FunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return [name]
        case ast.Expr(value=ast.Constant()):
            return []
        case ast.If() if _is_for_types(node):
            return [_name(alias) for inner in _imports_of(node) for alias in inner.names]
    return None


def _is_for_types(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` with imports in it."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports_of(node: ast.Module | ast.If) -> list[ast.ImportFrom]:
    inside = [inner for part in node.body for inner in (part.body if isinstance(part, ast.If) else [part])]
    return [part for part in inside if isinstance(part, ast.ImportFrom)]


def _is_module(path: str) -> bool:
    package = importlib.import_module(path.rpartition(".")[0])
    return hasattr(package, "__path__") and importlib.util.find_spec(path) is not None


def _version() -> str:
    return str(sys.modules["canonlm"].__version__)
