"""A task's settings: a frozen pydantic model whose errors are one-line ValueErrors."""

import re
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from canonlm.core.errors import expected, refused

MAX_LENGTH = 2**16

Sizes = list[int | str] | None
"""Sizes of test samples: numbers, or multiples of the largest size of training (`x1.5`). None: the task's default."""


class Settings(BaseModel):
    """Strict (no "3" for 3) and frozen. Unknown keys and wrong values raise a one-line ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refused(error, type(self), self._before_keys()) from None

    @classmethod
    def _before_keys(cls) -> str:
        """The prefix of keys in errors."""
        return ""


class TaskSpec(Settings):
    """Base of every `Task.Spec`."""

    task: ClassVar[str] = "task"  # set by @register; the first half of the key in an error

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for key in ("name", "difficulty"):  # of the task, beside its settings in a configuration
            if key in cls.model_fields:
                raise expected(key, "a setting with another name", key)

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, values: dict[str, Any]) -> dict[str, Any]:
        """YAML has no tuples."""
        tuples = {key for key, field in cls.model_fields.items() if _is_tuple(field.annotation)}
        return {k: tuple(value) if k in tuples and isinstance(value, list) else value for k, value in values.items()}

    @classmethod
    def _before_keys(cls) -> str:
        return f"{cls.task}."

    @classmethod
    def refuse(cls, key: str, what: str, value: object) -> ValueError:
        """For a validator that looks at several keys: `raise self.refuse("N", "at most 5 names", 6)`."""
        return expected(f"{cls.task}.{key}", what, value)

    def sizes(self, key: str, trained: int, possible: range, default: Iterable[int] | None = None) -> list[int]:
        """The test sizes of the setting `key`, sorted; by default 4, 8, 16, … and `trained`. A multiple of `trained` is
        rounded down to a possible size."""
        given = getattr(self, key)
        if given is None:
            return sorted(default or {1 << i for i in range(2, trained.bit_length())} | {trained})
        numbers = [_number(one, trained, possible) for one in given]
        if not 0 < len(numbers) == len({*numbers} & {*possible}):
            step = "" if possible.step == 1 else f" in steps of {possible.step}"
            what = (
                f"different integers from {possible[0]} to {possible[-1]}{step}, or multiples of {trained} such as x1.5"
            )
            raise self.refuse(key, what, given)
        return sorted(numbers)


class LengthSpec(TaskSpec):
    """The settings of a task whose samples have a length n. A subclass may set other limits of N, which are also those
    of the test lengths."""

    one_length: ClassVar[bool] = False  # True: in training, and by default in the test, n = N

    N: int = Field(32, ge=1, le=MAX_LENGTH)  # training: n uniform on 1..N
    test_lengths: Sizes = None  # test: n uniform on these; None: 4, 8, 16, … and N

    @model_validator(mode="after")
    def _possible_lengths(self) -> "LengthSpec":
        self.lengths()
        return self

    def lengths(self) -> list[int]:
        """The test lengths. ValueError if they are not possible."""
        possible = range(self.shortest(), self._limit(Le).le + 1)
        return self.sizes("test_lengths", self.N, possible, [self.N] if self.one_length else None)

    def shortest(self) -> int:
        """The smallest n of a sample."""
        return self._limit(Ge).ge

    def _limit(self, kind: type) -> Any:
        return next(each for each in type(self).model_fields["N"].metadata if isinstance(each, kind))


def _is_tuple(annotation: Any) -> bool:
    """Whether it is a tuple, or a tuple or None."""
    options = {*get_args(annotation)} - {NoneType} if get_origin(annotation) in (UnionType, Union) else {annotation}
    return all(tuple in (option, get_origin(option)) for option in options)


def _number(size: int | str, trained: int, possible: range) -> int:
    if isinstance(size, int):
        return size
    if not re.fullmatch(r"x\d{1,4}(\.\d{1,4})?", size):
        return possible[0] - 1
    number = int(float(size[1:]) * trained + 1e-9)
    return number - (number - possible[0]) % possible.step
