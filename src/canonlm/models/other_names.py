"""Settings under the names of other versions and of other models: read where we have the same, else refused by name."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from canonlm.core.errors import expected, unknown
from canonlm.models.mixers.base import MIXERS

FLAT_OPTIONS = {
    "linear_num_heads": ("num_heads",),
    "linear_num_key_value_heads": ("num_key_value_heads",),
    "linear_key_head_dim": ("key_head_dim",),
    "linear_value_head_dim": ("value_head_dim", "head_dim"),
    "mamba_state_size": ("state_size",),
    "mamba_n_groups": ("n_groups",),
    "output_gate": ("output_gate",),
    "output_gate_rank": ("output_gate_rank",),
    "clamp_min": ("clamp_min",),
    "kv_lora_rank": ("kv_lora_rank",),
}
"""Names of options in configurations of version 0.1, where they were fields and every recurrent mixer had the same; the
last is what `--match state` changes."""

_CHANGES_RESULTS = re.compile(
    "rope|rotary|^sliding_window|attention_chunk|softcap|multiplier|logits?_scal|embedding_scal|scale_emb|pre_attn_scalar"
    "|pdrop|dropout|clip_qkv|norm_eps|layer_?norm|norm_type|bias$|qk_norm|experts(?!_impl)|lora_rank|^d_(model|ff|kv)$|^ffn_dim$"
    "|^n_(layer|head|embd|inner|positions)s?$|^num_layers$|activation|position_embedding|^mamba_|^linear_|^ssm_"
    "|parallel_(attn|residual)|bidirectional|^per_layer_config$|attn_output_gate|first_k_dense|^qk_.*head_dim$"
)
"""Names of settings in transformers' causal models that change what is computed."""

_COUNTS = re.compile("^n_|^d_|^num_layers$|^ffn_dim$|_rank$|head_dim$|_size$")
"""Those among them where 1 is a count and changes something, too. (`first_k_dense_replace=1`, which would, too, is set
on all models by transformers' own tests.)"""


def read_rotary(settings: dict[str, Any], theta: float, default: float) -> float:
    """The base of the rotary positions. Takes `rope_parameters` (transformers 5), `rope_scaling` and
    `partial_rotary_factor` out of `settings`. ValueError for all that `rope_theta` and `rope_dim` cannot express."""
    given: dict[str, Any] = {key: settings.pop(key) for key in ("rope_parameters", "rope_scaling") if key in settings}
    factor: dict[str, Any] = {"partial_rotary_factor": settings.pop("partial_rotary_factor", None)}
    for key, value in given.items():
        if not isinstance(value, dict | None):
            raise expected(key, "an object such as {'rope_type': 'default', 'rope_theta': 500000.0}", value)
        value = dict(value or {})
        factor[f"{key}.partial_rotary_factor"] = value.pop("partial_rotary_factor", None)
        base = value.pop("rope_theta", None)
        if value.pop("rope_type", value.pop("type", "default")) != "default" or any(map(_is_set, value.values())):
            raise expected(key, "rope_type 'default' alone: the decoder scales no positions", given[key])
        if base is not None and theta not in (base, default):
            raise expected(f"{key}.rope_theta", f"rope_theta = {theta}", base)
        theta = theta if base is None else base
    for key, value in factor.items():
        if value not in (None, 1):
            raise expected(key, "1, or rope_dim, the number of channels to rotate, in place of it", value)
    return theta


def refuse_unknown(settings: dict[str, Any], fields: Iterable[str]) -> None:
    """ValueError for a setting that we do not have and that would change what is computed, that is an option of a
    mixer, or that looks like one of our `fields`. Others belong to tools that keep notes in configurations."""
    names = [name for name in fields if not name.startswith("_")]
    for key, value in settings.items():
        if key == "is_causal" and value is False:
            raise expected(key, "true: Canon layers and recurrences read the past alone", value)
        if key.startswith("_") or key in names or value is None:
            continue
        if having := [name for name, mixer in MIXERS.items() if key in mixer.Options.__dataclass_fields__]:
            raise expected(key, f"no such setting: it is an option of {', '.join(having)}, in mixer_options", value)
        if difflib.get_close_matches(key, names, cutoff=0.9):
            raise unknown("setting", key, names)
        if _CHANGES_RESULTS.search(key) and (_is_set(value) or (value == 1 and _COUNTS.search(key))):
            raise expected(key, "no such setting: the decoder has nothing like it", value)


PASSED_ON = (
    *("output_attentions", "output_hidden_states", "return_dict", "position_ids", "cu_seq_lens_k", "max_length_k"),
    *("cache_position", "token_type_ids", "attention_instances", "logits_to_keep"),
)
"""Further arguments of forward. The first six belong to every model of transformers; the borders of keys are those of
queries, positions in a cache follow from the cache, there is one type of tokens; vLLM's attention takes the next, and
the last is for the head: TRL passes it to both."""


def check_arguments(arguments: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The further arguments of a forward that attention gets. ValueError for one that nothing here reads. known: the
    names of the forward's other arguments."""
    off = {"is_causal": True, "output_router_logits": False}
    for name, value in arguments.items():
        if name not in PASSED_ON and value is not None and value is not off.get(name):
            raise unknown("argument of forward", name, [*known, *PASSED_ON], "Arguments of forward")
    not_of_attention = ("cu_seq_lens_k", "max_length_k", "cache_position", "token_type_ids", "logits_to_keep", *off)
    return {name: value for name, value in arguments.items() if name not in not_of_attention and value is not None}


def _is_set(value: object) -> bool:
    """Whether a value is more than "off": 1 is that of factors and counts."""
    return bool(value) and (value is True or value != 1)
