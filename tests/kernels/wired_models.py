"""Tiny decoders, with and without kernels, and a counter of the kernels that ran."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from kernel_cases import Case, small_tiles
from torch.utils._python_dispatch import TorchDispatchMode

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.ops.kernels import api, dispatch

MODELS = {
    "llama+canon": {"canon_set": "ABCD"},
    "llama+canon=KVOM:scaled": {"canon_set": "KVOM:scaled"},
    "gdn.llama": {"num_hidden_layers": 2, "mixers": ["gdn", "attention"], "canon_sets": ["AbBCD", "ABCD"]},
    "llama+canon=ABCD:silu": {"canon_set": "EABCD:silu", "canon_bias": True, "mlp": "standard"},
}
SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tiny_model(name, **config):
    model = CanonLMForCausalLM(CanonLMConfig(**{**SIZES, **MODELS.get(name, {"canon_set": name}), **config})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1.0 if "embed" in key else parameter.shape[-1] ** -0.5
            parameter.copy_(1 + 0.2 * noise if "norm" in key else noise * scale)
    return model


class Count(TorchDispatchMode):
    """Counts the runs of each kernel."""

    def __init__(self):
        super().__init__()
        self.kernels = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func.name().partition("::")
        if space == "canonlm" and name in KERNELS:
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


FORMS = ("conv", "gated", "normed", "rotary")
KERNELS = {f"{form}{end}" for form in FORMS for end in ("", "_backward", "_with_state")} | {
    "step",
    "gated_step",
    "normed_step",
}


@contextmanager
def kernels(on=True):
    """Use small tiles, and no trials, which take minutes in the interpreter."""
    with small_tiles(Case()), pytest.MonkeyPatch.context() as patch, Count() as count:
        patch.setattr(dispatch, "_JUDGES", {name: lambda *_: True for name in dispatch.KERNELS})
        if not on:
            patch.setattr(api, "_look_for_triton", lambda: "none")
        yield count.kernels
    assert on or not count.kernels


def tokens(batch=2, time=11):
    return torch.randint(1, 23, (batch, time), generator=torch.Generator().manual_seed(time))


def left_padded(batch=2, time=11):
    return (torch.arange(time) >= torch.tensor([[3], [0]])[:batch]).long()


def documents(batch=2, time=11):
    return (torch.arange(time) >= torch.tensor([[4], [6]])[:batch]).long() + (torch.arange(time) >= 7).long()
