"""Advantages from rewards."""

import warnings
from typing import Literal

import torch
from torch import Tensor

from rlloss.errors import BatchError

Singleton = Literal["zero", "raw"]


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    normalize_std: bool = True,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Tensor:
    """Computes group-relative advantages, `A_i = (r_i - mean_g) / (std_g + eps)`.

    Mean and standard deviation (unbiased) are those of the group that `i` belongs to. A group of one has no spread to
    compare with: its advantage is 0, with a warning, or its reward where `singleton="raw"`.

    Args:
        rewards: `[N]`, one for each sequence.
        group_ids: `[N]`, any integers; sequences of one prompt share one.
        normalize_std: Divide by the standard deviation; False is Dr.GRPO's advantage (arXiv:2503.20783).
        eps: Added to the standard deviation.
        singleton: What a group of one gets.

    Returns:
        Advantages `[N]`, float32 or the wider type of the rewards, without a graph.

    Raises:
        BatchError: Shapes differ, ids are no integers, or a reward is NaN or infinite.

    Source:
        arXiv:2402.03300, section 4.1.2.
    """
    _check(rewards, group_ids)
    values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    _, dense = torch.unique(group_ids, return_inverse=True)
    groups = int(dense.max()) + 1 if dense.numel() else 0
    count = values.new_zeros(groups).index_add_(0, dense, torch.ones_like(values))
    mean = values.new_zeros(groups).index_add_(0, dense, values) / count
    centred = values - mean[dense]
    # a group of equal rewards has advantage 0 exactly, whatever the mean was rounded to
    anyone = values.new_zeros(groups).index_put_((dense,), values)
    others = values.new_zeros(groups).index_add_(0, dense, (values != anyone[dense]).to(values.dtype))
    centred = torch.where((others == 0)[dense], 0.0, centred)
    advantages = centred
    if normalize_std:
        squares = values.new_zeros(groups).index_add_(0, dense, centred.square())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = centred / (std + eps)[dense]
    alone = (count == 1)[dense]
    if bool(alone.any()):
        if singleton == "raw":
            return torch.where(alone, values, advantages)
        warnings.warn(
            f"{int(alone.sum())} of {groups} groups have one sequence: their advantage is 0. "
            'Sample more responses to each prompt, or use singleton="raw".',
            stacklevel=2,
        )
    return advantages


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise BatchError(
            f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} must both be [N], "
            "one entry for each sequence."
        )
    if group_ids.is_floating_point() or group_ids.is_complex() or group_ids.dtype == torch.bool:
        raise BatchError(f"group_ids are {group_ids.dtype}, expected integers.")
    if not bool(rewards.isfinite().all()):
        row = int((~rewards.isfinite()).nonzero()[0, 0])
        raise BatchError(f"rewards[{row}] is {float(rewards[row])}. A reward must be a finite number.")
