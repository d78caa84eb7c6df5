"""Ratios and clips that policy losses share."""

import torch
from torch import Tensor

from rlloss.functional.bounds import bound
from rlloss.metrics import Metric, mean_of

LOG_RATIO_BOUND = 20.0
"""Log-ratios beyond this are clamped before `exp`, so that a stale token stays finite in value and gradient."""


def bounded_ratio(log_ratio: Tensor, low: float = -LOG_RATIO_BOUND, high: float = LOG_RATIO_BOUND) -> Tensor:
    """Returns `exp(clamp(log_ratio, low, high))`; the gradient beyond the bounds is 0."""
    return bound(log_ratio, low, high).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, cliprange_low: float, cliprange_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Metric]]:
    """The clipped objective of PPO as a loss, with the dual clip for negative advantages.

    `max(-A r, -A clip(r, 1 - low, 1 + high))`, and for `A < 0` at most `-A c`.

    Args:
        ratio: `[N]`, probability ratio of the current to the old policy.
        advantages: `[N]`.
        cliprange_low: Offset below 1.
        cliprange_high: Offset above 1.
        dual_clip: c, above 1; `None` leaves it out.

    Returns:
        `[N]` loss for each token, and the clip fractions: tokens where the clip changes the value.

    Source:
        arXiv:1707.06347, equation 7; asymmetric bounds arXiv:2503.14476; dual clip arXiv:1912.09729, equation 5.
    """
    unclipped = -advantages * ratio
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
