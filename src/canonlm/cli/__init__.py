"""The `canonlm` command: parse, call, print. Every user error is one line on standard error, with exit code 2."""

import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

import canonlm
from canonlm.cli import (
    canonize,
    check,
    claims,
    convert,
    data,
    doctor,
    evaluate,
    export,
    generate,
    launch,
    lists,
    lm_eval,
    new,
    plan,
    play,
    probe,
    profile,
    recipes,
    replicate,
    report,
    results,
    train,
    work,
)
from canonlm.cli.status import PlainWarnings, drop

app = typer.Typer(
    name="canonlm",
    help="Compare language-model architectures on small, exact synthetic tasks that quickly tell them apart "
    "(start with `canonlm play depo`), and pretrain them on text, on one CPU or a cluster (`canonlm train debug`).",
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


app.command()(play.play)
app.command()(profile.profile)
app.command()(replicate.replicate)
app.command()(claims.claims)
app.command()(report.report)
app.command()(results.results)
app.command()(lists.tasks)
app.command()(lists.archs)
app.command()(new.new)
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")
app.command()(plan.plan)
app.command()(train.train)
app.command()(launch.launch)
app.command()(work.work)
app.command()(export.export)
app.command("eval")(evaluate.evaluate)
app.command()(generate.generate)
app.command(
    "lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]},
)(lm_eval.lm_eval)
app.command()(probe.probe)
app.command()(convert.convert)
app.command()(check.check)
app.command()(doctor.doctor)
app.command()(canonize.canonize)


SHOULD_BE = "Input should be "

MAX_MESSAGE = 5_000
"""Max characters of an error message."""

# typer may bundle its own click, so its exceptions are reached through the one that typer exports.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(args: Sequence[str] | None = None) -> int:
    if logging.lastResort is not None:  # prints the warnings of a program that has not set up logging
        logging.lastResort.setFormatter(PlainWarnings())
    try:
        code = app(args=args, standalone_mode=False) or 0
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
        name = error.filename or "a file could not be read or written"
        return _say(f"{name}: {error.strerror}" if error.strerror else str(error), 2)
    except MemoryError:
        return _say("this machine does not have enough memory for this", 2)
    except FloatingPointError as error:
        return _say(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", 130)


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
        from canonlm.core.errors import expected

        what = error.message.removeprefix(SHOULD_BE).partition(", unable to")[0].replace(" valid ", " ")
        what = what.replace("a integer", "an integer").replace("greater than or equal to", "a number >=")
        return str(expected(name, what, error.__cause__.errors()[0]["input"]))
    if kind == "NoSuchOption" and any(each.metavar == "KEY=VALUE" for each in error.ctx.command.params):
        return f"{text}. Settings are written without dashes: KEY=VALUE"
    return text


def _say(message: str, code: int) -> int:
    from canonlm.core.errors import brief  # imports pydantic, which `--help` does not need
    from canonlm.core.ranks import prints

    if prints():
        print(f"canonlm: {brief(' '.join(message.splitlines()), MAX_MESSAGE)}", file=sys.stderr)
    return code
