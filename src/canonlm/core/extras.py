"""Packages that `pip install canonlm` does not bring: which extra has them, and the line that says so."""

import importlib.util
from types import ModuleType

EXTRAS = {
    "play": ("plotly", "polars"),
    "data": ("pyarrow", "datatrove", "datasets", "tiktoken", "sentencepiece", "protobuf"),
    "cluster": ("submitit",),
    "eval": ("lm-eval", "lm_eval"),
    "figures": ("matplotlib",),
    "track": ("tensorboard", "wandb"),
    "float8": ("torchao",),
}
"""Extras of pyproject.toml with the modules, or packages, that are checked."""


def needed(module: str, what: str, package: str | None = None) -> None:
    """ValueError, with the command to install it, if a module is missing."""
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None or importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} needs the package {package or module}: {_command(package or module)}")


def import_named(module: str) -> ModuleType:
    """Import a module of ours. If it fails because one of these packages is missing, the error names the command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (line := missing(error)) is None:
            raise
        raise ModuleNotFoundError(line, name=error.name) from None


def missing(error: ModuleNotFoundError) -> str | None:
    """The line for a failed import of one of these packages; None for any other module."""
    name = (error.name or "").partition(".")[0]
    return f"this needs the package {name}: {_command(name)}" if any(name in each for each in EXTRAS.values()) else None


def _command(package: str) -> str:
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    return f"""pip install {f"'canonlm[{extra}]'" if extra else package}"""
