"""The reference of all cases: one forward over one row, without cache, padding or batch."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from canonlm.core.cache_name import CACHE, CACHE_NAMES
from canonlm.core.errors import Unsupported

LENGTHS = (4, 9, 6)
"""Tokens of the prompts."""

NEW = 6
"""Tokens that are generated."""

LIMITS = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""Max difference of logits that counts as rounding, in standard deviations of the logits, by the model's precision."""


@dataclass(frozen=True)
class Outcome:
    """`passed`, `differs` (a wrong answer without an error), `failed` (an error in the model's code, with its line in
    `detail`), or `refused` (the use is not supported, in words of ours or of the library). error: the largest
    difference of logits, in standard deviations of the true ones; None for `failed` and `refused`."""

    case: str
    state: Literal["passed", "differs", "failed", "refused"]
    error: float | None
    detail: str


class Subject:
    """The model that is checked, and its inputs."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self.accepts = set(inspect.signature(model.forward).parameters)
        self.without_cache = {"use_cache": False} if "use_cache" in self.accepts else {}
        self.limit = LIMITS.get(model.dtype, LIMITS[torch.float32])
        generator = torch.Generator().manual_seed(seed)
        config = model.config.get_text_config()
        special = {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")}
        plain = torch.tensor([token for token in range(config.vocab_size) if token not in special])
        draws = torch.randint(len(plain), (len(LENGTHS), max(LENGTHS)), generator=generator)
        self.rows = plain[draws].to(model.device)
        self.following = plain[torch.randint(len(plain), (len(LENGTHS), NEW), generator=generator)].to(model.device)

    @property
    def prompts(self) -> list[Tensor]:
        """Prompts of different lengths."""
        return [row[:length] for row, length in zip(self.rows, LENGTHS, strict=True)]

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        return self.model(input_ids=input_ids, **options)

    def truth(self, tokens: Tensor) -> Tensor:
        """Logits `[T, V]` of one row `[T]`."""
        with torch.no_grad():
            logits = self.forward(tokens[None], **self.without_cache).logits
        if logits.shape[:2] != (1, len(tokens)):
            raise ValueError(f"expected logits [1, {len(tokens)}, vocabulary], got {list(logits.shape)}")
        return logits[0]

    def error(self, logits: Tensor, true: Tensor) -> float:
        """The largest difference, in standard deviations of the true logits; infinite for NaN and other shapes."""
        if logits.shape != true.shape:
            return torch.inf
        difference = (logits.double() - true.double()).abs().max() / true.double().std().clamp(min=1e-30)
        return float(difference.nan_to_num(nan=torch.inf))

    def written(self, prompts: Sequence[Tensor], output: Any) -> float:
        """The error of the logits that `generate` returned with its tokens."""
        errors = []
        for index, prompt in enumerate(prompts):
            new = output.sequences[index][-len(output.logits) :]
            true = self.truth(torch.cat([prompt, new[:-1]]))[len(prompt) - 1 :]
            errors.append(self.error(torch.stack([step[index] for step in output.logits]), true))
        return max(errors)

    def greedy(self, prompt: Tensor, new: Tensor) -> float:
        """The gap between the largest logit and that of the chosen token, in the same unit."""
        true = self.truth(torch.cat([prompt, new[:-1]]))[len(prompt) - 1 :].double()
        chosen = true.gather(1, new[:, None])[:, 0]
        return float(((true.max(1).values - chosen) / true.std()).max().nan_to_num(nan=torch.inf))

    def write(self, input_ids: Tensor, **options: Any) -> Any:
        """Generate NEW tokens, greedily unless `options` change that."""
        usual = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        settings = {key: value for key, value in options.items() if key not in ("attention_mask", "assistant_model")}
        inputs = {key: value for key, value in options.items() if key not in settings}
        config = GenerationConfig(
            **{**usual, **settings}, return_dict_in_generate=True, output_logits=True, output_scores=True
        )
        inputs.setdefault("attention_mask", torch.ones_like(input_ids))
        return self.model.generate(input_ids, generation_config=config, **inputs)  # type: ignore[operator]

    def step(self, tokens: Tensor, cache: Any = None, **options: Any) -> tuple[Tensor, Any]:
        """Logits of `tokens`, `[B, T]`, and the cache after them."""
        name = next((key for key in CACHE_NAMES if key in self.accepts), None)
        if name is None:
            raise Unsupported(CACHE, "its forward takes no cache")
        known = {key: value for key, value in options.items() if key in self.accepts}
        with torch.no_grad():
            output = self.forward(tokens, use_cache=True, **({} if cache is None else {name: cache}), **known)
        cache = next((output[key] for key in CACHE_NAMES if output.get(key) is not None), None)
        if cache is None:
            raise Unsupported(CACHE, "its forward returns no cache")
        return output.logits, cache
