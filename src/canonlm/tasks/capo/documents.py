"""Capo's documents as sequences of pieces, and their lengths.

Document d is the biography of person d for d < people; for larger d it is question (d - people) % 6 about person
(d - people) // 6. A person's texts differ in their templates and in the order of the sentences; both are drawn from a
stream keyed (seed, split, person, text number). A question has one text.
"""

from itertools import permutations
from typing import NamedTuple

import numpy as np

from canonlm.core.numba_cache import njit
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

LONGEST_PLAN = 64  # max pieces of a document: 6 sentences of 3 + 1 + 3 + 1
ORDERS = np.array(list(permutations(range(6))), np.int8)  # the first one is the order of ATTRIBUTES

# Roles of tokens, as in `Capo.test_batch`; tokens of the value of attribute a have OF_VALUE + a.
TEMPLATE, FIRST_NAME, FIRST_PRONOUN, OF_VALUE = range(4)


class TextSettings(NamedTuple):
    """Settings that a document's text depends on, in addition to its key."""

    pieces: Pieces
    sizes: Sizes
    people: int
    documents: int  # in a pass
    permute: bool
    fullname: bool


@njit(cache=True)
def pieces_of(seed, split, text, document, settings, plan, roles):
    """Write the pieces of a document after its bos to `plan`, and their roles to `roles`. Returns their number."""
    if document < settings.people:
        return _biography(seed, split, text, document, settings, plan, roles)
    question = document - settings.people
    return _question(seed, question // 6, question % 6, settings, plan, roles)


@njit(cache=True)
def _question(seed, i, a, settings, plan, roles):
    base = settings.pieces.base
    count = _put(plan, roles, 0, base[ASK + a], TEMPLATE)
    count = _put_name(seed, i, settings, FIRST_NAME, plan, roles, count)
    count = _put(plan, roles, count, base[ASKED + a], TEMPLATE)
    return _put_value(attributes(seed, i, settings.sizes), a, base, plan, roles, count)


@njit(cache=True)
def _biography(seed, split, text, i, settings, plan, roles):
    base = settings.pieces.base
    state, gamma, templates = _templates(seed, split, text, i, base)
    order = 0
    if settings.permute:
        state, order = below(state, gamma, len(ORDERS))
    values = attributes(seed, i, settings.sizes)
    count = 0
    for sentence in range(6):
        a = ORDERS[order, sentence]
        if sentence == 0 or settings.fullname:
            count = _put_name(seed, i, settings, TEMPLATE if sentence else FIRST_NAME, plan, roles, count)
        else:
            count = _put(plan, roles, count, base[PRONOUN] + i % 2, FIRST_PRONOUN if sentence == 1 else TEMPLATE)
        joined = _joined_pieces(values, a, templates[a], settings.pieces)
        if joined:
            count = _put(plan, roles, count, joined, TEMPLATE)
            count = _put(plan, roles, count, joined + 1, OF_VALUE + a)
            count = _put(plan, roles, count, joined + 2, TEMPLATE)
        else:
            count = _put(plan, roles, count, base[BETWEEN + a] + templates[a], TEMPLATE)
            count = _put_value(values, a, base, plan, roles, count)
            count = _put(plan, roles, count, base[AFTER + a] + templates[a], TEMPLATE)
    return count


@njit(cache=True)
def _templates(seed, split, text, i, base):
    """(state, gamma, the six templates) of a text: uniform draws from the stream that also gives the order."""
    state, gamma = stream(seed, split, i, text)
    state, t0, t1 = two_below(state, gamma, _count(base, 0), _count(base, 1))
    state, t2, t3 = two_below(state, gamma, _count(base, 2), _count(base, 3))
    state, t4, t5 = two_below(state, gamma, _count(base, 4), _count(base, 5))
    return state, gamma, (t0, t1, t2, t3, t4, t5)


@njit(cache=True)
def _count(base, a):
    return base[BETWEEN + a + 1] - base[BETWEEN + a]


@njit(cache=True)
def _joined_pieces(values, a, template, pieces):
    """The first of the three pieces of this sentence if the tokenizer joins its value with its words, else 0."""
    if a == 0 or len(pieces.joined) == 0:
        return np.int64(0)
    return np.int64(pieces.joined[pieces.base[BETWEEN + a] - pieces.base[BETWEEN] + template, _value(values, a)])


@njit(cache=True)
def _put(plan, roles, count, piece, role):
    plan[count] = piece
    roles[count] = role
    return count + 1


@njit(cache=True)
def _put_name(seed, i, settings, role, plan, roles, count):
    first, middle, last = name(seed, i, settings.sizes)
    count = _put(plan, roles, count, settings.pieces.base[FIRST] + first, role)
    count = _put(plan, roles, count, settings.pieces.base[MIDDLE] + middle, role)
    return _put(plan, roles, count, settings.pieces.base[LAST] + last, role)


@njit(cache=True)
def _put_value(values, a, base, plan, roles, count):
    if a > 0:
        return _put(plan, roles, count, base[VALUE + a] + _value(values, a), OF_VALUE + a)
    count = _put(plan, roles, count, base[MONTH] + values[0], OF_VALUE)
    count = _put(plan, roles, count, base[DAY] + values[1], OF_VALUE)
    return _put(plan, roles, count, base[YEAR] + values[2], OF_VALUE)


@njit(cache=True)
def _value(values, a):
    """The index of the value of attribute a > 0; company and company city have the same index."""
    return values[min(a, 4) + 2]


@njit(cache=True)
def length_of(seed, split, text, document, settings):
    """The number of tokens in a document: bos and its pieces."""
    templates = template_length(seed, split, text, document, settings) if document < settings.people else 0
    return fixed_length(seed, document, settings) + templates


@njit(cache=True)
def fixed_length(seed, document, settings):
    """The number of tokens that all texts of a document share: bos, names, pronouns, values; of a question, all."""
    pieces = settings.pieces
    if document >= settings.people:
        i, a = (document - settings.people) // 6, (document - settings.people) % 6
        length = 1 + _width(pieces, ASK + a, 0) + _width(pieces, ASKED + a, 0)
        return length + _name_length(seed, i, settings) + _value_length(attributes(seed, i, settings.sizes), a, pieces)
    values, of_name = attributes(seed, document, settings.sizes), _name_length(seed, document, settings)
    length = 1 + (6 * of_name if settings.fullname else of_name + 5 * _width(pieces, PRONOUN, document % 2))
    for a in range(6):
        length += _value_length(values, a, pieces)
    return length


@njit(cache=True)
def template_length(seed, split, text, i, settings):
    """The number of tokens that depend on the text: six templates without values, corrected for joined values."""
    pieces, length = settings.pieces, 0
    _, _, templates = _templates(seed, split, text, i, pieces.base)
    for a in range(6):
        length += _width(pieces, BETWEEN + a, templates[a]) + _width(pieces, AFTER + a, templates[a])
    if len(pieces.joined):
        values = attributes(seed, i, settings.sizes)
        for a in range(1, 6):
            joined = _joined_pieces(values, a, templates[a], pieces)
            if joined:
                length += pieces.start[joined + 3] - pieces.start[joined] - _value_length(values, a, pieces)
                length -= _width(pieces, BETWEEN + a, templates[a]) + _width(pieces, AFTER + a, templates[a])
    return length


@njit(cache=True)
def _name_length(seed, i, settings):
    first, middle, last = name(seed, i, settings.sizes)
    return (
        _width(settings.pieces, FIRST, first)
        + _width(settings.pieces, MIDDLE, middle)
        + _width(settings.pieces, LAST, last)
    )


@njit(cache=True)
def _value_length(values, a, pieces):
    if a > 0:
        return _width(pieces, VALUE + a, _value(values, a))
    return _width(pieces, MONTH, values[0]) + _width(pieces, DAY, values[1]) + _width(pieces, YEAR, values[2])


@njit(cache=True)
def _width(pieces, kind, i):
    p = pieces.base[kind] + i
    return pieces.start[p + 1] - pieces.start[p]
