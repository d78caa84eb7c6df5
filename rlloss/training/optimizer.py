"""AdamW as the configs describe it, with a learning rate that is a function of the step alone."""

import math

import torch
from torch import nn

from rlloss.training.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Returns AdamW over the parameters that want gradients; vectors have no weight decay."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in wanted if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in wanted if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Returns the learning rate of a step: linear warm-up times a cosine from 1 to `final_fraction`.

    Args:
        config: Peak, warm-up and end.
        step: The step, from 0.
        steps: Steps in all.
    """
    rise = min(1.0, (step + 1) / (config.warmup_steps + 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps - 1)))
    return config.lr * rise * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


def apply_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, max_norm: float) -> float:
    """Clips the gradients, makes one step at a learning rate, clears them, and returns their norm before clipping."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
