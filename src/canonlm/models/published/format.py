"""Published configurations: fields with types and defaults, and their translation to our configuration."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator
from transformers import PreTrainedConfig

from canonlm.canon.sites import SHORT_CONV, letters
from canonlm.core.errors import closest, expected, refused, shown
from canonlm.models.config import CanonLMConfig
from canonlm.models.fields import GROUPS
from canonlm.models.published.rename import Names

_HOUSEKEEPING = {"architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
"""Written by the library into every configuration; they do not change what a model computes."""

_NOT_COMPUTED_WITH = {
    *GROUPS["training"],
    *(GROUPS["unnamed"] - {"intermediate_size"}),
    *("init_seed", "max_position_embeddings", "zeyuan_layernorm", "attention_dropout"),
    *("canon_sets", "canon_frozen", "num_experts", "expert_capacity"),
}
"""Our fields that an export may lose: initial weights, losses, generation, and what another field decides."""


def check_same(kind: str, config: CanonLMConfig, back: CanonLMConfig) -> None:
    """ValueError if `back`, which is `config` written in a format and read again, is another model."""
    keys = {"mixers"}
    if config.mixers == back.mixers:
        keys = {field.name for field in fields(CanonLMConfig)} - {field.name for field in fields(PreTrainedConfig)}
        of_attention = GROUPS["attention"] | {"num_attention_heads"}  # other mixers do not read these
        keys -= _NOT_COMPUTED_WITH | ({"conv_kernel"} if config.mixers[0] == "attention" else of_attention)
        keys = (keys - {"mixer_options"}) | {f"mixer.{option}" for option in vars(config.options(0))}
    pairs = {key: (_meaning(config, key), _meaning(back, key)) for key in sorted(keys)}
    lost = [str(expected(key, shown(held), value)) for key, (value, held) in pairs.items() if value != held]
    if lost:
        raise ValueError(f"{kind}: {'; '.join(lost)}")


def _meaning(config: CanonLMConfig, key: str) -> Any:
    if key not in ("mixers", "canon_set"):
        return value_of(config, key)
    canon_sets = config.canon_sets or [config.canon_set] * config.num_hidden_layers
    layers = config.mixers if key == "mixers" else canon_sets
    return layers if len(set(layers)) > 1 else layers[0]


def value_of(config: CanonLMConfig, key: str) -> Any:
    """The value of one of our fields; `mixer.num_heads` is an option of its mixer."""
    group, _, name = key.rpartition(".")
    return getattr(config.options(0) if group else config, name)


class Published(BaseModel):
    """A published configuration. Fields typed `Any` change speed, rounding or initial weights only. Those with a single
    literal have more choices in the release, which our decoder does not compute."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

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
        """The same configuration in our fields."""
        raise NotImplementedError

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        """The inverse of `config`, as far as the format can express it."""
        raise NotImplementedError

    def names(self) -> Names:
        """This format's names of our modules."""
        raise NotImplementedError

    def dump(self) -> dict[str, Any]:
        return self.model_dump()


def as_named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


class Release(Published):
    """A configuration of the release's classes in the style of transformers."""

    mixer: ClassVar[str]
    same: ClassVar[dict[str, str]] = as_named(
        *("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "initializer_range", "use_cache"),
        *("canon_kernel", "canon_residual", "canon_activation", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
    """Fields with the same meaning as one of ours, and our name."""
    canons: ClassVar[str] = "AbBCD"

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

    @field_validator("canon_set")
    @classmethod
    def _has_sites(cls, value: str) -> str:
        for letter in letters():
            if letter in value and letter not in cls.canons:
                what = f"no site {letter}, which this class of the release does not have"
                raise expected("params.canon_set", what, value)
        return value

    def config(self, **extra: Any) -> CanonLMConfig:
        """Our configuration. `extra`: our fields that the class does not have."""
        same = {ours: getattr(self, theirs) for theirs, ours in self.same.items()}
        fields = {**same, **self.derived(), **extra}
        options = {key.removeprefix("mixer."): fields.pop(key) for key in list(fields) if key.startswith("mixer.")}
        return CanonLMConfig(mixers=[self.mixer], mixer_options={self.mixer: options}, **fields)

    def derived(self) -> dict[str, Any]:
        """Our fields that follow from several of theirs."""
        return {}

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        same = {theirs: value_of(config, ours) for theirs, ours in cls.same.items()}
        return {**same, "canon_set": config.sites(0)}


def sites(canon_set: str, short_conv: bool, without: str = "") -> str:
    """Their set without `without`; b stands for the short convolution, for which they have another field."""
    kept = (letter for letter in canon_set if letter not in SHORT_CONV + without)
    return "".join(kept) + SHORT_CONV * short_conv


def share_of(key: str, width: int, heads: int) -> int:
    if width % heads:
        raise expected(f"params.{key}", f"a divisor of {width}, the width that its heads share", heads)
    return width // heads


def ratio(width: int, base: int) -> float:
    """The number r with int(base * r) == width, as the release reads its expansion factors."""
    quotient = width / base
    return quotient if int(base * quotient) == width else math.nextafter(quotient, math.inf)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _with_guess(name: str, names: Mapping[str, Any]) -> str:
    close = closest(name, list(names))
    return f'{name} (did you mean "{close[0]}"?)' if close else name
