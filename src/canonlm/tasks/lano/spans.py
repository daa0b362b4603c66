"""Which symbol derives which part of a token sequence, and with what weight: the dynamic programs under parse.py and law.py.

In a layered grammar a symbol's children lie one level below it, so one pass from the terminals up to the root finds
every span (symbol, start, end), with no fix point. Spans are sparse: a symbol derives only a few of the stretches that
begin at a position. So we keep, per symbol and start, the list of ends with their values, and nothing else.

What a value is depends on the weights that come in:
    number of parse trees     every rule and every token weighs 1
    probability               a rule weighs 1 / alternatives, a token the constant that keeps products near 1
    least substitutions       costs instead of weights: sums instead of products, the minimum instead of the sum

numba's disk cache looks at this file only: all compiled code of the parser is here.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit
from numba.extending import register_jitable

if TYPE_CHECKING:
    from canonlm.tasks.lano.grammar import Grammar

SUM_OF_PRODUCTS = -1  # in place of a bound on costs


class Flat(NamedTuple):
    """A grammar as arrays. Symbols are numbered root first, level by level, terminals last: children after parents."""

    rules: np.ndarray  # int32 [symbols + 1]: symbol s has rules rules[s] … rules[s + 1] - 1
    parts: np.ndarray  # int32 [number of rules + 1]: rule r has the children children[parts[r] : parts[r + 1]]
    children: np.ndarray  # int32 [number of children]
    terminals: int  # the last so many symbols


class Spans(NamedTuple):
    """Symbol s derives tokens[i:ends[k]] with values[k], for k in first[s, i] … first[s, i + 1] - 1, in any order.

    The root is looked for at the first token only.
    """

    first: np.ndarray  # int64 [symbols, n + 2]
    ends: np.ndarray  # int32 [room for more than there are]
    values: np.ndarray


@lru_cache(maxsize=32)
def flatten(grammar: "Grammar") -> Flat:
    """The arrays of a grammar; made once (a grammar is its own key)."""
    rules, parts, children, below = [0], [0], [], 0
    for level, symbols in enumerate(grammar.rules):
        below += grammar.sizes[level]
        for alternatives in symbols:
            for row in alternatives:
                children += [below + position for position in row]
                parts.append(len(children))
            rules.append(len(parts) - 1)
    rules += [len(parts) - 1] * grammar.sizes[-1]
    return Flat(*(np.array(part, np.int32) for part in (rules, parts, children)), grammar.sizes[-1])


@njit(cache=True, nogil=True)
def find_spans(flat, tokens, rule_values, token_values, bound):
    """The Spans of `tokens` (terminals from 0).

    rule_values [symbols]: what each rule of a symbol contributes; token_values [n]: what each token does. Their dtype is
    that of the result. bound: SUM_OF_PRODUCTS, or the cost above which a span is left out (values are costs then, and
    a wrong token costs 1).
    """
    rules, parts, children, terminals = flat
    n, symbols = len(tokens), len(rules) - 1
    first = np.zeros((symbols, n + 2), np.int64)
    ends = np.empty(64 * (n + 1), np.int32)
    values = np.empty(64 * (n + 1), token_values.dtype)
    used = 0
    sets = _empty_sets(n, token_values)
    stamp = 0
    for symbol in range(symbols - 1, -1, -1):
        for start in range(n if symbol else 1):
            first[symbol, start] = used
            if used + n + 1 > len(ends):
                ends, values = _doubled(ends), _doubled(values)
            if symbol >= symbols - terminals:
                right = tokens[start] == symbol - (symbols - terminals)
                if right or bound >= 1:
                    ends[used] = start + 1
                    values[used] = token_values[start] if right else 1
                    used += 1
                continue
            stamp += 1
            total_stamp, found = stamp, 0
            for rule in range(rules[symbol], rules[symbol + 1]):
                head = children[parts[rule]]
                if first[head, start] == first[head, start + 1]:
                    continue  # most rules, most of the time
                sets.at[0, 0] = start
                sets.value[0, start] = rule_values[symbol]
                source, size = 0, 1
                for part in range(parts[rule], parts[rule + 1]):
                    # The last child ends where the symbol ends: that goes to the set of all alternatives.
                    last = part + 1 == parts[rule + 1]
                    stamp += 1
                    target, have, mark = (2, found, total_stamp) if last else (1 - source, 0, stamp)
                    size = _extend(first, ends, values, children[part], sets, source, size, target, have, mark, bound)
                    source = target
                    if last:
                        found = size
            for k in range(found):
                ends[used] = sets.at[2, k]
                values[used] = sets.value[2, sets.at[2, k]]
                used += 1
        for start in range(n if symbol else 1, n + 2):
            first[symbol, start] = used
    return Spans(first, ends, values)


@njit(cache=True, nogil=True)
def find_prefixes(flat, spans, rule_values, n):
    """W float64 [symbols, n + 1]: the total weight of the leftmost derivations that have produced the first k of n
    tokens and expand symbol s next. It runs from the root down: a rule A → x y z of weight w passes
    w W(i, A) on to x at i, times x's spans to y where they end, times y's spans to z where those end.
    """
    rules, parts, children, terminals = flat
    first, ends, values = spans
    symbols = len(rules) - 1
    prefixes = np.zeros((symbols, n + 1))
    prefixes[0, 0] = 1
    sets = _empty_sets(n, values)
    stamp = 0
    for symbol in range(symbols - terminals):
        for start in range(n + 1):
            weight = prefixes[symbol, start] * rule_values[symbol]
            if weight == 0:
                continue
            for rule in range(rules[symbol], rules[symbol + 1]):
                sets.at[0, 0] = start
                sets.value[0, start] = weight
                source, size = 0, 1
                for part in range(parts[rule], parts[rule + 1]):
                    child = children[part]
                    for k in range(size):
                        at = sets.at[source, k]
                        prefixes[child, at] += sets.value[source, at]
                    if part + 1 < parts[rule + 1]:
                        stamp += 1
                        size = _extend(
                            first, ends, values, child, sets, source, size, 1 - source, 0, stamp, SUM_OF_PRODUCTS
                        )
                        source = 1 - source
    return prefixes


# The rest is compiled into the two above; Python runs it as it stands where `find_spans.py_func` computes with Python's
# own integers.


class _Sets(NamedTuple):
    """Three sets of positions with values. Set s is at[s, :size]; position p is in it if mark[s, p] is its stamp."""

    at: np.ndarray  # int32 [3, n + 1]
    mark: np.ndarray  # int64 [3, n + 1]
    value: np.ndarray  # [3, n + 1]


@register_jitable
def _empty_sets(n, values):
    return _Sets(np.zeros((3, n + 1), np.int32), np.zeros((3, n + 1), np.int64), np.zeros((3, n + 1), values.dtype))


@register_jitable
def _extend(first, ends, values, child, sets, source, size, target, found, stamp, bound):
    """Add to set `target` (of `found` positions) where the spans of `child` from set `source` end. Returns its size."""
    at, mark, value = sets
    for i in range(size):
        start = at[source, i]
        before = value[source, start]
        for k in range(first[child, start], first[child, start + 1]):
            end = ends[k]
            if bound == SUM_OF_PRODUCTS:
                now = before * values[k]
            else:
                now = before + values[k]
                if now > bound:
                    continue
            if mark[target, end] != stamp:
                mark[target, end] = stamp
                at[target, found] = end
                found += 1
                value[target, end] = now
            elif bound == SUM_OF_PRODUCTS:
                value[target, end] += now
            else:
                value[target, end] = min(now, value[target, end])
    return found


@register_jitable
def _doubled(array):
    longer = np.empty(2 * len(array), array.dtype)
    longer[: len(array)] = array
    return longer
