"""Advantages token by token: `[B, T]` rewards and mask to `[B, T]`, 0 where the mask is 0, without a graph."""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlloss.distributed import Group
from rlloss.errors import BatchError, require_known
from rlloss.functional.advantage_registry import register_advantage
from rlloss.functional.groups import Groups, check_rewards
from rlloss.functional.masked import masked_whiten

Align = Literal["token", "column"]


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted rewards from each token on: `G_t = r_t + gamma G_(t+1)` over the tokens that count.

    A token that does not count is no time step: it neither discounts nor resets.

    Args:
        rewards: `[B, T]`; what stands at tokens that do not count is ignored.
        mask: `[B, T]`, bool or 0/1.
        gamma: Discount of a step.

    Returns:
        `[B, T]` float32 or wider, 0 where the mask is 0.

    Raises:
        BatchError: Shapes differ, or a reward that counts is not finite.
    """
    counted, values = _counted(rewards, mask)
    running = values.new_zeros(values.shape[0])
    found = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        running = torch.where(counted[:, t], values[:, t] + gamma * running, running)
        found[:, t] = torch.where(counted[:, t], running, 0.0)
    return found


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus_advantages(rewards: Tensor, mask: Tensor, gamma: float = 1.0, group: Group = None) -> Tensor:
    """REINFORCE++: rewards-to-go, whitened over all tokens of all ranks (arXiv:2501.03262, section 3).

    Args:
        rewards: `[B, T]`, KL penalties included.
        mask: `[B, T]`.
        gamma: Discount.
        group: Ranks that hold parts of the batch; None is every rank.
    """
    return masked_whiten(rewards_to_go(rewards, mask, gamma), mask, group=group)


@register_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, group: Group = None
) -> Tensor:
    """REINFORCE++ with the group's mean as baseline: `r_i - mean_g` on every token, whitened over tokens and ranks.

    A group of one has no baseline and keeps its reward.

    Args:
        rewards: `[B]`, one for each response.
        group_ids: `[B]`.
        mask: `[B, T]`.
        group: Ranks that hold parts of the batch; None is every rank.
    """
    groups = Groups(rewards, group_ids)
    centred = groups.finish(groups.centred(), "raw")
    return masked_whiten(centred[:, None].expand(mask.shape), mask, group=group)


@register_advantage("remax")
def remax_advantages(rewards: Tensor, mask: Tensor, baselines: Tensor) -> Tensor:
    """ReMax: rewards-to-go minus the reward of the greedy response (arXiv:2310.10505, algorithm 1).

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]`.
        baselines: `[B]`, reward of the greedy response to the same prompt.
    """
    if baselines.shape != rewards.shape[:1] or not bool(baselines.isfinite().all()):
        raise BatchError(f"baselines {list(baselines.shape)}: expected {list(rewards.shape[:1])} finite numbers.")
    found = rewards_to_go(rewards, mask)
    return torch.where(mask != 0, found - baselines.to(found)[:, None], 0.0)


def squared_score_norms(log_prob: Tensor, sum_pi_squared: Tensor, is_weights: Tensor | None = None) -> Tensor:
    """Squared norm of `d log pi(y) / d logits`: `1 - 2 pi(y) + sum_v pi(v)^2`, times the squared importance weight.

    Args:
        log_prob: `[B, T]` of the sampled words, nats.
        sum_pi_squared: `[B, T]`, sum of the squared probabilities of all words.
        is_weights: `[B, T]` or None.
    """
    norms = 1.0 - 2.0 * log_prob.detach().exp() + sum_pi_squared.detach()
    return norms if is_weights is None else norms * is_weights.detach().square()


@register_advantage("optimal_token_baseline", aliases=("tir_optimal_token_baseline",))
def optimal_token_baseline_advantages(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    squared_norms: Tensor,
    align: Align = "token",
    zero_tail: bool = True,
) -> Tensor:
    """Rewards-to-go minus the baseline of least variance at each place of the responses to a prompt.

    With `W_t` the running sum of `squared_norms`, which estimates the squared norm of the gradient so far,
    `b_t = sum_i G_it W_it / sum_i W_it` over the responses of the
    group that have a token at place t. A response in a group of one has no baseline.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]`.
        group_ids: `[B]`.
        squared_norms: `[B, T]`, see `squared_score_norms`.
        align: "token": place t is the t-th token that counts (verl's tir variant; right for masks with holes);
            "column": place t is column t.
        zero_tail: No baseline for the longest response beyond the second longest, where it would be its own.

    Source:
        verl's `optimal_token_baseline`; Greensmith, Bartlett and Baxter (2004), theorem 8.
    """
    require_known("align", align, get_args(Align))
    counted, _ = _counted(rewards, mask)
    returns = rewards_to_go(rewards, mask)
    check_rewards(returns.sum(1), group_ids)
    energy = torch.where(counted, squared_norms.detach().to(returns.dtype), 0.0).cumsum(1)
    order = _to_front(counted) if align == "token" else torch.arange(mask.shape[1]).to(mask.device).expand(mask.shape)
    at = counted.gather(1, order)
    moved, weight = returns.gather(1, order), torch.where(at, energy.gather(1, order), 0.0)
    baseline = _group_baseline(moved, weight, group_ids)
    baseline = torch.where(_without_company(at, group_ids, zero_tail), 0.0, baseline)
    placed = torch.zeros_like(returns).scatter(1, order, baseline)
    return torch.where(counted, returns - placed, 0.0)


def _group_baseline(returns: Tensor, weight: Tensor, group_ids: Tensor) -> Tensor:
    groups, dense = _dense(group_ids)

    def over(numbers: Tensor) -> Tensor:
        return numbers.new_zeros((groups, numbers.shape[1])).index_add(0, dense, numbers)[dense]

    return over(returns * weight) / (over(weight) + 1e-8)


def _without_company(at: Tensor, group_ids: Tensor, tail: bool) -> Tensor:
    """Places where a response has nobody to compare with: a group of one, or its tail beyond the second longest."""
    groups, dense = _dense(group_ids)
    lengths = at.sum(1)
    longest = lengths.new_zeros(groups).scatter_reduce(0, dense, lengths, "amax")[dense]
    second = torch.where(lengths == longest, 0, lengths)
    second = lengths.new_zeros(groups).scatter_reduce(0, dense, second, "amax")[dense]
    ties = torch.bincount(dense[lengths == longest], minlength=groups)[dense]
    column = torch.arange(at.shape[1], device=at.device)
    beyond = ((lengths == longest) & (ties == 1))[:, None] & (column >= second[:, None])
    single = (torch.bincount(dense, minlength=groups)[dense] == 1)[:, None].expand(at.shape)
    return single | beyond if tail else single


def _dense(group_ids: Tensor) -> tuple[int, Tensor]:
    dense = torch.unique(group_ids, return_inverse=True)[1]
    return (int(dense.max()) + 1 if dense.numel() else 0), dense


def _to_front(counted: Tensor) -> Tensor:
    """The order of columns with the tokens that count first, `[B, T]`."""
    return (~counted).to(torch.int8).argsort(dim=1, stable=True)


def _counted(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if rewards.ndim != 2 or rewards.shape != mask.shape:
        raise BatchError(f"rewards {list(rewards.shape)} and mask {list(mask.shape)} must both be [B, T].")
    counted = mask != 0
    values = torch.where(counted, rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32)), 0.0)
    if not bool(values.isfinite().all()):
        row, column = (~values.isfinite()).nonzero()[0].tolist()
        raise BatchError(f"rewards[{row}, {column}] is {float(values[row, column])}. A reward must be a finite number.")
    return counted, values
