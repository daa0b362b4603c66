"""From a run's configuration to its model and its device."""

from typing import Any, ClassVar, get_origin

import torch
from pydantic import ValidationError, create_model

from canonlm.errors import InvalidSetting, expected, refused
from canonlm.models import CanonLMConfig, CanonLMForCausalLM, archs
from canonlm.train import trackers
from canonlm.train.config import RunConfig, Settings

_SET_ELSEWHERE = {
    "vocab_size",
    "max_position_embeddings",
    "init_seed",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
}
_FIELDS: dict[str, Any] = {
    name: (annotation, None)
    for name, annotation in CanonLMConfig.__annotations__.items()
    if name not in _SET_ELSEWHERE and get_origin(annotation) is not ClassVar
}
Fields = create_model("Fields", __base__=Settings, **_FIELDS)
"""`model.fields`: any field of `CanonLMConfig` that nothing else decides."""


def model_config(run: RunConfig) -> CanonLMConfig:
    """The decoder that `run` asks for. InvalidSetting where arch, sizes and fields do not fit together."""
    sizes = run.model
    if run.built_task is not None:
        vocab_size = len(run.built_task.vocab)
    elif sizes.vocab_size is not None:
        vocab_size = sizes.vocab_size
    else:
        raise InvalidSetting("model.vocab_size", "model.vocab_size: missing; expected an integer > 0")
    try:
        Fields.model_validate(sizes.fields)
    except ValidationError as error:
        raise refused(error, Fields, "model.fields.") from None
    if sizes.hidden_size % sizes.num_attention_heads:
        what = f"a divisor of model.hidden_size = {sizes.hidden_size}"
        raise expected("model.num_attention_heads", what, sizes.num_attention_heads)
    head_dim = sizes.fields.get("head_dim") or sizes.hidden_size // sizes.num_attention_heads
    try:
        named = archs.resolve(run.arch, head_dim=head_dim, num_heads=sizes.num_attention_heads)
    except ValueError as error:
        raise InvalidSetting("arch", error) from None
    try:
        return CanonLMConfig(
            vocab_size=vocab_size,
            max_position_embeddings=run.data.seq_len,
            num_hidden_layers=sizes.num_hidden_layers,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_attention_heads,
            init_seed=run.train.seed,
            **{**named, **sizes.fields},
        )
    except InvalidSetting as error:
        raise InvalidSetting(f"model.fields.{error.key}", f"model.fields.{error}") from None


def build_model(run: RunConfig) -> CanonLMForCausalLM:
    return CanonLMForCausalLM(model_config(run))


def check(run: RunConfig) -> None:
    """InvalidSetting for what a run cannot be started with; nothing is built or written yet."""
    model_config(run)
    pick_device(run.train.device)
    trackers.check(run.track)


def pick_device(name: str) -> str:
    """`auto` is cuda where there is one, else cpu. ValueError for a device that torch does not see."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and device.type != "cpu":  # asked without touching the device, which would claim memory on it
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
            device = None
    if device is None:
        raise expected("train.device", "auto, cpu or a device that torch sees here", name)
    return name
