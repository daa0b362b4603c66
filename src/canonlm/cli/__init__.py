"""The `canonlm` command: parse, call, print. Every user error is one line on standard error, with exit code 2."""

import io
import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

import canonlm
from canonlm.cli import later
from canonlm.cli.lazy import Commands, Interrupted
from canonlm.cli.status import PlainWarnings, drop
from canonlm.core.extras import missing
from canonlm.core.ranks import prints

COMMANDS = {
    "play": "play.play",
    "profile": "profile.profile",
    "replicate": "replicate.replicate",
    "claims": "claims.claims",
    "report": "report.report",
    "results": "results.results",
    "tasks": "lists.tasks",
    "archs": "lists.archs",
    "new": "new.new",
    "plan": "plan.plan",
    "train": "train.train",
    "launch": "launch.launch",
    "work": "work.work",
    "export": "export.export",
    "eval": "evaluate.evaluate",
    "generate": "generate.generate",
    "lm-eval": "lm_eval.lm_eval",
    "probe": "probe.probe",
    "convert": "convert.convert",
    "check": "check.check",
    "doctor": "doctor.doctor",
    "canonize": "canonize.canonize",
    "data prepare": "prepare.prepare",
    "data check": "prepare.check",
    "data multihop": "multihop.multihop",
    "data show": "data.show",
    "data dump": "data.dump",
    "recipes list": "recipes.list_",
    "recipes show": "recipes.show",
    "recipes diff": "recipes.diff",
}
"""All commands, each with its module in this package and its function."""

app = typer.Typer(
    name="canonlm",
    help="Compare language-model architectures on small, exact synthetic tasks that quickly tell them apart "
    "(start with `canonlm play depo`), and pretrain them on text, on one CPU or a cluster (`canonlm train debug`).",
    cls=Commands.of(COMMANDS),
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:  # from the packages' metadata: nothing is imported
        libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        print(f"canonlm {canonlm.__version__} ({libraries}, Python {platform.python_version()})")
        raise typer.Exit


VERSION = typer.Option(
    "--version", help="Show the versions of canonlm, torch and transformers.", callback=_print_version, is_eager=True
)


@app.callback()
def options(version: Annotated[bool, VERSION] = False) -> None:
    """Options of `canonlm` itself."""


for _name, _help in (
    ("data", "Look at samples of a task, write them to a file; turn text into tokens."),
    ("recipes", "The recipes that come with the package."),
):
    app.add_typer(typer.Typer(help=_help, cls=Commands.of(COMMANDS, _name), no_args_is_help=True), name=_name)


SHOULD_BE = "Input should be "

MAX_MESSAGE = 5_000
"""Max characters of an error message."""

# typer may bundle its own click, so its exceptions are reached through the one that typer exports.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(args: Sequence[str] | None = None) -> int:
    if logging.lastResort is not None:  # prints the warnings of a program that has not set up logging
        logging.lastResort.setFormatter(PlainWarnings())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    try:
        code = app(args=args, standalone_mode=False) or 0
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
        return code
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return 2
        return _say(_usage(error), 2)
    except ValueError as error:
        return _say(str(error), 2)
    except BrokenPipeError:  # nobody reads the output, as in `canonlm results | head`
        drop(1)
        return 1  # as click does while a command runs
    except OSError as error:  # a folder without permission, a disk that goes away
        return _say(later.errors.about(error), 2)
    except MemoryError:
        return _say("this machine does not have enough memory for this", 2)
    except ModuleNotFoundError as error:
        if (line := missing(error)) is None:
            raise
        return _say(line, 2)
    except FloatingPointError as error:
        return _say(str(error), 1)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as stop:
        return _say("; ".join(filter(None, ("interrupted", str(stop)))), 130)


def _usage(error: Any) -> str:
    """What is wrong with the options and arguments, in the form of our other errors."""
    kind, param = type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        error.possibilities = [option for option in error.possibilities or [] if option != "--help"]
    text = error.format_message()
    name = param and (param.opts[0] if param.opts[0].startswith("-") else param.metavar or param.name.upper())
    if kind == "MissingParameter" and name:
        context, words = error.ctx, ["--help"]
        while context.parent is not None:
            context, words = context.parent, [context.info_name, *words]
        return f"{name} is missing: `canonlm {' '.join(words)}` explains it"
    if kind == "BadParameter" and name and error.message.startswith(SHOULD_BE):
        what = error.message.removeprefix(SHOULD_BE).partition(", unable to")[0].replace(" valid ", " ")
        what = what.replace("a integer", "an integer").replace("greater than or equal to", "a number >=")
        return str(later.errors.expected(name, what, error.__cause__.errors()[0]["input"]))
    if kind == "NoSuchOption" and any(each.metavar == "KEY=VALUE" for each in error.ctx.command.params):
        return f"{text}. Settings are written without dashes: KEY=VALUE"
    return text


def _say(message: str, code: int) -> int:
    if prints():
        print(f"canonlm: {later.errors.brief(' '.join(message.splitlines()), MAX_MESSAGE)}", file=sys.stderr)
    return code
