"""A random permutation of n numbers without a table: each number's place is a function of the number and a key.

A number below rows * columns is a pair (row, column). A round adds a hash of one to the other, which can be undone, so
rounds are bijections of the pairs: a Feistel cipher whose halves are numbers instead of bits (Black, Rogaway 2002,
"Ciphers with arbitrary finite domains"). Rows and columns are close to sqrt(n), with fewer than `rows` pairs too many;
a result of n or above is permuted again until it is below n (cycle walking).
"""

import hashlib
import json
from functools import lru_cache

import numpy as np

from canonlm.core.numba_cache import njit
from canonlm.tasks.random import mix

ROUNDS = 20  # with 12, the 720 orders of six things do not come up equally often; with 16 they do

_U = np.uint64


@lru_cache(1024)
def key_of(*parts: int | str) -> np.uint64:
    """A key for `permuted`, hashed from numbers and names."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


@njit(cache=True, nogil=True)
def permuted(index, n, key):
    """The place of `index` among 0 … n - 1, for n < 2**62, in the permutation of a uint64 key."""
    rows = np.int64(np.sqrt(n))
    while rows * rows < n:
        rows += 1
    columns = (n + rows - 1) // rows
    while True:
        row, column = index // columns, index % columns
        for number in range(0, ROUNDS, 2):
            row = (row + _hashed(column, number, key, rows)) % rows
            column = (column + _hashed(row, number + 1, key, columns)) % columns
        index = row * columns + column
        if index < n:
            return index


@njit(cache=True, nogil=True)
def _hashed(half, number, key, below):
    return np.int64(mix(mix(key ^ _U(number)) ^ _U(half)) % _U(below))
