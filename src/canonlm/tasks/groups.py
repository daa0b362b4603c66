"""Finite groups by name, as permutations and their multiplication table.

Z5 (cyclic, of 5 elements), D4 (the 8 symmetries of a square), S5 (all permutations of 5 points), A5 (the even ones),
and products: A5xZ2. A product is read from left to right: a b means a first, then b.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from canonlm.core.errors import closest

RANGES = {"Z": (2, 60), "D": (3, 30), "S": (3, 6), "A": (4, 6)}
"""The smallest and the largest n of a group with this letter."""

MAX_ORDER = 1000  # elements of a group, each of which is a token

_Permutation = tuple[int, ...]  # of 0, 1, …: the point to which each point goes


@dataclass(frozen=True, eq=False)
class Group:
    """permutations: int64 [order, points]; the identity is element 0. table: int32 [order, order], table[a, b] is the
    element a b. generators: elements that generate all others."""

    permutations: np.ndarray
    table: np.ndarray
    generators: tuple[int, ...]

    @property
    def order(self) -> int:
        return len(self.table)

    def cycles(self, element: int) -> str:
        """`(1 2 3)(4 5)`; `()` for the identity."""
        to, seen, text = self.permutations[element].tolist(), set[int](), ""
        for start in range(len(to)):
            cycle, point = list[int](), start
            while point not in seen:
                seen.add(point)
                cycle.append(point + 1)
                point = to[point]
            text += f"({' '.join(map(str, cycle))})" if len(cycle) > 1 else ""
        return text or "()"


def problem(name: str) -> str:
    """A description of the expected names; "" if this is the name of a group that is not too large."""
    order = 1
    for part in name.split("x"):
        match = re.fullmatch(r"([A-Z])([1-9]\d?)", part)
        low, high = RANGES.get(match[1], (1, 0)) if match else (1, 0)
        if match is None or not low <= int(match[2]) <= high:
            known = ", ".join(f"{letter}{low} to {letter}{high}" for letter, (low, high) in RANGES.items())
            every = [f"{letter}{n}" for letter, (low, high) in RANGES.items() for n in range(low, high + 1)]
            near = [name for name in closest(part.upper(), every) if name[0] == part[:1].upper()]
            return f"a group ({known}, or products such as A5xZ2)" + (f"; did you mean {near[0]}?" if near else "")
        order *= _order(match[1], int(match[2]))
    return "" if order <= MAX_ORDER else f"a group of at most {MAX_ORDER:,} elements (this one has {order:,})"


def _order(letter: str, n: int) -> int:
    return {"Z": n, "D": 2 * n, "S": _factorial(n), "A": _factorial(n) // 2}[letter]


def _factorial(n: int) -> int:
    return int(np.prod(np.arange(1, n + 1)))


@cache
def group(name: str) -> Group:
    """The group of that name. Elements are numbered in the order in which the generators reach them."""
    generators: list[_Permutation] = []
    for part in name.split("x"):
        points = len(generators[0]) if generators else 0
        own = _generators(part[0], int(part[1:]))
        more = len(own[0])
        generators = [(*one, *range(points, points + more)) for one in generators]
        generators += [(*range(points), *(points + point for point in one)) for one in own]
    return _generated(generators)


def _generators(letter: str, n: int) -> list[_Permutation]:
    cycle = (*range(1, n), 0)
    if letter == "D":
        return [cycle, tuple(range(n - 1, -1, -1))]
    if letter == "S":
        return [(1, 0, *range(2, n)), cycle]
    if letter == "A":
        cycles = [{0: 1, 1: k, k: 0} for k in range(2, n)]  # of three points
        return [tuple(to.get(point, point) for point in range(n)) for to in cycles]
    return [cycle]


def _generated(generators: Sequence[_Permutation]) -> Group:
    """Breadth first. The table follows from the products with generators alone: a (b g) = (a b) g."""
    elements: dict[_Permutation, int] = {tuple(range(len(generators[0]))): 0}
    reached = [(0, 0)]  # of each element: an earlier one, and the generator that leads from there to it
    queue = list(elements)
    for number, one in enumerate(queue):  # grows
        for which, generator in enumerate(generators):
            if (product := _then(one, generator)) not in elements:
                elements[product] = len(elements)
                reached.append((number, which))
                queue.append(product)
    by_generator = np.array([[elements[_then(one, generator)] for generator in generators] for one in queue], np.int32)
    table = np.empty((len(queue), len(queue)), np.int32)
    table[:, 0] = np.arange(len(queue))
    for element, (before, which) in enumerate(reached[1:], 1):
        table[:, element] = by_generator[table[:, before], which]
    return Group(np.array(queue), table, tuple(elements[generator] for generator in generators))


def _then(first: _Permutation, second: _Permutation) -> _Permutation:
    return tuple(second[point] for point in first)
