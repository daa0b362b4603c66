"""Drawing sentences: level by level from the root, every alternative of a symbol equally likely.

Symbols above the terminals are numbered from the root down; a terminal is its token 1 … T.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from canonlm.core.numba_cache import njit
from canonlm.tasks.packing import compile_loop
from canonlm.tasks.random import below, stream

BOS = 0


class Tables(NamedTuple):
    """Symbol s has the `counts[s]` alternatives from `first[s]` on; alternative r is children[r, :lengths[r]]."""

    first: np.ndarray  # int32 [symbols above the terminals]
    counts: np.ndarray  # int32 [symbols above the terminals]
    children: np.ndarray  # int32 [alternatives, longest]
    lengths: np.ndarray  # int32 [alternatives]


class Packed(NamedTuple):
    """The tables of the packing loop."""

    tables: Tables
    depth: int  # levels above the terminals
    max_len: int  # tokens of the longest sentence


def tables(sizes: tuple[int, ...], rules: tuple) -> Tables:
    offsets = [*np.cumsum(sizes[:-2]), 1]  # the number of the first symbol of each level, from level 1 on
    counts = [len(rows) for level in rules for rows in level]
    rows = [[i + offset for i in row] for level, offset in zip(rules, offsets, strict=True) for s in level for row in s]
    children = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for r, row in enumerate(rows):
        children[r, : len(row)] = row
    first = np.cumsum([0, *counts[:-1]])
    return Tables(*(np.array(a, np.int32) for a in (first, counts, children, [len(row) for row in rows])))


@dataclass(frozen=True, eq=False)
class Derivation:
    """A sentence and its tree. Columns are the levels above the terminals, root first."""

    tokens: np.ndarray  # int32 [n], the terminals
    labels: np.ndarray  # int32 [n, levels]: the symbol above the token, as its position in the level
    ordinals: np.ndarray  # int32 [n, levels]: which node of the level, counted from the left; neighbours may share it

    @property
    def boundaries(self) -> np.ndarray:
        """bool [n, levels]: the node above this token ends with it."""
        last = np.ones((1, self.ordinals.shape[1]), bool)
        return np.concatenate([self.ordinals[1:] != self.ordinals[:-1], last])

    def nodes(self, level: int) -> list[tuple[int, int, int]]:
        """(symbol, start, stop) of the nodes of a level, left to right: symbol stands above tokens[start:stop]."""
        stops = (np.flatnonzero(self.boundaries[:, level]) + 1).tolist()
        starts = [0, *stops[:-1]]
        return list(zip(self.labels[starts, level].tolist(), starts, stops, strict=True))


def derivation(
    tables: Tables, sizes: tuple[int, ...], max_len: int, seed: int, split: int, window: int, j: int
) -> Derivation:
    """The sentence keyed (seed, split, window, j), with its tree."""
    depth = len(sizes) - 1
    nodes, chosen, widths = _tree(seed, split, window, j, *tables, depth, max_len)
    n = widths[-1]
    labels, ordinals = np.empty((n, depth), np.int32), np.empty((n, depth), np.int32)
    below_it = np.arange(n)  # for each token, its node on the level below
    for level, base in reversed([*enumerate(np.cumsum([0, *sizes[: depth - 1]]))]):
        indices = np.arange(widths[level])
        below_it = np.repeat(indices, tables.lengths[chosen[level, indices]])[below_it]
        ordinals[:, level] = below_it
        labels[:, level] = nodes[level, below_it] - base
    return Derivation(nodes[depth, :n].copy(), labels, ordinals)


@njit(cache=True, nogil=True)
def _tree(seed, split, window, j, first, counts, children, lengths, depth, max_len):
    nodes, chosen = _room(children, depth, max_len)
    widths = np.empty(depth + 1, np.int64)
    state, gamma = stream(seed, split, window, j)
    _derive(state, gamma, first, counts, children, lengths, nodes, chosen, widths)
    return nodes, chosen, widths


@njit(cache=True)
def _room(children, depth, max_len):
    """Arrays for a tree: the symbols and the chosen alternatives of the nodes of each level."""
    width = max_len + children.shape[1]
    return np.empty((depth + 1, width), np.int32), np.empty((depth, width), np.int32)


@njit(cache=True)
def _derive(state, gamma, first, counts, children, lengths, nodes, chosen, widths):
    """Draw a tree with widths[level] nodes on a level. Returns n, the number of tokens nodes[-1, :n].

    A node always writes as many children as the longest alternative has: the next node overwrites the surplus, and no
    branch depends on the draw.
    """
    nodes[0, 0] = 0
    widths[0] = 1
    for level in range(len(chosen)):
        at = 0
        for i in range(widths[level]):
            symbol = nodes[level, i]
            state, alternative = below(state, gamma, counts[symbol])
            rule = first[symbol] + alternative
            chosen[level, i] = rule
            for c in range(children.shape[1]):
                nodes[level + 1, at + c] = children[rule, c]
            at += lengths[rule]
        widths[level + 1] = at
    return widths[-1]


def _make_room(packed):
    tables, depth, max_len = packed
    nodes, chosen = _room(tables.children, depth, max_len)
    return nodes, chosen, np.empty(depth + 1, np.int64)


def _draw(state, gamma, packed, room, tokens, targets):
    """A sentence after a bos; all tokens are targets."""
    tables, depth, _ = packed
    nodes, chosen, widths = room
    first, counts, children, lengths = tables
    n = _derive(state, gamma, first, counts, children, lengths, nodes, chosen, widths)
    tokens[0] = targets[0] = BOS
    for i in range(n):
        tokens[i + 1] = targets[i + 1] = nodes[depth, i]
    return n + 1


loop = compile_loop(_draw, _make_room)
