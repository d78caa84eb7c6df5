"""Generalised advantage estimation over masks with holes."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from rlloss.errors import BatchError, require_known
from rlloss.functional.advantage_registry import register_advantage

HOLES = ("skip", "steps")


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    holes: Literal["skip", "steps"] = "skip",
) -> tuple[Tensor, Tensor]:
    """Estimates advantages and returns of every token of a response.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, `R_t = A_t + V_t`; after the last token
    that counts V and A are 0.

    Args:
        rewards: `[B, T]`, reward of each token.
        values: `[B, T]`, value of the state before each token.
        mask: `[B, T]`, bool or 0/1, tokens of the policy. Rewards and values elsewhere are not looked at.
        gamma: Discount.
        lam: Decay of the estimator, 0 (one step) to 1 (whole return).
        holes: What a masked token between two that count is. "skip" (verl's way): no step at all; t + 1 is the next
            token that counts, so that the text of a tool neither decays nor bootstraps. "steps" (TRL's way): a time
            step with reward 0 and value 0, which costs a factor `gamma lam`.

    Returns:
        Advantages and returns `[B, T]`, float32 or wider, without a graph, 0 at masked tokens (verl and TRL leave
        numbers there).

    Raises:
        BatchError: The shapes differ.
        UnknownNameError: `holes` is neither.

    Source:
        arXiv:1506.02438, equations 11 to 16.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2:
        raise BatchError(
            f"gae got rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)}; "
            f"expected three tensors of one shape [B, T]."
        )
    require_known("holes", holes, HOLES)
    counted = mask != 0
    # A recursion in 16 bits loses whole digits over some hundred tokens.
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rewards = torch.where(counted, rewards.detach().to(dtype), 0.0)
    values = torch.where(counted, values.detach().to(dtype), 0.0)
    moves = torch.ones_like(counted) if holes == "steps" else counted
    next_value, advantage = rewards.new_zeros(rewards.shape[0]), rewards.new_zeros(rewards.shape[0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(moves[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(moves[:, t], values[:, t], next_value)
        columns.append(advantage)
    stacked = torch.stack(columns[::-1], dim=1) if columns else rewards
    advantages = torch.where(counted, stacked, 0.0)
    return advantages, advantages + values


@register_advantage("gae")
@functools.wraps(gae, assigned=())
def gae_advantages(*given: Any, **named: Any) -> Tensor:
    """What `gae` returns first, of the same arguments."""
    return gae(*given, **named)[0]
