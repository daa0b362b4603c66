"""How this package says no: one line that names the key, the value and what would do (`ValueError` in Python,
exit code 2 on the command line)."""

import difflib
from collections.abc import Iterable
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo


def unknown(kind: str, name: object, choices: Iterable[str], plural: str | None = None) -> ValueError:
    """`unknown task "depoo". Did you mean "depo"? Tasks: copying, depo, mano.`"""
    names = sorted(choices)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    listing = plural or kind + "s"
    return ValueError(f'unknown {kind} "{name}".{guess} {listing[0].upper() + listing[1:]}: {", ".join(names)}.')


def expected(key: str, what: str, value: object) -> ValueError:
    """`train.optim.lr: expected a number > 0, got "3e-3x"`"""
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    return ValueError(f"{key}: expected {what}, got {shown}")


class InvalidSetting(ValueError):
    """A setting that a configuration refuses; `key` is its dotted path."""

    def __init__(self, key: str, message: object) -> None:
        super().__init__(str(message))
        self.key = key


def refused(error: ValidationError, model: type[BaseModel], prefix: str = "") -> InvalidSetting:
    """The first of pydantic's complaints about `model`, in one line. `prefix` comes before the key: "task."."""
    first = error.errors()[0]
    path = [part for part in first["loc"] if isinstance(part, str)]
    key = prefix + ".".join(path)
    if first["type"] == "value_error":  # raised by a validator of ours: already in house form
        return InvalidSetting(key, first["ctx"]["error"])
    owner = model
    for part in path[:-1]:
        inner = owner.model_fields[part].annotation
        owner = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else owner
    if first["type"] == "extra_forbidden":
        names = [prefix + ".".join([*path[:-1], name]) for name in owner.model_fields]
        return InvalidSetting(key, unknown("setting", key, names))
    field = owner.model_fields.get(path[-1]) if path else None
    if first["type"] == "missing":
        return InvalidSetting(key, f"{key}: missing; expected {_wanted(field, first)}")
    return InvalidSetting(key, expected(key, _wanted(field, first), first["input"]))


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _wanted(field: FieldInfo | None, first: Any) -> str:
    if first["type"] == "literal_error":
        return str(first["ctx"]["expected"])
    if field is None:
        return str(first["msg"])
    annotation = field.annotation
    kind = next((text for type_, text in _KINDS.items() if annotation in (type_, type_ | None)), None)
    if kind is None:
        return "a group of settings" if first["type"] in ("missing", "model_type") else str(first["msg"])
    signs = ((Ge, ">=", "ge"), (Gt, ">", "gt"), (Le, "<=", "le"), (Lt, "<", "lt"))
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in field.metadata
        for type_, sign, attribute in signs
        if isinstance(bound, type_)
    ]
    return " ".join([kind, " and ".join(bounds)]).strip()
