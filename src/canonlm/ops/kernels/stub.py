"""Replaces the kernels in a saved model's folder with its own code, which then computes in PyTorch."""

from typing import Any


def usable(*args: object, **kwargs: object) -> bool:
    return False


runs_on = usable
last_real: Any = None
reach_of = convolve = rotary = fits_normed = products_on_cpu = last_real
CANON = GATED = NORMED = Forms = last_real
