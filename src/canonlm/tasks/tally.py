"""Counts of right answers per slice."""

from collections.abc import Iterable
from typing import Any

from canonlm.tasks.base import Slice, Verdict
from canonlm.tasks.records import plain_slice


class Tally:
    """Counts of right and of all answers, in the order of `slices`. A verdict with several keys counts once per key."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._counts: dict[str, list[Any]] = {str(where): [where, 0, 0] for where in map(plain_slice, slices)}

    def add(self, verdict: Verdict) -> None:
        for where in [{key: value} for key, value in plain_slice(verdict.slice).items()] or [{}]:
            count = self._counts.setdefault(str(where), [where, 0, 0])
            count[1] += verdict.correct
            count[2] += 1

    def rows(self) -> list[dict[str, Any]]:
        """`[{"slice": {"k": 1}, "correct": 12, "total": 40}, …]`"""
        return [{"slice": where, "correct": int(right), "total": all_} for where, right, all_ in self._counts.values()]
