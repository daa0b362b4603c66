"""Counts of right answers per slice."""

from collections.abc import Iterable
from typing import Any

from canonlm.core.errors import expected
from canonlm.tasks.base import Slice, Verdict
from canonlm.tasks.records import plain_slice


class Tally:
    """Counts of right and of all answers, in the order of `slices`. A verdict with several keys counts once per key.
    1 and "1" are one value, as they are written alike."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._counts: dict[str, list[Any]] = {}
        for where in slices:
            self._count(plain_slice(where))

    def add(self, verdict: Verdict) -> None:
        """ValueError if the answer is neither right nor wrong."""
        if getattr(verdict, "correct", None) not in (0, 1):
            raise expected("grade", "a Verdict that is True or False", verdict)
        for where in [{key: value} for key, value in plain_slice(verdict.slice).items()] or [{}]:
            count = self._count(where)
            count[1] += verdict.correct
            count[2] += 1

    def _count(self, where: Slice) -> list[Any]:
        return self._counts.setdefault(str({key: str(value) for key, value in where.items()}), [where, 0, 0])

    def rows(self) -> list[dict[str, Any]]:
        """`[{"slice": {"k": 1}, "correct": 12, "total": 40}, …]`"""
        return [{"slice": where, "correct": int(right), "total": all_} for where, right, all_ in self._counts.values()]
