"""A model from a published configuration and tensors, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from canonlm.core.errors import expected, unknown
from canonlm.models.config import CanonLMConfig
from canonlm.models.modeling import CanonLMForCausalLM
from canonlm.models.published.format import Published, Release, check_same
from canonlm.models.published.linear import GatedDeltaNetCanon, GLACanon, Mamba2Canon
from canonlm.models.published.lingua import Lingua
from canonlm.models.published.llama import LlamaCanon
from canonlm.models.published.rename import check_state, list_moves

RELEASES: dict[str, type[Release]] = {
    "LlamaCanon": LlamaCanon,
    "GLACanon": GLACanon,
    "GatedDeltaNetCanon": GatedDeltaNetCanon,
    "Mamba2Canon": Mamba2Canon,
}
"""The release's classes in the style of transformers, by the `model_type` of their configurations."""


_NOTES = ("published", "architectures", "dtype", "transformers_version", "_name_or_path", "layer_types")
"""Fields of our configuration that do not belong to the model's design."""


def parse(params: Mapping[str, Any]) -> Published:
    """Read a `config.json` (with a `model_type`) or a `params.json` (with a `model`, or the content of one)."""
    if "model_type" in params:
        if params["model_type"] not in RELEASES:
            raise unknown("model_type", params["model_type"], RELEASES)
        return RELEASES[params["model_type"]].parse(params)
    return Lingua.parse(params["model"] if isinstance(params.get("model"), Mapping) else params)


def build(
    params: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> CanonLMForCausalLM:
    """Our model for a published checkpoint: `params` is its configuration, `state` its tensors under their own names,
    taken in their own precision or in `dtype`.

    ValueError for any field that means something we cannot compute, and for tensors that are missing, unknown or of
    another shape, all of which it lists.
    """
    published = parse(params)
    config = published.config()
    with torch.device("meta"):
        model = CanonLMForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    moves = list_moves(published.names(), config, shapes)
    check_state(moves, state, shapes)
    ours: dict[str, Tensor] = {}
    for move in moves:
        theirs = state[move.theirs] if move.theirs in state else state[str(move.tied_to)]
        ours.update((name, tensor.to(dtype, copy=True)) for name, tensor in move.read(theirs, shapes))
    model.load_state_dict(ours, assign=True)
    model.tie_weights()
    # Kept in our `config.json`, so that an export gives the same files again.
    absent = [move.theirs for move in moves if move.theirs not in state]
    model.config.published = {"params": dict(params), "absent": absent}
    return model.eval()


def export(
    model: CanonLMForCausalLM, tensors: Mapping[str, Tensor] | None = None, *, lingua: bool = False, **params: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse: `(params, state)` of the release's class in the style of transformers, or of its training runs
    (`lingua`). Further `params` are the format's own choices, such as `rope_version`. A model that was read from the
    format, and whose configuration has not changed since, gets the same configuration and tensors again.

    `tensors`, by our names, are written instead of the weights (gradients, for example). ValueError if the format
    cannot express what the model computes.
    """
    config = model.config
    kinds: dict[str, type[Release]] = {kind.mixer: kind for kind in RELEASES.values()}
    if config.mixers[0] not in kinds or len(set(config.mixers)) > 1:
        raise expected("mixers", f"one of {', '.join(kinds)} in all layers", config.mixers)
    kind = Lingua if lingua else kinds[config.mixers[0]]
    first = None if params else _first(config, kind)
    published = parse(first["params"]) if first else kind.parse({**kind.of(config), **params})
    check_same(kind.__name__, config, published.config())
    tensors = model.state_dict() if tensors is None else tensors
    moves = list_moves(published.names(), config, tensors)
    state = {move.theirs: move.write(tensors) for move in moves if not (first and move.theirs in first["absent"])}
    return _in_precision(first["params"], model) if first else published.dump(), state


def _first(config: CanonLMConfig, kind: type[Published]) -> dict[str, Any] | None:
    """The configuration of this kind from which the model was built (`build`), if it is still the model's."""
    match getattr(config, "published", None):
        case {"params": dict(params), "absent": list(absent)} as first:
            try:
                published = parse(params)
                fields = {**published.config().to_dict(), **dict.fromkeys(_NOTES)}
            except (ValueError, TypeError):  # somebody has edited it
                return None
            same = type(published) is kind and fields == {**config.to_dict(), **dict.fromkeys(_NOTES)}
            return first if same and all(isinstance(name, str) for name in absent) else None
    return None


def _in_precision(params: dict[str, Any], model: CanonLMForCausalLM) -> dict[str, Any]:
    precision = str(model.dtype).removeprefix("torch.")
    return {key: precision if key in ("dtype", "torch_dtype") else value for key, value in params.items()}


_IN_LLAMA = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "attention_bias", "mlp_bias"),
    *("attention_dropout", "max_position_embeddings", "tie_word_embeddings", "initializer_range", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)


def to_llama(model: CanonLMForCausalLM) -> LlamaForCausalLM:
    """transformers' own Llama with the same weights. ValueError names what it could not compute."""
    shared = {key: getattr(model.config, key) for key in _IN_LLAMA}
    check_same("plain Llama", model.config, CanonLMConfig(**shared))
    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    config = LlamaConfig(**{key: value for key, value in shared.items() if key != "rope_theta"}, rope_parameters=rope)
    config.rope_theta = model.config.rope_theta  # where mlx-lm and llama.cpp look; they ignore rope_parameters
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype).eval()
