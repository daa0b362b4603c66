"""A task's settings: a frozen pydantic model whose errors are one-line ValueErrors."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from canonlm.core.errors import expected, refused


class Settings(BaseModel):
    """Strict (no "3" for 3) and frozen. Unknown keys and wrong values raise a one-line ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, **values: Any) -> None:
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
    def _before_keys(cls) -> str:
        return f"{cls.task}."

    @classmethod
    def refuse(cls, key: str, what: str, value: object) -> ValueError:
        """For a validator that looks at several keys: `raise self.refuse("N", "at most 5 names", 6)`."""
        return expected(f"{cls.task}.{key}", what, value)
