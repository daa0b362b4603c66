"""Where a compiler must be kept from being too clever."""

import torch
from torch import Tensor


def written_out(x: Tensor) -> Tensor:
    """The same numbers, once, side by side in memory: a compiler for a CPU may not compute them again in every loop
    that reads them, nor read them where they lay before. In eager mode, and on a GPU, `x` itself."""
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return _written_out(x) if compiling and x.device.type == "cpu" else x


# An operator of its own is what a compiler does not look into.
@torch.library.custom_op("canonlm::written_out", mutates_args=())
def _written_out(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_written_out.register_fake(lambda x: x.new_empty(x.shape))
_written_out.register_autograd(lambda ctx, dx: dx)
