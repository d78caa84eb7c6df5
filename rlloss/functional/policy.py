"""Ratios and clips that policy losses share."""

from typing import Literal

import torch
from torch import Tensor

from rlloss.functional.bounds import bound
from rlloss.layout import Segments
from rlloss.metrics import Metric, mean_of

LOG_RATIO_BOUND = 20.0
"""Log-ratios beyond this are clamped before `exp`, so that a stale token stays finite in value and gradient."""

RatioKind = Literal["token", "sequence_mean", "sequence_product", "sequence_token"]
"""token: of the token itself; sequence_mean: geometric mean over the sequence (GSPO, TRL's level "sequence");
sequence_product: of the whole sequence (RLOO); sequence_token: the value of sequence_mean with the gradient in the
token's own log-prob (GSPO-token, verl's gspo)."""


def bounded_ratio(log_ratio: Tensor, low: float = -LOG_RATIO_BOUND, high: float = LOG_RATIO_BOUND) -> Tensor:
    """Returns `exp(clamp(log_ratio, low, high))`; the gradient beyond the bounds is 0."""
    return bound(log_ratio, low, high).exp()


def log_ratio_of(log_prob: Tensor, old_log_prob: Tensor, segments: Segments, kind: RatioKind) -> Tensor:
    """The log-ratio of the current to the old policy, of each token or of its sequence.

    With `d = log_prob - old_log_prob`: token `d_t`; sequence_mean `mean_t d_t`; sequence_product `sum_t d_t`;
    sequence_token `sg(mean_t d_t) + log_prob_t - sg(log_prob_t)`.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats; no gradient flows into it.
        segments: The sequence of each token.
        kind: Which of them.

    Returns:
        `[N]`, nats; the same for all tokens of a sequence unless `kind` is "token".

    Source:
        GSPO and GSPO-token arXiv:2507.18071; RLOO arXiv:2402.14740.
    """
    difference = log_prob - old_log_prob.detach()
    if kind == "token":
        return difference
    if kind == "sequence_product":
        return segments.broadcast(segments.sum(difference))
    mean = segments.broadcast(segments.mean(difference))
    return mean if kind == "sequence_mean" else mean.detach() + (log_prob - log_prob.detach())


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    cliprange_low: float,
    cliprange_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """The clipped objective of PPO as a loss, with the dual clip for negative advantages.

    `max(-A min(r, cap), -A clip(r, 1 - low, 1 + high))`, and for `A < 0` at most `-A c`.

    Args:
        ratio: `[N]`, probability ratio of the current to the old policy.
        advantages: `[N]`.
        cliprange_low: Offset below 1.
        cliprange_high: Offset above 1.
        dual_clip: c, above 1; `None` leaves it out.
        ratio_cap: Largest ratio of the unclipped branch (TRL's delta); from `1 + high` on it is the dual clip.

    Returns:
        `[N]` loss for each token, and the clip fractions: tokens where the clip changes the value.

    Source:
        arXiv:1707.06347, equation 7; asymmetric bounds arXiv:2503.14476; dual clip arXiv:1912.09729, equation 5;
        cap arXiv:2505.07291, equation 2.
    """
    capped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    unclipped = -advantages * capped
    clipped = -advantages * ratio.clamp(1.0 - cliprange_low, 1.0 + cliprange_high)
    loss = torch.maximum(unclipped, clipped)
    binds = clipped.detach() > unclipped.detach()
    metrics: dict[str, Metric] = {
        "clip_frac_low": mean_of(binds & (advantages < 0)),
        "clip_frac_high": mean_of(binds & (advantages > 0)),
    }
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        metrics["clip_frac_dual"] = mean_of((advantages < 0) & (loss.detach() > ceiling))
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return loss, metrics


def soft_gate(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """SAPO's objective as a loss: a sigmoid in the place of the clip.

    `-A sigmoid(tau (r - 1)) 4 / tau`, `tau_pos` for `A > 0`, else `tau_neg`. At r = 1 value and slope are `-2 A / tau`
    and `-A`.

    Args:
        ratio: `[N]`.
        advantages: `[N]`.
        tau_pos: Steepness for positive advantages.
        tau_neg: Steepness for the others.

    Returns:
        `[N]`.

    Source:
        SAPO, arXiv:2511.20347: the gated objective, with a temperature for each sign of the advantage.
    """
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)


def geometric_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    segments: Segments,
    clip_bounds: tuple[float, float],
    limits: tuple[float, float],
) -> tuple[Tensor, dict[str, Metric]]:
    """GMPO's objective as a loss: the geometric mean of clipped ratios times the mean advantage of the sequence.

    `-mean_t(A_t) exp(mean_t d'_t)`; `d'` is `min(d, high)` where `A > 0`, `max(d, -low)` where `A < 0`, and 0 where
    `A = 0`.

    Args:
        log_ratio: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        clip_bounds: (low, high), distances from 0 of the log-ratio.
        limits: Bounds of the mean before `exp`.

    Returns:
        `[N]`, the loss of a sequence at each of its tokens, and the clip fractions.

    Source:
        GMPO, arXiv:2507.20673: the clipped objective and its pseudo-code; token advantages are averaged as in verl.
    """
    low, high = clip_bounds
    clipped = torch.where(advantages > 0, bound(log_ratio, -torch.inf, high), bound(log_ratio, -low, torch.inf))
    clipped = torch.where(advantages == 0, 0.0, clipped)
    ratio = bounded_ratio(segments.mean(clipped), *limits)
    loss = segments.broadcast(-segments.mean(advantages) * ratio)
    metrics: dict[str, Metric] = {
        "clip_frac_low": mean_of((log_ratio < -low) & (advantages < 0)),
        "clip_frac_high": mean_of((log_ratio > high) & (advantages > 0)),
    }
    return loss, metrics
