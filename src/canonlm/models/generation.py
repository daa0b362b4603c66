"""Generation that is correct even if a model's code is not: a cache that changes the logits is not used, and callers
give prompts of one length at a time to a model that reads its padding. What works is tested at the first generation.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from canonlm.core.borrowed import keeping_modes, without_settings
from canonlm.core.errors import expected
from canonlm.models.interface import LanguageModel


class _Works(NamedTuple):
    cache: bool  # gives the same logits
    padding: bool  # on the left does not change the logits


class Generation:
    """The `generate` of a model from outside. Every process of a sharded model calls it with the same prompts."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        return without_settings(self.model.module).generate(input_ids, **options)  # type: ignore[operator]

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """As `LanguageModel.generate`."""
        if not self.works.cache:
            options = _without_cache(options)
        if not (attention_mask is None or attention_mask.all() or self.works.padding):
            what = "prompts of one length in a call, as this model reads its padding"
            raise expected("attention_mask", what, "a mask with padding")
        return self.generate(input_ids, attention_mask=attention_mask, **options)

    @cached_property
    @torch.no_grad()
    def works(self) -> _Works:
        module = self.model.module
        length = min(8, (self.model.context_length or 8) - 2)
        ids = torch.arange(1, 2 * length + 1, device=self.model.device).view(2, length)
        ids = ids % module.config.get_text_config().vocab_size
        padded = torch.ones_like(ids)
        padded[1, : length // 2] = 0
        with keeping_modes(module):
            module.eval()
            if self._is_right(ids, padded, cache=True):
                return _Works(cache=True, padding=True)
            cache = self._is_right(ids, torch.ones_like(ids), cache=True)
            works = _Works(cache, padding=self._is_right(ids, padded, cache=cache))
            if cache or works.padding or self._is_right(ids, torch.ones_like(ids), cache=False, equal_nan=True):
                return works
            raise ValueError(f"arch: {self.model.arch} cannot generate: its logits differ from those in training")

    def _is_right(self, ids: Tensor, mask: Tensor, cache: bool, equal_nan: bool = False) -> bool:
        """Whether the logits of two new tokens are equal to those without a cache and without padding.

        NaN shows nothing about a cache or padding, which are then not used, but a model with it can generate.
        """
        config = GenerationConfig(
            max_new_tokens=2, do_sample=False, use_cache=cache, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        try:
            with torch.autocast(ids.device.type, enabled=False):
                written = self.generate(ids, attention_mask=mask, generation_config=config)
                for row, length in enumerate(mask.sum(1).tolist()):
                    logits = torch.stack([step[row] for step in written.logits]).float()
                    tokens = written.sequences[row : row + 1, ids.shape[1] - length :]
                    right = self.model.logits(tokens)[0, length - 1 : -1]
                    tolerance, right = max(1e-3, 8 * torch.finfo(right.dtype).eps), right.float()
                    tolerance *= float(right.abs().nan_to_num(0, 0).max())
                    if not torch.allclose(logits, right, rtol=0, atol=tolerance, equal_nan=equal_nan):
                        return False
        except Exception:  # other people's code: it cannot be used this way
            return False
        return True


def _without_cache(options: dict[str, Any]) -> dict[str, Any]:
    if (config := options.get("generation_config")) is None:
        return {**options, "use_cache": False}
    config = GenerationConfig.from_dict(config.to_dict())
    config.use_cache = False
    return {**options, "generation_config": config}
