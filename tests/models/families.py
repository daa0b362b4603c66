"""One small model of every kind, for tests that must cover all kinds, and tokens."""

import torch

from canonlm.models.mixers import MIXERS

MAMBA = {"mamba_state_size": 8, "mamba_n_groups": 2}
FAMILIES = {
    "llama": {"canon_set": "ABCD", "qk_norm": True},
    **{name: {"mixers": [name], "canon_set": "AbBCD"} for name, mixer in MIXERS.items() if mixer.recurrent},
    "mamba2": {"mixers": ["mamba2"], "canon_set": "AbBCD", **MAMBA},
    "hybrid": {"mixers": [*MIXERS], "num_hidden_layers": len(MIXERS), "canon_set": "ABCD", **MAMBA},
    "sites": {"canon_set": "E:smear,A:avg,Q:k3,KV:dynamic:scaled,OM:scaled,D:k2:id", "num_key_value_heads": 2},
    "window": {"sliding_window": 5, "attention_sink": True, "attention_gate": True, "canon_set": "AB"},
    "alternating": {"sliding_window": 5, "sliding_layers": [True, False], "canon_set": "AB"},
    "mla": {"mixers": ["mla"], "canon_set": "ABCD", "attention_gate": True},
    "attnres": {"attention_residuals": True, "mixers": ["gla", "attention"], "canon_set": "AC"},
    "moe": {"mlp": "moe", "num_experts": 4, "intermediate_size": 24, "canon_set": "ABC"},
}


def ids(*shape):
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(sum(shape)))
