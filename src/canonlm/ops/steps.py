"""A recurrence, one token after the other: the definition of each, the form for decoding and in exported programs."""

from collections.abc import Callable

import torch
from torch import Tensor

from canonlm.ops.compiled import is_exporting
from canonlm.ops.derivatives import by_definition

Step = Callable[..., tuple[Tensor, Tensor]]


def by_steps(x_BT: Tensor) -> bool:
    """Whether a recurrence should go step by step: for one token, in an exported program, and for derivatives that the
    chunked forms and kernels do not have."""
    return (x_BT.shape[1] == 1 and not torch.is_grad_enabled()) or _exporting() or by_definition()


def _exporting() -> bool:
    """Not with `strict=True`, where a compiler traces: it cannot make the loop, but it keeps our operators."""
    return is_exporting() and not torch.compiler.is_dynamo_compiling()


def run_steps(step: Step, state: Tensor, *xs_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`y_t, state = step(state, *(x[:, t] for x in xs))` for all tokens. Returns (y_BT, the last state).

    An exported program gets a loop over any number of tokens, without an operator of ours.
    """
    time = xs_BT[0].shape[1]
    if _exporting() and time != 1:
        from torch._higher_order_ops.scan import scan_op  # imported here, as it takes a second

        xs_TB = [x.movedim(1, 0) for x in xs_BT]
        state, y_TB = scan_op(lambda *args: step(*args)[::-1], [state], xs_TB, ())
        return y_TB.movedim(0, 1), state
    if time == 0:
        y, _ = step(state, *(x.new_zeros(x.shape[0], *x.shape[2:]) for x in xs_BT))
        return y.new_empty(y.shape[0], 0, *y.shape[1:]), state
    outputs = []
    for t in range(time):
        y, state = step(state, *(x[:, t] for x in xs_BT))
        outputs.append(y)
    return torch.stack(outputs, dim=1), state
