"""What the extra `data` brings, asked for where it is needed."""

import importlib.util


def needed(module: str, what: str, package: str | None = None) -> None:
    """ValueError, with the command that helps, where a module is not installed."""
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None or importlib.util.find_spec(module) is None:
        raise ValueError(f'{what} needs the package {package or module}: pip install "canonlm[data]"')
