"""The tokens that a kernel may look back at: one byte per token, made once per batch and read by every layer.

`reach[b, t]`, `[B, T]` int8: min(7, tokens since the document began) in its lowest three bits, so that tap i counts
where reach >= i (K <= 8); bit 3 is set at padding, whose inputs count as zeros. The first document of a row has no
beginning (7 everywhere): what comes before it is the state, or zeros.
"""

import torch
from torch import Tensor

from canonlm.ops.varlen import starts

MAX_KERNEL = 8
PAD = 8


def reach_of(doc_ids_BT: Tensor | None = None, mask_BT: Tensor | None = None) -> Tensor | None:
    """`reach` of documents and padding; None if there are neither.

    Args:
        doc_ids_BT: `[B, T]` integers; where they change a document begins.
        mask_BT: `[B, T]`, 0 at padding.
    """
    if (begins := starts(doc_ids_BT)) is not None:
        steps = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
        since = steps - torch.where(begins, steps, -MAX_KERNEL).cummax(1).values
        reach = since.clamp(max=MAX_KERNEL - 1).to(torch.int8)
    elif mask_BT is not None:
        reach = torch.full(mask_BT.shape, MAX_KERNEL - 1, dtype=torch.int8, device=mask_BT.device)
    else:
        return None
    return (reach if mask_BT is None else torch.where(mask_BT == 0, reach + PAD, reach)).contiguous()


def last_real(mask_BT: Tensor) -> Tensor:
    """`[B]` int32: the position of each row's last real token, -1 in a row without any."""
    steps = torch.arange(1, mask_BT.shape[1] + 1, dtype=torch.int32, device=mask_BT.device)
    return ((mask_BT != 0) * steps).amax(1) - 1
