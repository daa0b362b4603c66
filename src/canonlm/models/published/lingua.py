"""Configurations of the release's training runs (Meta lingua's arguments): what it calls `model` in params.json."""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from canonlm.errors import expected, unknown
from canonlm.models.config import CanonLMConfig
from canonlm.models.published.format import Published, Release, round_up, sites
from canonlm.models.published.linear import GatedDeltaNetCanon, GLACanon, Mamba2Canon
from canonlm.models.published.llama import LlamaCanon, pairs_to_halves
from canonlm.models.published.moves import Names

_LINEAR = {"GLA5": "gla", "GDN2": "gdn", "Mamba2": "mamba2"}
"""By `model_name`; a Llama has none."""

_LAYER = {
    **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attention.canonB": "self_attn.canonB_q self_attn.canonB_k self_attn.canonB_v",
    **{f"feed_forward.w{i}": f"mlp.{x}_proj" for i, x in ((1, "gate"), (3, "up"), (2, "down"))},
    "feed_forward.canonD": "mlp.canonD_gate mlp.canonD_up",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "canonA": "canonA",
    "canonC": "canonC",
}
