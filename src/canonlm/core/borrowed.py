"""Uses of a model that leave the caller's object as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel


def without_settings(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, with the same parts and hooks, but without generation settings of its own: the library would use
    them (a repetition penalty, beams) for all settings that a caller of `generate` leaves unset."""
    same: Any = object.__new__(type(model))
    vars(same).update(vars(model))
    same.generation_config = GenerationConfig()
    return same


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """After this context every part is in training or evaluation mode as before."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
