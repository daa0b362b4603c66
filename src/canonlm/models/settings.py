"""Checks of settings: types, ranges and choices, each with a one-line error that names the setting."""

import math
import operator
from inspect import formatannotation
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin

from canonlm.core.errors import expected

if TYPE_CHECKING:
    from canonlm.models.config import CanonLMConfig

Config: TypeAlias = "CanonLMConfig"
"""For the modules that `canonlm.models.config` imports."""

MAX_SIZE = 2**31 - 1
"""Max of any integer field: a larger value is a mistake."""


def check_type(key: str, value: object, annotation: Any, default: object = ...) -> None:
    """ValueError if a value does not have its field's type. None is valid if it is the default."""
    if get_origin(annotation) is ClassVar or (value is None and default is None):
        return
    if not _fits(value, annotation):
        kinds = [_TYPES[kind] for kind in _options(annotation) if kind in _TYPES]
        raise expected(key, " or ".join(kinds) if kinds else f"a value of type {formatannotation(annotation)}", value)
    if isinstance(value, int) and abs(value) > MAX_SIZE and "seed" not in key:
        raise expected(key, f"at most {MAX_SIZE:,}", value)


def as_typed(value: object, annotation: Any, default: object) -> Any:
    """The value; in place of a list, which tuples are in `config.json`, the tuple that the field takes."""
    kinds = [get_origin(option) or option for option in _options(annotation)]
    takes_tuple = isinstance(default, tuple) or (tuple in kinds and list not in kinds)
    return tuple(value) if takes_tuple and isinstance(value, list) else value


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)


_TYPES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list[int]: "a list of integers",
    list[str]: "a list of strings, one per layer or repeating",
    list[bool]: "a list of true and false, one per layer or repeating",
    dict[str, dict[str, Any]]: "{mixer: {option: value}}",
}


def _fits(value: object, annotation: Any) -> bool:
    origin, parts = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (UnionType, Union):
        return any(_fits(value, part) for part in parts)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (list, tuple):  # in config.json both are lists
        if not isinstance(value, list | tuple) or not parts:
            return isinstance(value, list | tuple)
        kinds = parts if origin is tuple and parts[-1] is not ... else parts[:1] * len(value)
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is dict:
        kinds = parts or (Any, Any)
        return isinstance(value, dict) and all(all(map(_fits, pair, kinds)) for pair in value.items())
    if origin is Literal:
        return value in parts
    return origin is Any or not isinstance(origin, type) or isinstance(value, origin)


def check_positive(settings: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise expected(key, "an integer >= 1", value)


def check_sign(settings: Any, above_zero: tuple[str, ...], not_negative: tuple[str, ...]) -> None:
    """ValueError for a number below, or for some at, zero. None is left to others."""
    for keys, least, compare in ((above_zero, "> 0", operator.gt), (not_negative, ">= 0", operator.ge)):
        for key in keys:
            value = getattr(settings, key)
            if value is not None and not compare(value, 0):
                raise expected(key, f"a number {least}", value)


def check_divides(settings: Any, key: str, total_key: str) -> None:
    check_positive(settings, key)
    if (total := getattr(settings, total_key)) % getattr(settings, key):
        raise expected(key, f"a divisor of {total_key} = {total}", getattr(settings, key))


def check_choice(settings: Any, key: str, choices: tuple[str, ...]) -> None:
    if getattr(settings, key) not in choices:
        raise expected(key, " or ".join(f'"{choice}"' for choice in choices), getattr(settings, key))
