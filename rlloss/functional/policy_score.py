"""Losses `-A sg(f) log_prob`: REINFORCE with a factor f that has no gradient, so no token loses its own by a clip."""

import math

import torch
from torch import Tensor

from rlloss.functional.bounds import bound
from rlloss.functional.policy import LOG_RATIO_BOUND
from rlloss.layout import Segments


def score_loss(log_prob: Tensor, advantages: Tensor, factor: Tensor | None = None) -> Tensor:
    """`-A sg(f) log_prob`, whose gradient in the log-prob is `-A f`; without a factor f is 1.

    Args:
        log_prob: `[N]`, nats.
        advantages: `[N]`.
        factor: `[N]` or None; no gradient flows into it.

    Returns:
        `[N]`.
    """
    scale = -advantages if factor is None else -advantages * factor.detach()
    return scale * log_prob


def tapered_factor(ratio: Tensor, advantages: Tensor) -> Tensor:
    """TOPR's factor: 1 where `A >= 0`, `min(r, 1)` below: a failed answer is pushed away only while it is likely.

    Source:
        arXiv:2503.14286, equation 8 with the bounds (0, 1) of its section 3.
    """
    return torch.where(advantages >= 0, 1.0, ratio.clamp(max=1.0))


def within_variation(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Tokens whose probability has not yet moved too far in the direction that the advantage pushes.

    `p - p_old <= high` where `A > 0`, else `p - p_old >= -low`: the binary total variation.

    Source:
        DPPO, arXiv:2602.04879.
    """
    move = (log_prob.exp() - old_log_prob.exp()).detach()
    return torch.where(advantages > 0, move <= high, move >= -low)


def within_divergence(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The same with the binary KL divergence as the measure.

    `K = p_old (log p_old - log p) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))`, at most `high` where `A > 0`
    and p rises, at most `low` where `A <= 0` and p falls.

    Source:
        DPPO, arXiv:2602.04879; the 1e-8 are verl's.
    """
    new, old = log_prob.detach(), old_log_prob.detach()
    p, p_old = new.exp(), old.exp()
    rest, rest_old = (1.0 - p).clamp(min=0.0) + 1e-8, (1.0 - p_old).clamp(min=0.0) + 1e-8
    divergence = p_old * (old - new) + (1.0 - p_old) * (rest_old / rest).log()
    return torch.where(advantages > 0, (divergence <= high) | (p <= p_old), (divergence <= low) | (p >= p_old))


def gamma_factor(
    log_ratio: Tensor,
    advantages: Tensor,
    segments: Segments,
    positive: tuple[float, float],
    negative: tuple[float, float],
    is_weights: Tensor | None = None,
) -> Tensor:
    """VESPO's factor: `W^k exp(lambda (1 - W))` of the sequence's ratio W, which is 1 at W = 1 and falls on both sides.

    `s = sum_t clamp(d_t, +-20)`, plus `sum_t log w_t` of given importance weights, clamped to `[log 1e-8, 20]`;
    `log f = lambda + k s - lambda exp(s)`.

    Args:
        log_ratio: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        positive: (k, lambda) where `A >= 0`.
        negative: (k, lambda) where `A < 0`.
        is_weights: `[N]` importance weights that join the ratio, or None.

    Returns:
        `[N]`, without a gradient.

    Source:
        arXiv:2602.10693; the bounds, and a lambda of at least 1e-4, are TRL's and Liger's.
    """
    lowest = math.log(1e-8)
    total = segments.sum(bound(log_ratio.detach(), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    if is_weights is not None:
        total = total + segments.sum(bound(is_weights.log(), lowest, LOG_RATIO_BOUND).to(total.dtype))
    log_weight = segments.broadcast(bound(total, lowest, LOG_RATIO_BOUND))
    number = log_weight.new_tensor  # a bare float would be float32 in torch.where
    k = torch.where(advantages >= 0, number(positive[0]), number(negative[0]))
    rate = torch.where(advantages >= 0, number(positive[1]), number(negative[1])).clamp(min=1e-4)
    return (rate + k * log_weight - rate * log_weight.exp()).exp()


def on_policy_sequences(
    log_prob: Tensor, behaviour: Tensor, advantages: Tensor, segments: Segments, limit: float
) -> Tensor:
    """Tokens that the off-policy sequence mask keeps: `A >= 0`, or a sequence that drifted by at most `limit`.

    The drift is `mean_t (behaviour_t - log_prob_t)` over the sequence, the k1 estimate of KL(behaviour || policy).

    Args:
        log_prob: `[N]`, nats.
        behaviour: `[N]`, the policy that sampled (the sampling engine's log-probs, or the old ones), nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        limit: Largest drift, nats for each token.

    Returns:
        `[N]` bool. A drift that is NaN keeps its sequence, so that the NaN stays visible.

    Source:
        DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    drift = segments.broadcast(segments.mean((behaviour - log_prob).detach()))
    return (advantages >= 0) | ~(drift > limit)
