"""AdamW and the learning rate as a function of the step."""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

from canonlm.core.errors import expected
from canonlm.train.config import Optim


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """AdamW with weight decay on all parameters, or on matrices (at least two dimensions): embeddings and convolutions,
    but not norms and biases, nor A_log, dt_bias and D of a recurrence. Parameters may be DTensors."""
    scales = lr_scales(model, config)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for decay, decayed in ((config.weight_decay, True), (0.0, False)):
        for name, p in model.named_parameters():
            if p.requires_grad and (config.decay == "all" or _is_matrix(name, p)) == decayed:
                groups.setdefault((decay, scales.get(name, 1.0)), []).append(p)
    listed = [{"params": of, "weight_decay": decay, "lr_scale": scale} for (decay, scale), of in groups.items()]
    return torch.optim.AdamW(listed, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Also False for vectors that a model keeps as one tensor: a bias per head, the coefficients of RWKV's shifts."""
    return parameter.ndim >= 2 and not name.endswith(("bias", "A_log", "shifts")) and "time_mix" not in name


def lr_scales(model: nn.Module, config: Optim) -> dict[str, float]:
    """The factors of the learning rate in `lr_scale`, by parameter name: that of the first pattern that matches."""
    names = dict(model.named_parameters())
    patterns = {pattern: matching(pattern, names, "train.optim.lr_scale") for pattern in reversed(config.lr_scale)}
    return {name: config.lr_scale[pattern] for pattern, matches in patterns.items() for name in matches}


def matching(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """The names that match; `*` stands for any letters. InvalidSetting, for `key`, if there is none."""
    if not (matches := [name for name in names if fnmatchcase(name, pattern)]):
        example = next(iter(names), "")
        raise expected(key, f"a pattern that matches a parameter, such as *canon* or {example}", pattern)
    return matches


def learning_rate(step: int, steps: int, config: Optim) -> float:
    """The rate of step 0 … steps - 1: linear from lr / warmup_steps to lr, then along the schedule to final_lr_ratio *
    lr, which step `steps` would have. wsd stays at lr until the last `decay_steps` steps and falls linearly there."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    length = config.decay_steps or max(1, steps - config.warmup_steps)
    remaining = min(1.0, (steps - step) / length)  # share of the decay still to come
    low = config.final_lr_ratio
    match config.schedule:
        case "cosine":
            return config.lr * (low + (1 - low) * 0.5 * (1 - math.cos(math.pi * remaining)))
        case "linear" | "wsd":
            return config.lr * (low + (1 - low) * remaining)
        case "constant":
            return config.lr
