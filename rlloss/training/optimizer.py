"""AdamW as the configs describe it, with a learning rate that is a function of the step alone."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlloss.distributed import all_reduce_sum
from rlloss.training.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Returns AdamW over the parameters that want gradients; vectors have no weight decay.

    Its moments are there from the start, as AdamW itself would make them in its first step, for a checkpoint to fill.
    """
    wanted = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [pair for pair in wanted if pair[1].ndim > 1], "weight_decay": config.weight_decay},
        {"params": [pair for pair in wanted if pair[1].ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    for _, parameter in wanted:
        moments = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimiser's own tensors by the names of their parameters."""
    return {
        f"optimizer.{name}.{slot}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for slot, value in optimizer.state[parameter].items()
    }


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
    norm = _clip([p.grad for p in model.parameters() if p.grad is not None], max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


@torch.no_grad()
def _clip(grads: list[Tensor], max_norm: float) -> Tensor:
    """Scales gradients to a norm of at most `max_norm`; of a sharded one, this rank's part counts once."""
    parts = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
    others = [grad for grad in grads if not isinstance(grad, DTensor)]
    norm = nn.utils.get_total_norm(others)
    if parts:
        squares = all_reduce_sum(nn.utils.get_total_norm(parts).double().square())
        norm = (squares + norm.double().square()).sqrt().float()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in parts + others:
        grad.mul_(scale.to(grad.device))
    return norm
