"""Random grammars with the knobs of the released ones (cfg3f: the defaults; cfg3b: alternatives=(2, 2),
repeat_symbols=False).

One difference: every symbol occurs in a rule of the level above it, so that sentences can contain all symbols.
"""

from itertools import pairwise
from math import perm

import numpy as np

from canonlm.core.errors import expected
from canonlm.tasks.random import below, stream

Row = tuple[int, ...]
STEPS = 10_000  # max number of alternatives drawn again until every symbol occurs


def invent(
    seed: int,
    *,
    sizes: tuple[int, ...] = (1, 3, 3, 3, 3, 3, 3),
    alternatives: tuple[int, int] = (3, 4),
    lengths: tuple[int, int] = (2, 3),
    repeat_symbols: bool = True,
    repeat_rules: bool = False,
) -> tuple[tuple[int, ...], tuple]:
    """(sizes, rules) of `Grammar`, a pure function of the arguments.

    A symbol has alternatives[0] … alternatives[1] alternatives, an alternative has lengths[0] … lengths[1] children,
    both uniform; the children are uniform on the next level. An alternative is drawn again if its symbol already has
    it, if another symbol of the level has it (unless repeat_rules), or if it has a symbol twice (unless
    repeat_symbols). Then random alternatives are drawn again, one at a time, until every symbol of the next level
    occurs in one. Raises ValueError with the name of the knob that makes this impossible.
    """
    sizes = tuple(sizes)
    if len(sizes) < 2 or sizes[0] != 1 or min(sizes) < 1:
        raise expected("sizes", "1 (the root) and the sizes of the other levels", sizes)
    for key, pair in (("alternatives", alternatives), ("lengths", lengths)):
        if len(pair) != 2 or not 1 <= pair[0] <= pair[1]:
            raise expected(key, "(min, max) with 1 <= min <= max", pair)
    if not repeat_symbols and lengths[1] > min(sizes[1:]):
        raise expected("lengths", f"at most {min(sizes[1:])} different symbols in an alternative", lengths)
    dice = _Dice(seed)
    levels = []
    for size, children in pairwise(sizes):
        possible = sum(
            children**length if repeat_symbols else perm(children, length)
            for length in range(lengths[0], lengths[1] + 1)
        )
        needed = alternatives[1] * (1 if repeat_rules else size)
        if possible < needed:
            what = f"at most {possible * alternatives[1] // needed} (only {possible} different ones exist on a level)"
            raise expected("alternatives", what, alternatives)
        if size * alternatives[1] * lengths[1] < children:
            what = f"at most {size * alternatives[1] * lengths[1]} symbols below a level of {size}"
            raise expected("sizes", what, sizes)
        levels.append(_level(dice, size, children, alternatives, lengths, repeat_symbols, repeat_rules))
    return sizes, tuple(levels)


class _Dice:
    """The generator of `tasks.random`, for loops not worth compiling. Its split is 0, a number that no split has."""

    def __init__(self, seed: int) -> None:
        self.state, self.gamma = map(np.uint64, stream(seed, 0, 0, 0))

    def below(self, n: int) -> int:
        state, i = below(self.state, self.gamma, n)
        self.state = np.uint64(state)  # numba returns Python integers
        return i

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)


def _level(dice, size, children, alternatives, lengths, repeat_symbols, repeat_rules) -> tuple:
    def fresh(owner: int, others: list[tuple[int, Row]]) -> tuple[int, Row]:
        taken = {row for i, row in others if i == owner or not repeat_rules}
        while True:
            left = [*range(children)]
            length = dice.between(*lengths)
            if repeat_symbols:
                row = tuple(dice.below(children) for _ in range(length))
            else:
                row = tuple(left.pop(dice.below(len(left))) for _ in range(length))
            if row not in taken:
                return owner, row

    def num_occurring(rows: list[tuple[int, Row]]) -> int:
        return len({child for _, row in rows for child in row})

    for _ in range(STEPS):
        counts = [dice.between(*alternatives) for _ in range(size)]
        if sum(counts) * lengths[1] >= children:
            break
    rows: list[tuple[int, Row]] = []
    for owner in range(size):
        for _ in range(counts[owner]):
            rows.append(fresh(owner, rows))
    for _ in range(STEPS):
        if num_occurring(rows) == children:
            return tuple(tuple(row for i, row in rows if i == owner) for owner in range(size))
        k = dice.below(len(rows))
        others = rows[:k] + rows[k + 1 :]
        changed = [*others[:k], fresh(rows[k][0], others), *others[k:]]
        if num_occurring(changed) >= num_occurring(rows):
            rows = changed
    raise expected("sizes", f"fewer symbols below a level of {size}, or more alternatives", children)
