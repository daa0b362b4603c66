"""Error messages: one line with the key, the value and what is expected (`ValueError` in Python, exit code 2 on the
command line)."""

import difflib
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

LISTED = 80
"""Max number of choices in an error."""

HUGE = 2**20
"""An upper bound this large is only mentioned if a value exceeds it."""

SHOWN = 120
"""Max characters of a value in an error."""

LOOKED_AT = 1_000
"""Max number of names in a folder that are compared with the name of a file that is not there."""


def shown(value: object) -> str:
    """A value as shown in an error: one printable line, truncated if long. Strings are in double quotes."""
    if isinstance(value, str):
        return f'"{brief(value)}"'
    if isinstance(value, int) and value.bit_length() > 1_000:  # Python refuses to write much longer ones
        return f"an integer of {value.bit_length():,} bits"
    try:
        return brief(_REPR.repr(value) if isinstance(value, list | dict | set | tuple) else repr(value))
    except Exception:  # raised by code that is not ours
        return f"a {type(value).__name__}"


def brief(text: str, letters: int = SHOWN) -> str:
    """At most `letters` characters of the text, with control characters escaped, as a terminal would obey them."""
    cut = text if len(text) <= letters else f"{text[: letters - 1]}…"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cut)


def plain(text: str) -> str:
    """Text from a file, or a file's name, for a terminal: without control characters, which it would obey, Unicode's
    line separators, marks that reverse the order of letters, and lone surrogates."""
    return _NOT_PLAIN.sub("\N{REPLACEMENT CHARACTER}", text)


_NOT_PLAIN = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = SHOWN


def unknown(
    kind: str, name: object, choices: Iterable[str], plural: str | None = None, meant: Sequence[str] = ()
) -> ValueError:
    """`unknown task "depoo". Did you mean "depo"? Tasks: copying, depo, mano.` `meant`: better guesses than the
    closest choice."""
    names, name = list(choices), brief(str(name))
    guesses = list(meant) or closest(name, names)
    guess = f" Did you mean {' or '.join(map(shown, guesses))}?" if guesses else ""
    names.sort()
    listing = plural or kind + "s"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    listed = ", ".join(names[: LISTED if more else None]) + more or "none"
    return ValueError(f'unknown {kind} "{name}".{guess} {listing[0].upper() + listing[1:]}: {listed}.')


def closest(name: str, choices: Sequence[str]) -> list[str]:
    """At most one choice: the shortest that begins with `name`, or else the most similar one."""
    longer = [choice for choice in choices if name and choice.lower().startswith(name.lower())]
    return sorted(longer, key=len)[:1] or difflib.get_close_matches(name, choices, n=1, cutoff=0.5)


def why(error: OSError | ValueError, path: Path) -> str:
    """Why a file cannot be read, in the system's words. `No such file or directory; did you mean "depo.yaml"?`: the
    most similar name beside it, of the same type or with the same stem."""
    reason = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, FileNotFoundError):
        return reason
    with suppress(OSError):
        entries = (Path(entry.name) for entry in islice(os.scandir(path.parent), LOOKED_AT))
        beside = [each for each in entries if path.suffix == each.suffix or path.stem == each.stem]
        stems = closest(path.stem, sorted({each.stem for each in beside}))  # without types, which make all names alike
        names = sorted(each.name for each in beside if each.stem in stems)
        reason += "".join(f"; did you mean {shown(name)}?" for name in closest(path.name, names))
    return reason


class InvalidSetting(ValueError):
    """A wrong setting of a configuration; `key` is its dotted path."""

    def __init__(self, key: str, message: object) -> None:
        super().__init__(str(message))
        self.key = key

    def __reduce__(self) -> Any:  # so that it can be sent to other processes
        return type(self), (self.key, str(self))


class Unsupported(InvalidSetting):
    """A use that a model refuses on purpose, such as removing tokens from a recurrent state."""


def unsupported(key: str, what: str, value: object) -> Unsupported:
    """As `expected`."""
    return Unsupported(key, expected(key, what, value))


def expected(key: str, what: str, value: object) -> InvalidSetting:
    """`train.optim.lr: expected a number > 0, got "3e-3x"`"""
    return InvalidSetting(key, f"{brief(key)}: expected {what}, got {shown(value)}")


def about(error: OSError, place: str | Path = "a file could not be read or written") -> str:
    """`FILE: Permission denied`. `place`: for an error that names no file, as of a full disk."""
    if error.filename is None and isinstance(error, FileNotFoundError):
        place = "the current folder"  # it has been removed
    return f"{error.filename or place}: {error.strerror}" if error.strerror else str(error)


@contextmanager
def writing(key: str, place: str | Path, kind: str = "folder") -> Iterator[None]:
    """An OSError within this context is raised as: `--out: expected a folder that can be written (…), got "…"`"""
    try:
        yield
    except OSError as error:
        what = f"a {kind} that can be written ({error.strerror or error})"
        raise expected(key, what, str(place)) from None


class Panic(ValueError):
    """A tokenizer failed inside its library."""


@contextmanager
def panics_raised(place: object) -> Iterator[None]:
    """A panic of the tokenizers library, whose class is not an Exception, is raised as Panic: `FILE: the tokenizer
    failed (…)`"""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class cannot be imported
            raise
        reason = brief(" ".join(str(error).split()), 200)
        raise Panic(f"{brief(str(place))}: the tokenizer failed ({reason})") from None


def refused(
    error: ValidationError,
    model: type[BaseModel],
    prefix: str = "",
    others: Sequence[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> InvalidSetting:
    """One of pydantic's errors for `model`, in one line. `prefix` precedes the key: "task.". `others`: keys that the
    model does not have, as guesses for an unknown key. `renamed`: earlier names of keys, and those of today."""
    errors = error.errors()
    # The first, unless a key is unknown: the key that was meant is often reported before it, as missing.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    owner, path, field, annotation = model, [], None, model
    for part in first["loc"]:
        path.append(str(part))
        field, annotation = _within(annotation, str(part))
        if _is_model(annotation):
            owner = annotation
        elif not (get_origin(annotation) in (dict, list) and _is_model(get_args(annotation)[-1])):
            break  # the rest of the path lies inside a value
    key = prefix + ".".join(path)
    if first["type"] == "value_error":  # raised by a validator of ours: already in our format
        cause = first["ctx"]["error"]
        return cause if isinstance(cause, InvalidSetting) else InvalidSetting(key, cause)
    if first["type"] == "extra_forbidden":
        names = [prefix + ".".join([*path[:-1], name]) for name in owner.model_fields]
        meant = _same_leaf(renamed.get(key, key), [*others, *(prefix + each for each in _keys(model))])
        return InvalidSetting(key, unknown("setting", key, names, meant=meant))
    if first["type"] == "invalid_key" or first["loc"][-1] == "[key]":
        return expected(key, "the name of a setting", first["input"])
    bounds = () if field is None else tuple(field.metadata) or _optional(field.annotation)[1]
    inside = first["loc"][len(path) :]
    if first["type"] == "missing" and not inside:
        return InvalidSetting(key, f"{key}: missing; expected {_expectation(annotation, bounds, first)}")
    for part in inside if first["type"] != "missing" else ():  # one element is missing: the value is all of them
        annotation, bounds = _optional(_element(annotation, part))
    return expected(key, _expectation(annotation, bounds, first), first["input"])


def _same_leaf(key: str, keys: Sequence[str]) -> list[str]:
    """`steps` → `train.steps`: keys of other groups with the same last part."""
    leaf = key.rpartition(".")[2]
    leaves = [(each, each.rpartition(".")[2]) for each in keys]
    same = [each for each, last in leaves if last == leaf]
    return same or [each for each, last in leaves if last.lower() == leaf.lower()]


def _keys(model: type[BaseModel]) -> Iterator[str]:
    """The dotted keys of all settings, groups included."""
    for name, field in model.model_fields.items():
        yield name
        annotation, _ = _optional(field.annotation)
        if _is_model(annotation):
            yield from (f"{name}.{key}" for key in _keys(annotation))


_KINDS: dict[Any, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list",
    dict: "a group of settings",
}  # fmt: skip


def _within(annotation: Any, key: str) -> tuple[FieldInfo | None, Any]:
    """The field of that name in a model, and its annotation; of a dictionary or a list, None and the type of its
    values."""
    if not _is_model(annotation):
        return None, get_args(annotation)[-1]
    if (field := annotation.model_fields.get(key)) is None:
        return None, None
    return field, _optional(field.annotation)[0]


def _element(annotation: Any, part: Any) -> Any:
    """The type of an element of a list, a tuple or a dictionary; None if it is not known."""
    origin, kinds = get_origin(annotation), get_args(annotation)
    if origin in (UnionType, Union):  # the part is the name of one of its types
        return annotation
    if origin is tuple:
        return kinds[0 if Ellipsis in kinds else part]
    return kinds[-1] if origin in (list, dict) else None


def _expectation(annotation: Any, bounds: Sequence[Any], first: Any) -> str:
    if first["type"] == "literal_error":
        return str(first["ctx"]["expected"])
    if first["type"] == "model_type":
        return _KINDS[dict]
    if first["type"] == "too_short":
        return f"at least {first['ctx']['min_length']}"
    if first["type"] == "too_long":
        return f"at most {first['ctx']['max_length']}"
    if (kind := _kind(annotation)) is None:
        return str(first["msg"]).removeprefix("Input should be ")
    signs = ((Ge, ">=", "ge"), (Gt, ">", "gt"), (Le, "<=", "le"), (Lt, "<", "lt"))
    limits = [
        (sign, getattr(bound, attribute))
        for bound in bounds
        for type_, sign, attribute in signs
        if isinstance(bound, type_)
    ]
    above = first["type"].startswith("less_than")
    written = [f"{sign} {bound}" for sign, bound in limits if above or sign not in ("<", "<=") or bound < HUGE]
    return " ".join([kind, " and ".join(written)]).strip()


def _kind(annotation: Any) -> str | None:
    """The expected kind of value in words; None if an annotation has no short description."""
    annotation, _ = _optional(annotation)
    if isinstance(annotation, UnionType):
        kinds = [_kind(kind) for kind in get_args(annotation) if kind is not NoneType]
        return " or ".join(map(str, kinds)) if all(kinds) else None
    if _is_model(annotation):
        return _KINDS[dict]
    if get_origin(annotation) is tuple:
        return f"a list of {len(get_args(annotation))}"
    return _KINDS.get(get_origin(annotation) or annotation)


def _optional(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """`Annotated[int, Gt(0)] | None` is (int, (Gt(0),))."""
    options = [option for option in get_args(annotation) if option is not NoneType]
    if get_origin(annotation) in (UnionType, Union) and len(options) == 1:
        annotation = options[0]
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    kind, *metadata = get_args(annotation)
    return kind, tuple(each for one in metadata for each in getattr(one, "metadata", [one]))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def readable(num_bytes: float) -> str:
    """`4.0 TB`"""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"]
    power = min(int(math.log10(max(1, num_bytes)) / 3), len(units) - 1)
    number = num_bytes / 1000**power
    return f"{number:,.1f} {units[power]}" if power and number < 10 else f"{number:,.0f} {units[power]}"
