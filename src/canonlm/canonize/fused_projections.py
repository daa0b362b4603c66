"""The channels of queries, keys and values in a fused projection.

Every order in use is one pattern, repeated over groups of heads: `x.unflatten(-1, (groups, -1))[..., first:end]`.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from canonlm.canonize.find_modules import channels_out


@dataclass(frozen=True)
class Channels:
    """Some channels of a projection: `first` to `end` of each of `groups` equal parts."""

    groups: int
    first: int
    end: int

    @property
    def count(self) -> int:
        return self.groups * (self.end - self.first)


def channels_of(mixer: nn.Module, projection: nn.Module, role: str) -> dict[str, Channels] | None:
    """The channels of a projection by letter; None if they are not known. role: as in `find_modules.ROLES`."""
    width, name = channels_out(projection), type(mixer).__name__
    size: Any = mixer
    if role != "QKV":
        # Some models keep a gate of the mixer's output beside each head's queries.
        if role == "Q" and name.startswith(_GATED_QUERIES) and width % (2 * size.head_dim) == 0:
            return {"Q": Channels(width // (2 * size.head_dim), 0, size.head_dim)}
        return {role: Channels(1, 0, width)}
    if name.startswith(_PER_HEAD) or (
        name.startswith("Falcon") and not (size.new_decoder_architecture or size.multi_query)
    ):
        head_dim = next(getattr(mixer, key) for key in ("head_dim", "head_size") if hasattr(mixer, key))
        return _pattern(width // (3 * head_dim), 3 * head_dim, "QKV", [1, 1, 1])
    if name.startswith("Falcon"):
        groups = size.num_kv_heads if size.new_decoder_architecture else 1
        return _pattern(groups, width // groups, "QKV", [size.num_heads // groups, 1, 1])
    if name.startswith("GPTBigCode"):
        if size.multi_query:
            return _pattern(1, width, "QKV", [size.embed_dim, size.kv_dim, size.kv_dim])
        return _pattern(size.num_heads, width // size.num_heads, "QKV", [1, 1, 1])
    if name.startswith("CodeGen"):
        return _pattern(4, width // 4, "QVK", [1, 1, 1])
    if name.startswith("Phi3"):
        keys = size.config.num_key_value_heads
        return _pattern(1, width, "QKV", [size.config.num_attention_heads, keys, keys])
    if name.startswith("Qwen3NextGatedDeltaNet"):
        values = size.head_v_dim * size.num_v_heads // size.num_k_heads
        parts = [size.head_k_dim, size.head_k_dim, values, values]
        return _pattern(size.num_k_heads, width // size.num_k_heads, "QKVZ", parts)
    if hasattr(mixer, "key_dim") and hasattr(mixer, "value_dim"):
        return _pattern(1, width, "QKV", [size.key_dim, size.key_dim, size.value_dim])
    if name.startswith(_THIRDS):
        return _pattern(1, width, "QKV", [1, 1, 1])
    return None


_GATED_QUERIES = ("Qwen3Next", "Qwen3_5", "Qwen4")
_PER_HEAD = ("GPTNeoX", "Persimmon", "Bloom", "MiniMaxLightning")
_THIRDS = ("GPT2", "Mpt", "Attention", "DecisionTransformer", "ImageGPT")
"""`Attention` is that of openai-gpt."""


def _pattern(groups: int, width: int, letters: str, parts: list[int]) -> dict[str, Channels]:
    unit, channels, first = width // sum(parts), {}, 0
    for letter, part in zip(letters, parts, strict=True):
        channels[letter] = Channels(groups, first, first + part * unit)
        first += part * unit
    channels.pop("Z", None)
    return channels
