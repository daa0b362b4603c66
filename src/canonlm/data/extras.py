"""Packages of the extra `data`, checked where they are needed."""

import importlib.util


def needed(module: str, what: str, package: str | None = None) -> None:
    """ValueError, with the command to install it, if a module is missing."""
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None or importlib.util.find_spec(module) is None:
        raise ValueError(f'{what} needs the package {package or module}: pip install "canonlm[data]"')
