"""Token mixers: one file, one architecture. `MIXERS` in `models/config.py` lists them."""

import importlib

from torch import nn

from canonlm.models.config import MIXERS, CanonLMConfig


def build_mixer(config: CanonLMConfig, layer_idx: int) -> nn.Module:
    module, name = MIXERS[config.mixer(layer_idx)].path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(config, layer_idx)
