"""The causal convolution in plain PyTorch, for compilers and for every derivative; `causal_conv` describes it."""

import torch
from torch import Tensor


def same_document(doc_ids_BT: Tensor, kernel: int) -> Tensor:
    """`[K, B, T]`: whether the token i steps back (row i) is in the same document. History is in the first token's."""
    time = doc_ids_BT.shape[1]
    # Without history the first taps reach before the row: any value does, they are never read.
    padded = torch.cat([doc_ids_BT[:, :1].expand(-1, kernel - 1), doc_ids_BT], dim=1)
    return torch.stack([doc_ids_BT == padded[:, kernel - 1 - i : kernel - 1 - i + time] for i in range(kernel)])


def by_slices(x_BSC: Tensor, weight_KC: Tensor, same_doc: Tensor | None, history: int) -> Tensor:
    """The definition, tap by tap. `x` carries `history` extra tokens on its left: none, or K - 1."""
    taps, time = weight_KC.shape[0], x_BSC.shape[1] - history
    # Cast after padding: compilers then keep the padded input for the backward in its own dtype, such as bfloat16.
    padded = torch.nn.functional.pad(x_BSC, (0, 0, taps - 1 - history, 0))
    weights = [weight_KC[j] for j in range(taps)]
    if x_BSC.device.type == "cpu":
        # Their gradients are then summed over rows first, and over time last. In one sum, compiled code reads all B * T
        # tokens for 16 channels at a time: one cache line of every page of memory.
        weights = [weight_C.expand(time, -1) for weight_C in weights]
    y_BTC = padded[:, taps - 1 :].to(weight_KC.dtype) * weights[-1]
    for i in range(1, taps):
        past = padded[:, taps - 1 - i : taps - 1 - i + time].to(weight_KC.dtype)
        if same_doc is not None:
            past = past * same_doc[i, ..., None]
        y_BTC = y_BTC + past * weights[taps - 1 - i]
    return y_BTC.to(x_BSC.dtype)


def by_documents(x_BSC: Tensor, weight_KC: Tensor, doc_ids_BS: Tensor | None, history: int = 0) -> Tensor:
    """The same, with the documents of all S positions."""
    if doc_ids_BS is None:
        return by_slices(x_BSC, weight_KC, None, history)
    same_doc = same_document(doc_ids_BS[:, history:], len(weight_KC))
    return by_slices(x_BSC, weight_KC, same_doc.to(weight_KC.dtype), history)
