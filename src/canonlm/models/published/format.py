"""What a published configuration is to us: fields with types and defaults, and what they mean in our configuration."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from transformers import PreTrainedConfig

from canonlm.errors import expected, refused
from canonlm.models.config import CanonLMConfig
from canonlm.models.published.moves import Names

_HOUSEKEEPING = {"architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
"""Written by the library into every configuration; nothing that a model computes."""

_NOT_COMPUTED_WITH = {
    *("canon_sets", "canon_frozen", "num_experts", "expert_capacity", "router_loss_weight", "attention_dropout"),
    *("z_loss", "z_loss_weight"),
    *("initializer", "initializer_range", "init_base_std", "init_std_factor", "init_seed", "zeyuan_layernorm"),
    *("use_cache", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
}
"""Our fields that an export may lose: initial weights, losses, generation, and what another field decides."""

ATTENTION_ONLY = {
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "qk_norm"),
    *("rope_theta", "rope_dim", "rope_heads", "alibi"),
}


class Published(BaseModel):
    """A published configuration. Fields typed `Any` change speed, rounding or initial weights only; those with one
    literal are choices that the release offers and our decoder does not compute."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    not_used: ClassVar[set[str]]  # our fields that such a model does not compute with

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Self:
        params = {key: value for key, value in params.items() if key not in _HOUSEKEEPING}
        if strange := sorted(params.keys() - cls.model_fields.keys()):
            raise ValueError(f"params: unknown {', '.join(_with_guess(key, cls.model_fields) for key in strange)}")
        try:
            return cls.model_validate(params)
        except ValidationError as error:
            raise refused(error, cls, "params.") from None

    def config(self) -> CanonLMConfig:
        raise NotImplementedError

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        """The inverse of `config`, as far as the format can say it."""
        raise NotImplementedError

    def names(self) -> Names:
        raise NotImplementedError

    def dump(self) -> dict[str, Any]:
        return self.model_dump()

    def check_holds(self, config: CanonLMConfig) -> None:
        """ValueError if reading this back would be another model than `config`."""
        back, own = self.config(), {field.name for field in fields(CanonLMConfig)}
        own -= {field.name for field in fields(PreTrainedConfig)}
        lost = [
            f"{key} = {_meaning(config, key)!r} (would be {_meaning(back, key)!r})"
            for key in sorted(own - _NOT_COMPUTED_WITH - self.not_used)
            if _meaning(config, key) != _meaning(back, key)
        ]
        if lost:
            raise ValueError(f"the format cannot hold {'; '.join(lost)}")


class Release(Published):
    """A configuration of the release's classes in the style of transformers."""

    mixer: ClassVar[str]
    same: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "canon_kernel": "canon_kernel",
        "canon_residual": "canon_residual",
        "canon_activation": "canon_activation",
        "tie_word_embeddings": "tie_word_embeddings",
        "initializer_range": "initializer_range",
        "use_cache": "use_cache",
        "pad_token_id": "pad_token_id",
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
    }
    """Fields that mean what a field of ours means."""

    vocab_size: PositiveInt = 32000
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    canon_set: str = ""
    canon_bias: Literal[False] = False
    canon_kernel: PositiveInt = 4
    canon_residual: bool = True
    canon_activation: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def config(self) -> CanonLMConfig:
        same = {ours: getattr(self, theirs) for theirs, ours in self.same.items()}
        return CanonLMConfig(mixers=[self.mixer], **same, **self.derived())

    def derived(self) -> dict[str, Any]:
        """Our other fields."""
        raise NotImplementedError

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        same = {theirs: getattr(config, ours) for theirs, ours in cls.same.items()}
        return {**same, "canon_set": config.sites(0)}


def sites(canon_set: str, short_conv: bool, without: str = "") -> str:
    """Their set without `without`; b stands for the short convolution, which they switch by another field."""
    return canon_set.translate({ord(site): None for site in f"b{without}"}) + "b" * short_conv


def share_of(key: str, width: int, heads: int) -> int:
    if width % heads:
        raise expected(f"params.{key}", f"a divisor of {width}, the width that its heads share", heads)
    return width // heads


def ratio(width: int, base: int) -> float:
    """The number r with int(base * r) == width: the release's way to read its expansion factors."""
    quotient = width / base
    return quotient if int(base * quotient) == width else math.nextafter(quotient, math.inf)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _meaning(config: CanonLMConfig, key: str) -> Any:
    if key == "canon_set":
        return [config.sites(layer_idx) for layer_idx in range(config.num_hidden_layers)]
    return getattr(config, key)


def _with_guess(name: str, names: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f'{name} (did you mean "{close[0]}"?)' if close else name
