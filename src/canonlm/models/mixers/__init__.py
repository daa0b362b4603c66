"""Token mixers: one file, one architecture. `MIXERS` in `models/config.py` says what each can do."""

from torch import nn

from canonlm.models.config import CanonLMConfig
from canonlm.models.mixers.attention import Attention

MIXER_CLASSES: dict[str, type[nn.Module]] = {"attention": Attention}


def build_mixer(config: CanonLMConfig, layer_idx: int) -> nn.Module:
    return MIXER_CLASSES[config.mixer(layer_idx)](config, layer_idx)
