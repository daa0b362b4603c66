"""Products of decays within a chunk on a CPU, compiled by numba; `ssd.products` is the definition.

A self-contained model's folder has `kernels.stub` in place of this.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from canonlm.ops.causal_conv_cpu import has_numba


def usable(decay: Tensor) -> bool:
    return decay.device.type == "cpu" and type(decay) is Tensor and has_numba()


def products_on_cpu(decay_XL: Tensor) -> Tensor:
    """`ssd.products`, to the bit. `cumprod` would take a fifth of a small Mamba2's training step."""
    out_XLL = decay_XL.new_empty(*decay_XL.shape, decay_XL.shape[-1])
    _compiled()(decay_XL.flatten(0, -2).numpy(), out_XLL.flatten(0, -3).numpy())
    return out_XLL


@functools.cache
def _compiled() -> Any:
    from canonlm.core.numba_cache import njit  # imports numba

    return njit(cache=True, nogil=True)(_write_products)


def _write_products(decay_XL: NDArray[np.floating], out_XLL: NDArray[np.floating]) -> None:
    """In float64, as `torch.cumprod` on a CPU."""
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
