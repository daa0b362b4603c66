"""Claims decided by counting: nothing is trained, and nothing is uncertain."""

from dataclasses import dataclass

import torch

from canonlm.models.build import build
from canonlm.models.interface import Sizes


@dataclass(frozen=True)
class Counted:
    """Parameters that Canon layers add, as a share of a model's parameters without its embedding and head."""

    model: str
    share: float


def canon_parameters() -> list[Counted]:
    """For Llama with Canon layers at A, B, C and D (claim C04): GPT-2's size, and the 1.3B of the paper."""
    return [
        Counted("12 layers, width 768", _added(12, 768, 12)),
        Counted("24 layers, width 2048", _added(24, 2048, 32)),
    ]


def _added(layers: int, width: int, heads: int) -> float:
    plain, canon = (_blocks(arch, layers, width, heads) for arch in ("llama", "llama+canon"))
    return (canon - plain) / plain


def _blocks(arch: str, layers: int, width: int, heads: int) -> int:
    sizes = Sizes(vocab_size=64, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, seq_len=512)
    with torch.device("meta"):
        blocks = build(arch, sizes).blocks.values()
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())
