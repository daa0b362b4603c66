"""The score of guessing one of several random words in sight, where one is right: the share of the most frequent."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def largest_shares(most: int, *sizes: int) -> np.ndarray:
    """[most], the mean share of the most frequent of 1 … most words, by simulation. A word is of a group, all equally
    likely, and any of the `sizes[group]` words in it."""
    rng, places = np.random.default_rng(0), np.arange(most)
    group = rng.integers(len(sizes), size=(max(4, 2**18 // most), most))
    words = np.cumsum((0, *sizes))[group] + rng.integers(np.array(sizes)[group])
    order = words.argsort(axis=1, kind="stable")
    equal = np.diff(np.take_along_axis(words, order, 1), axis=1, prepend=-1) == 0
    first = np.maximum.accumulate(np.where(equal, 0, places), axis=1)
    times = np.empty_like(order)  # how often a row has had this word, this time included
    np.put_along_axis(times, order, places - first + 1, 1)
    return np.maximum.accumulate(times, axis=1).mean(0) / (places + 1)
