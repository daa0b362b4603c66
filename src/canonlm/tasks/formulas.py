"""Formulas modulo m as tokens: their values, how they are drawn, and how likely each value is.

`results[operator, left, right]` are the values of operations, for +, - and *; `ops`: the operators in use.
"""

import numpy as np

from canonlm.core.numba_cache import njit
from canonlm.tasks.base import Vocab
from canonlm.tasks.random import below, two_below

BOS, EQUALS, OPEN, CLOSE, PLUS, ZERO = 0, 1, 2, 3, 4, 7
MINUS = PLUS + 1
OPERATORS = "+-*"
WRITE, APPLY = -1, -8  # entries of the sampler's stack: write operator o: WRITE - o; close its bracket: APPLY - o


def plain_value(vocab: Vocab, tokens: list[int], n: int, ops: np.ndarray, results: np.ndarray) -> int:
    done, term, op, m = 0, 0, 0, results.shape[1]
    for at in range(1, n + 1 + (n + 1) % 2):
        got = tokens[at]
        if at % 2 == 0:
            if (op := got - PLUS) not in ops:
                raise vocab.unlike(tokens, at, f"one of {vocab.text(PLUS + ops)}")
        elif not 0 <= (digit := got - ZERO) < m:
            raise vocab.unlike(tokens, at, "a number")
        elif op == 2:
            term = term * digit
        else:
            done, term = done + term, digit * (1, -1)[op]
        term %= m
    return (done + term) % m


def bracketed_value(vocab: Vocab, tokens: list[int], n: int, ops: np.ndarray, results: np.ndarray) -> int:
    """Shift and reduce. An operand on the stack is (value, whether it is a number, with or without a sign)."""
    m = results.shape[1]
    stack: list = [BOS]
    for at, got in enumerate(tokens[1 : n + 1], 1):
        operand = isinstance(stack[-1], tuple)
        signed = stack[-1] == MINUS and not isinstance(stack[-2], tuple)
        match stack[-4:]:
            case _ if not operand and 0 <= (digit := got - ZERO) < m:
                value = -digit % m if signed else digit
                stack[len(stack) - signed :] = [(value, True)]
            case _ if not operand and not signed and got in (OPEN, MINUS):
                stack.append(got)
            case [*_, before, _] if before == OPEN and operand and got - PLUS in ops:
                stack.append(got)
            case [*_, before, (value, True)] if before == OPEN and got == CLOSE:
                stack[-2:] = [(value, False)]
            case [_, (left, _), int(op), (right, _)] if got == CLOSE:
                stack[-4:] = [(int(results[op - PLUS, left, right]), False)]
            case _:
                raise vocab.unlike(tokens, at, "a formula with brackets around every operation")
    if len(stack) != 2 or not isinstance(stack[1], tuple):
        raise vocab.unlike(tokens, n + 1, "the rest of a formula")
    return stack[1][0]


def value_distribution(n: int, brackets: bool, ops: np.ndarray, results: np.ndarray) -> np.ndarray:
    """float64 [modulus]: the probability of each value of a formula of n tokens."""
    m, (plus, minus, times) = results.shape[1], results
    if not brackets:  # the state is the sum of the finished terms, and the signed term being multiplied
        step = np.zeros((m, m, m, m))
        done, term, digit = np.ogrid[:m, :m, :m]
        for op in ops:
            to = (done, times[term, digit]) if op == 2 else (plus[done, term], minus[0, digit] if op == 1 else digit)
            np.add.at(step, (done, term, *to), 1 / m / len(ops))
        first = np.eye(m)[0].repeat(m) / m  # 0 + the first digit
        last = first @ np.linalg.matrix_power(step.reshape(m * m, m * m), n // 2)
        return np.bincount(plus.ravel(), weights=last, minlength=m)
    values = np.full((n + 1, m), 1 / m)
    for length in range(5, n + 1):
        left, right = values[1 : length - 3], values[length - 4 : 0 : -1]
        both = left.T @ right / (length - 4)
        values[length] = np.bincount(
            results[ops].ravel(),
            weights=np.tile(both.ravel(), len(ops)) / len(ops),
            minlength=m,
        )
    return values[n]


@njit(cache=True, inline="always")
def draw_bracketed(state, gamma, n, ops, results, room, tokens):
    todo, values = room
    todo[0], left, depth, at = n, 1, 0, 1
    while left:
        left -= 1
        item = todo[left]
        if item <= APPLY:
            tokens[at] = CLOSE
            depth -= 1
            values[depth - 1] = results[APPLY - item, values[depth - 1], values[depth]]
            at += 1
        elif item < 0:
            tokens[at] = PLUS + WRITE - item
            at += 1
        elif item >= 5:
            state, shorter, which = two_below(state, gamma, item - 4, len(ops))
            tokens[at] = OPEN
            at += 1
            todo[left], todo[left + 1] = APPLY - ops[which], item - 4 - shorter
            todo[left + 2], todo[left + 3] = WRITE - ops[which], 1 + shorter
            left += 4
        else:  # d, - d, ( d ), ( - d )
            state, digit = below(state, gamma, results.shape[1])
            tokens[at], tokens[at + 1], tokens[at + item - 1] = OPEN, MINUS, CLOSE
            if item == 2:
                tokens[at] = MINUS
            tokens[at + (item - 1 if item < 3 else item - 2)] = ZERO + digit
            values[depth] = results[1, 0, digit] if item % 2 == 0 else digit
            depth += 1
            at += item
    return state, values[0]
