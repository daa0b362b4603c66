"""Capo's documents in pieces: what the text of a biography or a question consists of, and how long it is.

Document d is the biography of person d for d < people; from there on it is question (d - people) % 6 about person
(d - people) // 6. A person's texts differ in their templates and in the order of the sentences; both are drawn from a
stream keyed (seed, split, person, text number). A question has one text.
"""

from itertools import permutations
from typing import NamedTuple

import numpy as np
from numba import njit

from canonlm.tasks.capo.people import attributes, name
from canonlm.tasks.capo.pools import Sizes
from canonlm.tasks.capo.tokens import (
    AFTER,
    ASK,
    ASKED,
    BETWEEN,
    DAY,
    FIRST,
    LAST,
    MIDDLE,
    MONTH,
    PRONOUN,
    VALUE,
    YEAR,
    Pieces,
)
from canonlm.tasks.random import below, stream, two_below

LONGEST_PLAN = 64  # pieces of a document, at most: 6 sentences of 3 + 1 + 3 + 1
ORDERS = np.array(list(permutations(range(6))), np.int8)  # the first one is ATTRIBUTES as they are

# What a token is to its document, as in `Capo.test_batch`; the value of attribute a is OF_VALUE + a.
TEMPLATE, FIRST_NAME, FIRST_PRONOUN, OF_VALUE = range(4)


class Law(NamedTuple):
    """What the text of a document depends on, beside the keys."""

    pieces: Pieces
    sizes: Sizes
    people: int
    documents: int  # in a pass
    permute: bool
    fullname: bool


@njit(cache=True)
def pieces_of(seed, split, text, document, law, plan, what):
    """Writes which pieces make up a document behind its bos, and what each is to it; returns how many."""
    if document < law.people:
        return _biography(seed, split, text, document, law, plan, what)
    question = document - law.people
    return _question(seed, question // 6, question % 6, law, plan, what)


@njit(cache=True)
def _question(seed, i, a, law, plan, what):
    base = law.pieces.base
    count = _put(plan, what, 0, base[ASK + a], TEMPLATE)
    count = _put_name(seed, i, law, FIRST_NAME, plan, what, count)
    count = _put(plan, what, count, base[ASKED + a], TEMPLATE)
    return _put_value(attributes(seed, i, law.sizes), a, base, plan, what, count)


@njit(cache=True)
def _biography(seed, split, text, i, law, plan, what):
    base = law.pieces.base
    state, gamma, templates = _templates(seed, split, text, i, base)
    order = 0
    if law.permute:
        state, order = below(state, gamma, len(ORDERS))
    values = attributes(seed, i, law.sizes)
    count = 0
    for told in range(6):
        a = ORDERS[order, told]
        if told == 0 or law.fullname:
            count = _put_name(seed, i, law, TEMPLATE if told else FIRST_NAME, plan, what, count)
        else:
            count = _put(plan, what, count, base[PRONOUN] + i % 2, FIRST_PRONOUN if told == 1 else TEMPLATE)
        whole = _whole(values, a, templates[a], law.pieces)
        if whole:
            count = _put(plan, what, count, whole, TEMPLATE)
            count = _put(plan, what, count, whole + 1, OF_VALUE + a)
            count = _put(plan, what, count, whole + 2, TEMPLATE)
        else:
            count = _put(plan, what, count, base[BETWEEN + a] + templates[a], TEMPLATE)
            count = _put_value(values, a, base, plan, what, count)
            count = _put(plan, what, count, base[AFTER + a] + templates[a], TEMPLATE)
    return count


@njit(cache=True)
def _templates(seed, split, text, i, base):
    """(state, gamma, the six templates) of a text: each uniform, from a stream that the order is drawn from, too."""
    state, gamma = stream(seed, split, i, text)
    state, t0, t1 = two_below(state, gamma, _count(base, 0), _count(base, 1))
    state, t2, t3 = two_below(state, gamma, _count(base, 2), _count(base, 3))
    state, t4, t5 = two_below(state, gamma, _count(base, 4), _count(base, 5))
    return state, gamma, (t0, t1, t2, t3, t4, t5)


@njit(cache=True)
def _count(base, a):
    return base[BETWEEN + a + 1] - base[BETWEEN + a]


@njit(cache=True)
def _whole(values, a, template, pieces):
    """The first of the three pieces that stand for this sentence where its value is joined with it, else 0."""
    if a == 0 or len(pieces.whole) == 0:
        return np.int64(0)
    return np.int64(pieces.whole[pieces.base[BETWEEN + a] - pieces.base[BETWEEN] + template, _value(values, a)])


@njit(cache=True)
def _put(plan, what, count, piece, of):
    plan[count] = piece
    what[count] = of
    return count + 1


@njit(cache=True)
def _put_name(seed, i, law, of, plan, what, count):
    first, middle, last = name(seed, i, law.sizes)
    count = _put(plan, what, count, law.pieces.base[FIRST] + first, of)
    count = _put(plan, what, count, law.pieces.base[MIDDLE] + middle, of)
    return _put(plan, what, count, law.pieces.base[LAST] + last, of)


@njit(cache=True)
def _put_value(values, a, base, plan, what, count):
    if a > 0:
        return _put(plan, what, count, base[VALUE + a] + _value(values, a), OF_VALUE + a)
    count = _put(plan, what, count, base[MONTH] + values[0], OF_VALUE)
    count = _put(plan, what, count, base[DAY] + values[1], OF_VALUE)
    return _put(plan, what, count, base[YEAR] + values[2], OF_VALUE)


@njit(cache=True)
def _value(values, a):
    """The index of the value of attribute a > 0; company and company city have the same one."""
    return values[min(a, 4) + 2]


@njit(cache=True)
def length_of(seed, split, text, document, law):
    """How many tokens a document has: bos and its pieces."""
    told = told_length(seed, split, text, document, law) if document < law.people else 0
    return fixed_length(seed, document, law) + told


@njit(cache=True)
def fixed_length(seed, document, law):
    """The part of it that is the same in all texts: bos, names, pronouns, values; a question, whole."""
    pieces = law.pieces
    if document >= law.people:
        i, a = (document - law.people) // 6, (document - law.people) % 6
        length = 1 + _width(pieces, ASK + a, 0) + _width(pieces, ASKED + a, 0)
        return length + _name_length(seed, i, law) + _value_length(attributes(seed, i, law.sizes), a, pieces)
    values, of_name = attributes(seed, document, law.sizes), _name_length(seed, document, law)
    length = 1 + (6 * of_name if law.fullname else of_name + 5 * _width(pieces, PRONOUN, document % 2))
    for a in range(6):
        length += _value_length(values, a, pieces)
    return length


@njit(cache=True)
def told_length(seed, split, text, i, law):
    """The part that differs: the six templates without their values (and what joining with a value changes)."""
    pieces, length = law.pieces, 0
    _, _, templates = _templates(seed, split, text, i, pieces.base)
    for a in range(6):
        length += _width(pieces, BETWEEN + a, templates[a]) + _width(pieces, AFTER + a, templates[a])
    if len(pieces.whole):
        values = attributes(seed, i, law.sizes)
        for a in range(1, 6):
            whole = _whole(values, a, templates[a], pieces)
            if whole:
                length += pieces.start[whole + 3] - pieces.start[whole] - _value_length(values, a, pieces)
                length -= _width(pieces, BETWEEN + a, templates[a]) + _width(pieces, AFTER + a, templates[a])
    return length


@njit(cache=True)
def _name_length(seed, i, law):
    first, middle, last = name(seed, i, law.sizes)
    return _width(law.pieces, FIRST, first) + _width(law.pieces, MIDDLE, middle) + _width(law.pieces, LAST, last)


@njit(cache=True)
def _value_length(values, a, pieces):
    if a > 0:
        return _width(pieces, VALUE + a, _value(values, a))
    return _width(pieces, MONTH, values[0]) + _width(pieces, DAY, values[1]) + _width(pieces, YEAR, values[2])


@njit(cache=True)
def _width(pieces, kind, i):
    p = pieces.base[kind] + i
    return pieces.start[p + 1] - pieces.start[p]
