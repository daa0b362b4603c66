"""From a run's configuration to its model and its device."""

import warnings
from typing import Any

import torch
from torch import nn

from canonlm.core.errors import InvalidSetting, expected
from canonlm.core.limits import check_memory
from canonlm.core.ranks import ranks
from canonlm.models.build import build, complete_name
from canonlm.models.interface import LanguageModel, Sizes, learns_positions
from canonlm.models.matching import kinds_of, match_to
from canonlm.train import trackers
from canonlm.train.config import RunConfig
from canonlm.train.optim import lr_scales, matching

SAMPLE_BYTES = 500
"""Min bytes of a test sample with its arrays."""


def sizes_of(run: RunConfig) -> Sizes:
    sizes = run.model
    if run.built_task is not None:
        vocab_size = len(run.built_task.vocab)
    elif sizes.vocab_size is not None:
        vocab_size = sizes.vocab_size
    else:
        raise InvalidSetting("model.vocab_size", "model.vocab_size: missing; expected an integer > 0")
    given = sizes.model_dump(exclude={"vocab_size", "matched", "weights", "weights_sha256"})
    return Sizes(**given, vocab_size=vocab_size, seq_len=run.data.seq_len)


def build_model(run: RunConfig, device: str = "cpu", *, saved: bool = False) -> LanguageModel:
    """The model of a run with its initial weights; on "meta", without values. InvalidSetting if architecture, sizes and
    fields do not fit together, or have no effect (unless the run is a `saved` one)."""
    with torch.device(device):
        model = build(run.arch, sizes_of(run), run.train.seed, saved=saved)
    _freeze(model.module, run.train.freeze)
    return model


def _freeze(module: nn.Module, patterns: list[str]) -> None:
    """The last pattern that matches a parameter's name decides; `!` before it: the parameter trains."""
    parameters = dict(module.named_parameters())
    frozen: dict[str, bool] = {}
    for pattern in patterns:
        names = matching(pattern.removeprefix("!"), parameters, "train.freeze")
        frozen |= dict.fromkeys(names, not pattern.startswith("!"))
    if parameters and all(frozen.get(name) for name in parameters):
        raise expected("train.freeze", "patterns that leave a parameter to train", patterns)
    for name, parameter in parameters.items():
        if frozen.get(name):
            parameter.requires_grad_(False)


def state_bytes(run: RunConfig) -> int | None:
    """Bytes of state of a sequence of `data.seq_len` tokens; None if the model returns no cache."""
    state = build_model(run, "meta").state(run.data.seq_len)
    return None if state is None else state.total


def with_complete_name(run: RunConfig, *, saved: bool = False) -> RunConfig:
    """The run with the complete name of its architecture: fields that a name can express move into it. saved: as of
    `complete_name`."""
    name, fields = complete_name(run.arch, sizes_of(run), saved=saved)
    return run.model_copy(update={"arch": name, "model": run.model.model_copy(update={"fields": fields})})


def matched(run: RunConfig, reference: LanguageModel, match: str) -> dict[str, Any]:
    """Changes to `model` of a run that give it as many parameters, or bytes of state, as the reference has; match: as
    `--match`. InvalidSetting if no size does."""
    changes = match_to(reference, run.arch, sizes_of(run), kinds_of(match))
    return {"fields": {key: after for key, (_, after) in changes.items()}, "matched": changes} if changes else {}


def check(run: RunConfig) -> None:
    """InvalidSetting for a run that cannot be started; writes nothing."""
    model = build_model(run, "meta")
    check_fits(run, model, pick_device(run.train.device))
    _check_length(run, model)
    trackers.check(run.track)
    lr_scales(model.module, run.train.optim)


def _check_length(run: RunConfig, model: LanguageModel) -> None:
    """InvalidSetting if a window is longer than the model's table of positions: it would fail in the middle of a
    run."""
    longest, more = model.context_length if learns_positions(model.module) else None, run.train.eval_beyond or 0
    if longest is None or run.data.seq_len + more <= longest:
        return
    what = f"as {model.arch} has learned {longest:,} positions"
    if run.data.seq_len > longest:
        raise expected("data.seq_len", f"at most {longest}, {what}", run.data.seq_len)
    raise expected("train.eval_beyond", f"no value, {what}", more)


def check_fits(run: RunConfig, model: LanguageModel, device: str) -> None:
    """InvalidSetting if this process needs more memory than there is, by a lower bound: weights, gradients and AdamW's
    two averages in float32, the windows of a step, the inputs of all blocks, the test samples."""
    _, processes, _ = ranks()
    if device.startswith("cuda") and (advice := slow_width(run, model)):
        warnings.warn(advice, stacklevel=2)
    sizes, itemsize = run.model, 2 if run.train.precision == "bf16" else 4
    windows = -(-run.train.batch_size * run.parallel.tp * run.parallel.cp // processes)
    at_once = min(windows, run.parallel.micro_batch_size or windows)
    check_memory("model", (4 * model.num_parameters + 12 * model.num_trained) / processes, device)
    key = "train.batch_size" if at_once == windows else "parallel.micro_batch_size"
    inputs = run.data.seq_len / run.parallel.cp * sizes.hidden_size * itemsize * sizes.num_hidden_layers
    check_memory("data.seq_len", inputs, device)
    check_memory("train.batch_size", windows * run.data.seq_len * 2 * 8)  # ids and targets
    check_memory(key, at_once * inputs, device)
    if run.task is not None:
        check_memory("train.eval_size", run.train.eval_size * SAMPLE_BYTES)


def slow_width(run: RunConfig, model: LanguageModel) -> str:
    """Advice on a wide MLP whose rows of bfloat16 a GPU cannot load in pieces of 16 bytes; "": there is none."""
    odd = {key: size for key, size in model.mlp_widths.items() if size % 8 and size > 1024}
    if run.train.precision != "bf16" or not odd:
        return ""
    [(key, size), *_] = odd.items()
    wider = -(-size // 64) * 64
    return f"{key} = {size:,} is not a multiple of 8, so a GPU is up to three times as slow at it as at {wider:,}"


def pick_device(name: str) -> str:
    """`auto` is cuda if available, else cpu. ValueError for a device that torch does not see."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and device.type != "cpu":  # checked without using the device, which would take memory on it
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if (
            accelerator is None
            or accelerator.type != device.type
            or (device.index or 0) >= torch.accelerator.device_count()
        ):
            device = None
    if device is None:
        raise expected("train.device", "auto, cpu or a device that torch sees here", name)
    return name
