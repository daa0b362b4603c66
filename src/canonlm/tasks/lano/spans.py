"""The dynamic programs under parse.py: which symbol derives which part of a token sequence, and with what weight.

In a layered grammar a symbol's children lie one level below it, so one pass from the terminals up to the root finds
every span (symbol, start, end), without fixed-point iteration. Spans are sparse: a symbol derives only a few of the
token ranges that begin at a position. So we keep, per symbol and start, only the list of ends with their values.

The meaning of a value depends on the input weights:
    number of parse trees     every rule and every token weighs 1
    probability               a rule weighs 1 / alternatives, a token the constant that keeps products near 1
    min substitutions         costs instead of weights: sums instead of products, the minimum instead of the sum

numba's disk cache checks this file only, so all compiled code of the parser is here.
"""

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from canonlm.core.numba_cache import njit

_ZERO, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)
SUM_OF_PRODUCTS = -1  # in place of a bound on costs


class Flat(NamedTuple):
    """A grammar as arrays. Symbols are numbered root first, level by level, terminals last: children after parents."""

    rules: np.ndarray  # int64 [symbols + 1]: symbol s has rules rules[s] … rules[s + 1] - 1
    parts: np.ndarray  # uint64 [number of rules + 1]: rule r has the children children[parts[r] : parts[r + 1]]
    children: np.ndarray  # uint64 [number of children]
    terminals: int  # the number of terminals, which are the last symbols


class Spans(NamedTuple):
    """Symbol s derives tokens[i : ends[k]], with values[k], for k in first[s, i] … stop[s, i] - 1, in no order.

    The root has spans from the first token only.
    """

    first: np.ndarray  # uint64 [symbols, n + 1]
    stop: np.ndarray  # uint64 [symbols, n + 1]
    ends: np.ndarray  # uint32 [more than there are spans]
    values: np.ndarray


def flatten(sizes: tuple[int, ...], grammar_rules: tuple) -> Flat:
    """The arrays of a grammar."""
    rules, parts, children, below = [0], [0], [], 0
    for level, symbols in enumerate(grammar_rules):
        below += sizes[level]
        for alternatives in symbols:
            for row in alternatives:
                children += [below + position for position in row]
                parts.append(len(children))
            rules.append(len(parts) - 1)
    rules += [len(parts) - 1] * sizes[-1]
    return Flat(np.array(rules), np.array(parts, np.uint64), np.array(children, np.uint64), sizes[-1])


@njit(cache=True, nogil=True)
def find_spans(flat, tokens, rule_values, token_values, bound):
    """The Spans of `tokens` (terminals from 0).

    rule_values [symbols]: the weight of each rule of a symbol; token_values [n]: the weight of each token. Their dtype
    is that of the result. bound: SUM_OF_PRODUCTS, or the cost above which a span is left out (values are costs then,
    and a wrong token costs 1).

    The ends that the first children of a rule can reach from `start`, with their values, are a set of positions: set s
    is at[s, :size], and position p belongs to it if marks[s, p] is its stamp. Sets 0 and 1 take turns along the
    children; set 2 collects the ends of the last children of all rules, which are the ends of the symbol.

    Indices are unsigned, because numba checks others for negative ones: twice as fast. They are never added to an item
    of `range`, which is a plain integer where Python runs this: numpy 1 would make the sum a float.
    """
    rules, parts, children, terminals = flat
    n, symbols = len(tokens), len(rules) - 1
    first, stop = np.zeros((symbols, n + 1), np.uint64), np.zeros((symbols, n + 1), np.uint64)
    ends, values = np.empty(64 * (n + 1), np.uint32), np.empty(64 * (n + 1), token_values.dtype)
    at, marks = np.zeros((3, n + 1), np.uint32), np.zeros((3, n + 1), np.int64)
    sums = np.zeros((3, n + 1), token_values.dtype)
    used, stamp = _ZERO, 0
    for symbol in range(symbols - 1, -1, -1):
        terminal = symbol - (symbols - terminals)
        for start in range(np.uint64(n if symbol else 1)):
            first[symbol, start] = used
            if used + np.uint64(n + 1) > len(ends):
                ends, values = _doubled(ends), _doubled(values)
            if terminal >= 0:
                right = tokens[start] == terminal
                if right or bound >= 1:
                    ends[used] = start + _ONE
                    values[used] = token_values[start] if right else 1
                    used += _ONE
                stop[symbol, start] = used
                continue
            stamp += 1
            mark_of_all, size_of_all = stamp, _ZERO
            for rule in range(rules[symbol], rules[symbol + 1]):
                child = children[parts[rule]]
                if first[child, start] == stop[child, start]:
                    continue  # the usual case
                at[_ZERO, _ZERO] = start
                sums[_ZERO, start] = rule_values[symbol]
                source, size = _ZERO, _ONE
                last = parts[rule + 1] - _ONE
                for part in range(parts[rule], parts[rule + 1]):
                    child = children[part]
                    stamp += 1
                    target, mark, reached = _ONE - source, stamp, _ZERO
                    if part == last:
                        target, mark, reached = _TWO, mark_of_all, size_of_all
                    for i in range(size):
                        cut = at[source, i]
                        before = sums[source, cut]
                        for k in range(first[child, cut], stop[child, cut]):
                            end = ends[k]
                            value = before * values[k] if bound < 0 else before + values[k]
                            if value > bound >= 0:
                                continue
                            if marks[target, end] != mark:
                                marks[target, end] = mark
                                sums[target, end] = value
                                at[target, reached] = end
                                reached += _ONE
                            elif bound < 0:
                                sums[target, end] += value
                            else:
                                sums[target, end] = min(sums[target, end], value)
                    source, size = target, reached
                size_of_all = reached
            for i in range(size_of_all):
                ends[used] = at[_TWO, i]
                values[used] = sums[_TWO, at[_TWO, i]]
                used += _ONE
            stop[symbol, start] = used
    return Spans(first, stop, ends, values)


@njit(cache=True, nogil=True)
def find_prefixes(flat, spans, rule_values, n):
    """W float64 [symbols, n + 1]: the total weight of the leftmost derivations that have produced the first k of n
    tokens and expand symbol s next. It runs from the root down: a rule A → x y z of weight w passes
    w W(i, A) on to x at i, times x's spans to y where they end, times y's spans to z where those end.
    """
    rules, parts, children, terminals = flat
    first, stop, ends, values = spans
    symbols = len(rules) - 1
    prefixes = np.zeros((symbols, n + 1))
    prefixes[0, 0] = 1
    for symbol in range(symbols - terminals):
        for rule in range(rules[symbol], rules[symbol + 1]):
            weights = rule_values[symbol] * prefixes[symbol]
            last = parts[rule + 1] - _ONE
            for part in range(parts[rule], parts[rule + 1]):
                child = children[part]
                prefixes[child] += weights
                if part == last:
                    break
                next_weights = np.zeros(n + 1)
                for start in range(np.uint64(n)):
                    if weights[start] > 0:
                        for k in range(first[child, start], stop[child, start]):
                            next_weights[ends[k]] += weights[start] * values[k]
                weights = next_weights
    return prefixes


@register_jitable
def _doubled(array):
    longer = np.empty(2 * len(array), array.dtype)
    for i in range(len(array)):  # for a slice, numba would also compile the text of its error, for three seconds
        longer[i] = array[i]
    return longer
