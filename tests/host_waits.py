"""Counts, without a GPU, the operations at which the CPU would wait for one."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING_OPS = {  # the value, or the size of the result, is read back
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose),
    *(aten.nonzero, aten.masked_select, aten.bincount),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive),
}
WAITING_CALLS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}


class Waits(TorchDispatchMode):
    """Operators, including those of the backward, that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.seen, self.ops = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        sized_by_values = func.overloadpacket is aten.repeat_interleave and not (kwargs or {}).get("output_size")
        of_a_list = func.overloadpacket is aten.lift_fresh and args[0].ndim > 0  # which is copied to the GPU
        if func.overloadpacket in WAITING_OPS or by_mask or sized_by_values or of_a_list:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Methods of tensors that read a value, without an operator if the tensor is on the CPU."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := getattr(func, "__name__", "")) in WAITING_CALLS:
            self.seen.append(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))
