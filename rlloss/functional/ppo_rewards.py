"""Rewards of PPO: the score at the end of a response, and a KL penalty at each of its tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.functional.kl import kl_penalty


class TokenRewards(NamedTuple):
    """Rewards of each token.

    Attributes:
        rewards: `[B, T]`, score and penalty.
        penalties: `[B, T]`, `-kl_coef * kl` alone.
        kl: `[B, T]`, nats.
    """

    rewards: Tensor
    penalties: Tensor
    kl: Tensor


def compute_rewards(
    scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    kl_coef: float,
    kl_kind: str = "kl",
    kl_value_cap: float | None = 10.0,
) -> TokenRewards:
    """Places the score on the last token of each response, and a KL penalty on every token.

    `r_t = -kl_coef kl_t`, plus the score where t is the last token that counts. A response without any token has no
    place for its score and gets none.

    Args:
        scores: `[B]`, one for each response, or `[B, T]`, added as it is where the mask counts.
        log_probs: `[B, T]`, policy that sampled, nats; for "full" `[B, T, V]`, of every word.
        ref_log_probs: The shape of `log_probs`, reference policy.
        mask: `[B, T]`, bool or 0/1, tokens of the response.
        kl_coef: Factor of the penalty.
        kl_kind: "full" (exact KL over the vocabulary), or a kind of `kl_penalty`: kl, abs, mse, low_var_kl, ...
        kl_value_cap: Bound of low_var_kl.

    Returns:
        Rewards, penalties and KL, all `[B, T]`, float32 or wider, without a graph, 0 where the mask is 0 (TRL leaves
        numbers there).

    Raises:
        BatchError: A shape does not fit.
        UnknownNameError: `kl_kind` is unknown.

    Source:
        arXiv:1909.08593, section 2; TRL 0.11's PPOTrainer.
    """
    counted = mask != 0
    _check(scores, log_probs, ref_log_probs, counted, kl_kind)
    wide = torch.promote_types(torch.promote_types(log_probs.dtype, ref_log_probs.dtype), torch.float32)
    log_probs, ref_log_probs = log_probs.detach().to(wide), ref_log_probs.detach().to(wide)
    if kl_kind == "full":
        kl = torch.where(counted, full_kl(log_probs, ref_log_probs), 0.0)
    else:
        kl = kl_penalty(
            torch.where(counted, log_probs, 0.0), torch.where(counted, ref_log_probs, 0.0), kl_kind, kl_value_cap
        )
    penalties = torch.where(counted, -kl_coef * kl, 0.0)
    scores = scores.detach().to(penalties.dtype)
    if scores.ndim == 1:
        placed = torch.where(last_token(counted), scores[:, None], 0.0)
    else:
        placed = torch.where(counted, scores, 0.0)
    return TokenRewards(penalties + placed, penalties, kl)


def last_token(mask: Tensor) -> Tensor:
    """Marks the last token that counts of each row: `[B, T]` -> `[B, T]` bool; nothing in an empty row."""
    counted = mask != 0
    later = counted.flip(1).cumsum(1).flip(1)
    return counted & (later == 1)


def full_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Exact KL divergence `sum_v p_v (log p_v - log q_v)`: `[..., V]` twice -> `[...]`, nats."""
    probabilities = log_probs.exp()
    # A word of probability 0 adds nothing, whatever its log-probs are.
    return torch.where(probabilities > 0, probabilities * (log_probs - ref_log_probs), 0.0).sum(-1)


def _check(scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kl_kind: str) -> None:
    dims = 3 if kl_kind == "full" else 2
    if log_probs.shape != ref_log_probs.shape or log_probs.shape[:2] != mask.shape or log_probs.ndim != dims:
        raise BatchError(
            f"compute_rewards with kl_kind={kl_kind!r} got log_probs {tuple(log_probs.shape)}, ref_log_probs "
            f"{tuple(ref_log_probs.shape)} and mask {tuple(mask.shape)}; expected [B, T]"
            f"{' with a vocabulary dimension for both log-probs' if dims == 3 else ' for all three'}."
        )
    if scores.shape not in (mask.shape[:1], mask.shape):
        raise BatchError(
            f"scores has shape {tuple(scores.shape)}, expected {tuple(mask.shape[:1])}, one for each response, or "
            f"{tuple(mask.shape)}."
        )
