"""The loss in chunks against its bare products; attention that keeps packed documents apart, by implementation."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from models import step_of
from torch import Tensor, nn

from canonlm import CanonLMConfig
from canonlm.models.loss import loss_of_hidden
from canonlm.ops.varlen import documents_of
from gpu_parts.device import Device
from gpu_parts.rows import Row, not_available
from gpu_parts.steps import made

HEADS = {  # tokens, hidden, vocabulary
    "cuda": [(16384, 2048, 32000), (16384, 2048, 128256)],
    "cpu": [(32, 16, 64)],
}
CHUNKS = {"cuda": (2**26, 2**28, 2**30), "cpu": (2**10, 2**11, 2**12)}  # bytes of float32 logits


def loss(device: Device, out: Path) -> Iterator[Row]:
    for tokens, hidden, vocab in HEADS[device.kind]:
        settings = {"tokens": tokens, "hidden": hidden, "vocabulary": vocab}
        config = CanonLMConfig(vocab_size=vocab, hidden_size=hidden)
        h = device.randn(1, tokens, hidden).requires_grad_()
        weight = (device.randn(vocab, hidden) / hidden**0.5).requires_grad_()
        targets = torch.randint(vocab, (1, tokens), device=device.device)

        calls: dict[str, Callable[[], object]] = {}
        calls["products alone"] = partial(products, h.detach()[0], weight.detach())
        for size in CHUNKS[device.kind]:
            for compiled in (False, True) if device.is_gpu else (False,):
                name = f"chunks of {size:,} bytes" + (", compiled" if compiled else "")
                calls[name] = partial(in_chunks, config, h, weight, targets, size, compiled)
        took = device.median_us(calls)
        for name, us in took.items():
            row = Row(f"loss, {name}", settings, us, "us")
            if name != "products alone":
                row.more = {"of the products' speed": took["products alone"] / us}
            yield row


def products(h: Tensor, weight: Tensor) -> None:
    logits = h @ weight.mT
    logits @ weight  # the gradients, but for their values
    logits.mT @ h


def in_chunks(config: CanonLMConfig, h: Tensor, weight: Tensor, targets: Tensor, size: int, compiled: bool) -> None:
    with mock.patch("canonlm.models.loss.chunk_bytes", return_value=size):
        total, _ = loss_of_hidden(config, h, weight, targets, compiled=compiled)
    torch.autograd.grad(total, (h, weight))


# -- attention --------------------------------------------------------------------------------------------------------

ATTENTION = {
    "sdpa, no documents": "sdpa",
    "sdpa": "sdpa",
    "sdpa, dense mask": "sdpa",
    "flash_attention_3": "flash_attention_3",
    "flash_attention_2": "flash_attention_2",
    "flex_attention": "flex_attention",
}
WINDOWS = {"cuda": [(4, 4096), (1, 16384)], "cpu": [(2, 64)]}  # rows, tokens
DOCUMENTS = 16  # of a row
LAYERS = {"layers": 4, "hidden": 2048, "heads": 32, "width": 5632, "vocab": 512}
TINY_LAYERS = {"layers": 2, "hidden": 64, "heads": 2, "width": 128, "vocab": 64}


def attention(device: Device, out: Path) -> Iterator[Row]:
    """A training step of few layers. "sdpa" takes torch's kernel for documents where it can, "dense mask" never."""
    for batch, time in WINDOWS[device.kind]:
        shape = (LAYERS if device.is_gpu else TINY_LAYERS) | {"time": time, "batch": batch}
        input_ids = torch.randint(0, shape["vocab"], (batch, time), device=device.device)
        doc_ids = (torch.arange(time, device=device.device) * DOCUMENTS // time).expand(batch, -1)
        for name, implementation in ATTENTION.items():
            settings = {"rows": batch, "tokens": time, "attention": name}
            try:
                device.empty_cache()
                with masked() if name == "sdpa, dense mask" else nullcontext():
                    model = made("llama", shape, device).train()
                    model.set_attn_implementation(implementation)
                    documents = None if name == "sdpa, no documents" else doc_ids
                    step = step_of(WithDocuments(model, documents), input_ids)
                    us = device.median_us({"": step})[""]
                yield Row("step", settings, us / 1000, "ms", more={"peak GiB": device.peak_gib()})
            except Exception as error:  # not installed, not for this card, refused
                yield not_available("step", settings, error)


class WithDocuments(nn.Module):
    def __init__(self, model: nn.Module, doc_ids: Tensor | None) -> None:
        super().__init__()
        self.model, self.documents = model, None
        if doc_ids is not None:  # counted beforehand, as threads that read data do
            self.documents = documents_of(doc_ids.cpu()).each(lambda tensor: tensor.to(doc_ids.device))

    def forward(self, input_ids: Tensor, **kwargs):
        return self.model(input_ids, doc_ids=self.documents, **kwargs)


def masked() -> mock._patch:
    """Attention that does not take documents but as a mask."""
    return mock.patch("canonlm.models.attend.takes", return_value=False)
