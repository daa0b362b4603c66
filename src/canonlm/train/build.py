"""From a run's configuration to its model."""

from canonlm import archs
from canonlm.errors import expected, unknown
from canonlm.models import CanonLMConfig, CanonLMForCausalLM
from canonlm.train.config import RunConfig

_DERIVED = {"vocab_size", "max_position_embeddings", "init_seed", "num_hidden_layers", "hidden_size"}


def model_config(run: RunConfig) -> CanonLMConfig:
    """The decoder that `run` asks for. ValueError where arch, sizes and fields do not fit together."""
    sizes = run.model
    known = set(CanonLMConfig.__annotations__) - _DERIVED
    for key in sizes.fields:
        if key not in known:
            raise unknown("setting", f"model.fields.{key}", [f"model.fields.{name}" for name in known])
    if sizes.hidden_size % sizes.num_attention_heads:
        what = f"a divisor of model.hidden_size = {sizes.hidden_size}"
        raise expected("model.num_attention_heads", what, sizes.num_attention_heads)
    head_dim = sizes.fields.get("head_dim", sizes.hidden_size // sizes.num_attention_heads)
    return CanonLMConfig(
        vocab_size=len(run.built_task.vocab),
        max_position_embeddings=run.data.seq_len,
        num_hidden_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        init_seed=run.train.seed,
        **{**archs.resolve(run.arch, head_dim=head_dim), **sizes.fields},
    )


def build_model(run: RunConfig) -> CanonLMForCausalLM:
    return CanonLMForCausalLM(model_config(run))
