"""AdamW and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from canonlm.train.config import Optim


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """Weight decay on matrices (embeddings and convolutions included), none on norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, config: Optim) -> float:
    """The rate of step 0 … steps - 1: linear from lr / warmup_steps to lr, then the schedule down to its end."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    low = config.final_lr_ratio
    if config.schedule == "cosine":
        return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
    if config.schedule == "linear":
        return config.lr * (1 - (1 - low) * progress)
    return config.lr
