"""Shared by the task tests: many documents quickly, and one chi-square threshold."""

import numpy as np
import pytest
from scipy import stats


@pytest.fixture(scope="session")
def documents():
    def draw(task, split, count, seed=0):
        """The instances j = 0 … count-1 of one very long window, as lists of token ids: none is cut, so no bias."""
        mean = np.mean([len(task.sample(split, seed, 1, j).tokens) for j in range(100)])
        row = task.windows(split, seed, 0, 1, seq_len=int(1.3 * mean * count + 10 * task.max_len))
        ends = np.flatnonzero(np.diff(row.doc_ids[0])) + 1
        assert len(ends) >= count
        return [part.tolist() for part in np.split(row.input_ids[0, : ends[count - 1]], ends[: count - 1])]

    return draw


@pytest.fixture(scope="session")
def fits():
    def check(observed, distribution=None):
        """Chi-square test of counts against a distribution (default: uniform). Fixed seeds make it deterministic."""
        observed = np.array([*observed], float)
        distribution = (
            np.full(len(observed), 1 / len(observed)) if distribution is None else np.asarray(distribution, float)
        )
        assert distribution.sum() == pytest.approx(1)
        assert (distribution * observed.sum()).min() > 5, "too few draws for a chi-square"
        p = stats.chisquare(observed, distribution / distribution.sum() * observed.sum()).pvalue
        assert p > 1e-4, f"p = {p:.2g}: {observed.astype(int).tolist()}"

    return check
