"""Imports that wait until they are needed: torch takes seconds, and help, completion and most mistakes need none."""

import ast
import builtins
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _Later(ModuleType):
    """A module that is imported when one of its names is used. It is not in `sys.modules`, so that nobody who walks
    over these (`inspect` does, while torch is imported) imports it too early."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


def _later(name: str, _globals: Any, _locals: Any, names: Any, _level: Any) -> Any:
    """`builtins.__import__` for `import module` and `from package import module`."""
    return SimpleNamespace(**{each: _Later(f"{name}.{each}") for each in names}) if names else _Later(name)


@contextmanager
def on_use() -> Iterator[None]:
    """Modules that are imported in this block are loaded when one of their names is first used, as with Python 3.15's
    `lazy import`. Only modules: `from canonlm.train import loop`, not `from canonlm.train.loop import train`."""
    at_once = builtins.__import__
    builtins.__import__ = _later  # type: ignore[assignment]  # its result has the names, and is not a module
    try:
        yield
    finally:
        builtins.__import__ = at_once


class _Command(TyperCommand):
    """A command whose module is imported when the command is called."""

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name)
        self.module, _, self.function = place.partition(".")

    def make_context(self, *args: Any, **options: Any) -> Any:
        module = import_module(f"canonlm.cli.{self.module}")
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        alone.command(self.name, context_settings=settings)(getattr(module, self.function))
        return typer.main.get_command(alone).make_context(*args, **options)

    def read_help(self) -> None:
        """Take the help text for a list of commands from the module's file."""
        tree = ast.parse(Path(__file__).with_name(f"{self.module}.py").read_text(encoding="utf-8"))
        functions = (each for each in tree.body if isinstance(each, ast.FunctionDef))
        self.help = next(ast.get_docstring(each) for each in functions if each.name == self.function)


class Commands(TyperGroup):
    """A group of commands whose modules are imported when they are called."""

    places: Mapping[str, str]

    @classmethod
    def of(cls, places: Mapping[str, str], group: str = "") -> "type[Commands]":
        """The commands of a group from those of all groups: `{"play": "play.play", "data show": "data.show"}`."""
        names = {tuple(name.split()): place for name, place in places.items()}
        chosen = {name: place for (*above, name), place in names.items() if above == group.split()}
        return type(cls.__name__, (cls,), {"places": chosen})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {**{name: _Command(name, place) for name, place in self.places.items()}, **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if isinstance(command, _Command):
            command.read_help()
        return command
