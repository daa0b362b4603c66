"""Products of decays within a chunk, compiled by numba. `ssd` imports it for its first chunk on a CPU."""

import numpy as np
from numpy.typing import NDArray

from canonlm.core.numba_cache import njit


@njit(cache=True, nogil=True)
def write_products(decay_XL: NDArray[np.floating], out_XLL: NDArray[np.floating]) -> None:
    """Write `ssd.products`. They are in float64, as those of `torch.cumprod` on a CPU."""
    rows, size = decay_XL.shape
    product = np.ones(size)
    for x in range(rows):
        product[:] = 1
        for i in range(size):
            decay = np.float64(decay_XL[x, i])
            for j in range(i):
                product[j] *= decay
                out_XLL[x, i, j] = product[j]
            out_XLL[x, i, i] = 1
            out_XLL[x, i, i + 1 :] = 0
