"""Overrides with several values: `train.batch_size=32,64`."""

from collections.abc import Sequence
from itertools import product

from canonlm.core.errors import expected

_ONE_VALUE = ("data", "on_checkpoint")
"""Settings that are a path or a command, whose commas separate nothing."""


def sweep(overrides: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """(`key=value` pairs, each with one value, for every combination; the keys that have several values).

    Commas separate values: `train.batch_size=32,64`. Those in brackets, braces or quotes belong to a value:
    `task.weights=[1,2]` is one list."""
    choices = {pair: _values(pair) for pair in overrides}
    swept = [pair.partition("=")[0] for pair, values in choices.items() if len(values) > 1]
    return [list(point) for point in product(*choices.values())], swept


def _values(pair: str) -> list[str]:
    key, equals, text = pair.partition("=")
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1]:
            quote = letter
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        if letter == "," and not (quote or depth) and key not in _ONE_VALUE:
            parts.append("")
        else:
            parts[-1] += letter
    if len(parts) > 1 and not all(parts):
        raise expected(key, "values separated by commas, such as 32,64", text)
    return [f"{key}{equals}{part}" for part in dict.fromkeys(parts)]
