"""Advantages from one reward for each sequence: `[N]` rewards and group ids to `[N]` advantages, without a graph.

All of them: ids are any integers in any order; `singleton` says what a group of one gets ("zero" warns); a reward that
is infinite or NaN raises `BatchError`, and with `nan="exclude"` a NaN reward takes no part in its group and gets 0.
"""

from math import comb, sqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from rlloss.errors import BatchError, ConfigError, require_known
from rlloss.functional.advantage_registry import register_advantage
from rlloss.functional.groups import Groups, NanRewards, Singleton

Std = Literal["unbiased", "biased"]


@register_advantage("scaled")
def scaled_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    std: Std = "unbiased",
    nan: NanRewards = "exclude",
) -> Tensor:
    """Group-centred rewards over a standard deviation: of the group, of the whole batch, or of nothing.

    `A_i = (r_i - mean_g) / (std + eps)`. Where the standard deviation is not defined (fewer than two rewards) A is 0.

    Args:
        rewards: `[N]`.
        group_ids: `[N]`.
        scale: TRL's `scale_rewards`; "none" is Dr.GRPO's advantage.
        eps: Added to the standard deviation.
        std: Whether it divides by n - 1 or n.
        nan: "raise" or "exclude".

    Source:
        arXiv:2402.03300 (group), arXiv:2508.08221 (batch), arXiv:2503.20783 (none); TRL's defaults.
    """
    require_known("std", std, get_args(Std))
    groups = Groups(rewards, group_ids, nan)
    centred = groups.centred()
    if scale == "none":
        return centred
    if scale == "group":
        return centred / (groups.std(std == "biased") + eps)
    if scale != "batch":
        raise ConfigError(f"scale={scale!r}: expected 'group', 'batch' or 'none'.")
    taken = groups.values[groups.valid]
    if taken.numel() < 2:
        return torch.zeros_like(centred)
    return centred / (taken.std(correction=0 if std == "biased" else 1) + eps)


@register_advantage("dr_grpo")
def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor, singleton: Singleton = "zero") -> Tensor:
    """`A_i = r_i - mean_g` (arXiv:2503.20783, section 3.2).

    Args:
        rewards: `[N]`.
        group_ids: `[N]`.
        singleton: What a group of one gets.
    """
    groups = Groups(rewards, group_ids)
    return groups.finish(groups.centred(), singleton)


@register_advantage("length_scaled_grpo", aliases=("drgrpo_xtuner",))
def length_scaled_grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    max_length: float = 32768.0,
    eps: float = 1e-8,
    singleton: Singleton = "zero",
) -> Tensor:
    """`A_i = (r_i - mean_g) / (std_g + eps) * n_i / max_length`: what XTuner calls DrGRPO.

    Args:
        rewards: `[N]`.
        group_ids: `[N]`.
        lengths: `[N]`, tokens n_i of each response.
        max_length: Length that is divided by.
        eps: Added to the standard deviation.
        singleton: What a group of one gets.
    """
    groups = Groups(rewards, group_ids)
    scaled = groups.centred() / (groups.std() + eps)
    return groups.finish(scaled * _lengths(lengths, groups) / max_length, singleton)


@register_advantage("rloo")
def rloo_advantages(
    rewards: Tensor, group_ids: Tensor, singleton: Singleton = "zero", nan: NanRewards = "raise"
) -> Tensor:
    """Leave-one-out: `A_i = r_i - mean of the others of its group` (arXiv:2402.14740, equation 6).

    Args:
        rewards: `[N]`.
        group_ids: `[N]`.
        singleton: What a group of one gets.
        nan: "raise" or "exclude".
    """
    groups = Groups(rewards, group_ids, nan)
    advantages = groups.centred() * groups.count / (groups.count - 1).clamp(min=1)
    return groups.finish(advantages, singleton)


@register_advantage("opo")
def opo_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor, singleton: Singleton = "zero") -> Tensor:
    """`A_i = r_i - sum_g n_j r_j / sum_g n_j`, the optimal baseline under lengths (arXiv:2505.23585, equation 7).

    A group without any token has the plain mean as its baseline.

    Args:
        rewards: `[N]`.
        group_ids: `[N]`.
        lengths: `[N]`, tokens of each response.
        singleton: What a group of one gets.
    """
    groups = Groups(rewards, group_ids)
    weights = _lengths(lengths, groups)
    weights = torch.where(groups.sum(weights) > 0, weights, 1.0)
    baseline = groups.sum(weights * groups.values) / groups.sum(weights).clamp(min=torch.finfo(weights.dtype).tiny)
    equal = groups.extreme(groups.values, "amax") == groups.extreme(groups.values, "amin")
    return groups.finish(torch.where(equal, 0.0, groups.values - baseline), singleton)


@register_advantage("passk", aliases=("grpo_passk",))
def passk_advantages(rewards: Tensor, group_ids: Tensor, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Pass@k by its best sample: `(r_(1) - r_(2)) / (std_g + eps)` for the best of a group, 0 for the others.

    Where several share the best reward all get 0. A group of one, which has no second, gets 0 with a warning.

    Args:
        rewards: `[N]`.
        group_ids: `[N]`.
        normalize_std: Divide by the standard deviation.
        eps: Added to it.

    Source:
        arXiv:2503.19595, section 3.
    """
    groups = Groups(rewards, group_ids)
    best = groups.extreme(groups.values, "amax")
    is_best = groups.values == best
    second = groups.extreme(torch.where(is_best, -torch.inf, groups.values), "amax")
    single = is_best & (groups.sum(is_best.to(best.dtype)) == 1)
    gap = torch.where(single & second.isfinite(), best - second, 0.0)
    return groups.finish(gap / (groups.std() + eps) if normalize_std else gap, "zero")


@register_advantage("passk_analytic")
def passk_analytic_advantages(rewards: Tensor, group_ids: Tensor, k: int = 4, eps: float = 1e-6) -> Tensor:
    """Pass@k in closed form for right or wrong answers (arXiv:2508.10751, section 2.4; XTuner's passk).

    With n answers of a group, c of them right (reward above 0): `rho = 1 - C(n-c, k) / C(n, k)` (c / n for n < k) and
    `sigma = sqrt(rho (1 - rho)) + eps`. A right answer gets `(1 - rho) / sigma`, a wrong one
    `(1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma`. A group of equal answers gets 0: at no right answer the formula
    divides by eps alone, and XTuner's gives -1e6 there.

    Args:
        rewards: `[N]`.
        group_ids: `[N]`.
        k: Answers that are drawn.
        eps: Added to the standard deviation.
    """
    if k < 1:
        raise ConfigError(f"k={k}: expected at least 1.")
    groups = Groups(rewards, group_ids)
    right = groups.values > 0
    found = []
    for n, c, won in zip(groups.count.tolist(), groups.sum(right.double()).tolist(), right.tolist(), strict=True):
        found.append(_passk_of(int(n), int(c), won, k, eps))
    return groups.values.new_tensor(found)


def _passk_of(n: int, c: int, won: bool, k: int, eps: float) -> float:
    if c in (0, n):
        return 0.0
    rho = c / n if n < k else 1.0 - comb(n - c, k) / comb(n, k)
    sigma = sqrt(rho * (1.0 - rho)) + eps
    drawn = 0.0 if won or n < k else comb(n - c - 1, k - 1) / comb(n - 1, k - 1)
    return (1.0 - rho - drawn) / sigma


@register_advantage("gpg")
def gpg_advantages(rewards: Tensor, group_ids: Tensor, f_norm: float = 1.0, singleton: Singleton = "zero") -> Tensor:
    """`A_i = alpha (r_i - mean_g) / f_norm` with alpha = sequences / sequences of non-zero reward (arXiv:2504.02546).

    Args:
        rewards: `[N]`; alpha is that of this batch.
        group_ids: `[N]`.
        f_norm: Divisor.
        singleton: What a group of one gets; its reward is scaled in the same way.
    """
    groups = Groups(rewards, group_ids)
    alpha = groups.values.numel() / max(1, int((groups.values != 0).sum()))
    return groups.finish(groups.centred(), singleton) * (alpha / f_norm)


@register_advantage("gdpo")
def gdpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Each of several rewards is normalised in its group, then their weighted sum over the batch (arXiv:2601.05242).

    `x_i = sum_f w_f (r_if - mean_gf) / (std_gf + eps)`, `A = (x - mean) / (std + eps)` over sequences that have a
    reward; with `lengths` mean and std are those over tokens (verl).

    Args:
        rewards: `[N, F]`, or `[N]` for one. A NaN is left out; a sequence of NaN only gets 0.
        group_ids: `[N]`.
        weights: `[F]`; None is 1 for each.
        lengths: `[N]`, tokens of each response, or None.
        normalize_std: Divide by the groups' standard deviations.
        eps: Added to each standard deviation.
    """
    columns = rewards[:, None] if rewards.ndim == 1 else rewards
    if columns.ndim != 2 or (weights is not None and tuple(weights.shape) != (columns.shape[1],)):
        raise BatchError(
            f"rewards {list(rewards.shape)} and weights {None if weights is None else list(weights.shape)}: expected "
            f"[N, F] and [F]."
        )
    parts = []
    for column in columns.unbind(1):
        groups = Groups(column, group_ids, "exclude")
        parts.append(groups.centred() / (groups.std() + eps) if normalize_std else groups.centred())
    total = torch.stack(parts, dim=1)
    total = total.sum(1) if weights is None else (total * weights.to(total)).sum(1)
    valid = ~columns.isnan().all(dim=1)
    shares = valid.to(total.dtype) if lengths is None else torch.where(valid, lengths.to(total), 0.0)
    return _whitened(total, shares, eps)


def _whitened(values: Tensor, shares: Tensor, eps: float) -> Tensor:
    """`(x - mean) / (std + eps)` where each number counts `shares` times; 0 where it counts not at all."""
    count = shares.sum()
    if not bool(count > 1):
        return torch.zeros_like(values)
    mean = (shares * values).sum() / count
    std = ((shares * (values - mean).square()).sum() / (count - 1)).sqrt()
    return torch.where(shares > 0, (values - mean) / (std + eps), 0.0)


def _lengths(lengths: Tensor, groups: Groups) -> Tensor:
    if lengths.shape != groups.values.shape or bool((lengths < 0).any()):
        raise BatchError(f"lengths {list(lengths.shape)}: expected {list(groups.values.shape)} numbers, none negative.")
    return lengths.to(groups.values.dtype)
