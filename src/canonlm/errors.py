"""How this package says no: one line that names the key, the value and what would do (`ValueError` in Python,
exit code 2 on the command line)."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: object, choices: Iterable[str], plural: str | None = None) -> ValueError:
    """`unknown task "depoo". Did you mean "depo"? Tasks: copying, depo, mano.`"""
    names = sorted(choices)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    listing = (plural or kind + "s").capitalize()
    return ValueError(f'unknown {kind} "{name}".{guess} {listing}: {", ".join(names)}.')


def expected(key: str, what: str, value: object) -> ValueError:
    """`train.optim.lr: expected a number > 0, got "3e-3x"`"""
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    return ValueError(f"{key}: expected {what}, got {shown}")
