"""AdamW and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from canonlm.train.config import Optim


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """AdamW with weight decay on all parameters, or on those with at least two dimensions: embeddings and convolutions,
    but not norms and biases, nor A_log, dt_bias and D of a recurrence. Parameters may be DTensors."""
    min_ndim = {"all": 0, "matrices": 2}[config.decay]
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= min_ndim]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < min_ndim]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


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
