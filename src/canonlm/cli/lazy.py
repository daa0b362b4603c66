"""Commands whose modules are imported when they are called."""

import ast
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from canonlm.cli import later
from canonlm.core.user_folders import expanded

_AFTER_EQUALS = re.compile(r"^([\w.-]+=)~(?=/|$)")
"""Where bash leaves a home folder as it is: --out=~/x, data=~/x."""


class _Checked(TyperCommand):
    """A command that refuses a path without a name, as of `--out=$UNSET`: for Python it is the current folder. And an
    option of a list (its help says "separated by commas") that is given twice: only the last would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, order = self.make_parser(ctx).parse_args(args=[*args])
        rest = super().parse_args(ctx, args)
        for param in order:
            name = str(param.opts[0] if param.opts[0].startswith("-") else param.metavar)
            if given[param.name] == "" and isinstance(ctx.params.get(param.name), Path):
                raise later.errors.expected(name, "a path (. is the current folder)", "")
            if order.count(param) > 1 and "separated by commas" in (getattr(param, "help", None) or ""):
                raise later.errors.expected(name, "one list, separated by commas", f"{order.count(param)} lists")
        return rest


class _Command(TyperCommand):
    """A command whose module is imported when the command is called."""

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name)
        self.module, _, self.function = place.partition(".")

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **options: Any) -> Any:
        args = [_AFTER_EQUALS.sub(lambda match: f"{match[1]}{expanded('~')}", each) for each in args]
        module = import_module(f"canonlm.cli.{self.module}")
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        alone.command(self.name, cls=_Checked, context_settings=settings)(getattr(module, self.function))
        return typer.main.get_command(alone).make_context(info_name, args, *rest, **options)

    def read_help(self) -> None:
        """Take the help text for a list of commands from the module's file."""
        tree = ast.parse(Path(__file__).with_name(f"{self.module}.py").read_text(encoding="utf-8"))
        functions = (each for each in tree.body if isinstance(each, ast.FunctionDef))
        self.help = next(ast.get_docstring(each) for each in functions if each.name == self.function)


class Interrupted(Exception):
    """Ctrl-C while a command ran, and what the command says about it. typer would end it without a word."""


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

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop)) from None
