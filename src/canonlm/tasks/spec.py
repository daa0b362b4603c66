"""A task's settings: a frozen pydantic model whose errors are our one-liners."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from canonlm.errors import expected, refused


class TaskSpec(BaseModel):
    """Base of every `Task.Spec`. Strict (no "3" for 3), frozen, no unknown keys; raises ValueError in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    task: ClassVar[str] = "task"  # set by @register; the first half of the key in an error

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refused(error, type(self), f"{self.task}.") from None

    @classmethod
    def refuse(cls, key: str, what: str, value: object) -> ValueError:
        """For a validator that looks at several keys: `raise self.refuse("N", "at most 5 names", 6)`."""
        return expected(f"{cls.task}.{key}", what, value)
