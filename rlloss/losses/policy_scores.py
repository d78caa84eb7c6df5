"""Policy losses `-A sg(f) log_prob` with a factor f of the ratio; factors are in `rlloss.functional.policy_score`."""

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.functional.policy import RatioKind, bounded_ratio, log_ratio_of
from rlloss.functional.policy_score import (
    gamma_factor,
    score_loss,
    tapered_factor,
    within_divergence,
    within_variation,
)
from rlloss.layout import Segments
from rlloss.losses.policy_losses import RatioConfig, Result, level_field, ratio_level
from rlloss.losses.policy_registry import PolicyLossConfig, register_policy_loss
from rlloss.metrics import mean_of


class ReinforceConfig(PolicyLossConfig):
    """REINFORCE has no parameters."""


@register_policy_loss("reinforce", config=ReinforceConfig, aliases=("gpg", "policy_gradient"))
def reinforce(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE: `-A log_prob`; it reads no old log-probs.

    Williams 1992, equation 11; GPG arXiv:2504.02546.

    Args:
        log_prob: `[N]`, nats.
        advantages: `[N]`.

    Returns:
        `[N]`.
    """
    return score_loss(log_prob, advantages)


class CISPOConfig(RatioConfig):
    """CISPO (arXiv:2506.13585): the clip bounds the importance weight, no token loses its gradient."""

    cliprange_low: float = Field(default=1.0, ge=0.0)
    """The weight is at least 1 - cliprange_low; 1 and more, as in the paper, is no lower bound."""
    cliprange_high: float = Field(default=0.2, ge=0.0)
    """The weight is at most 1 + cliprange_high."""
    ratio_cap: float | None = Field(default=None, gt=0.0)
    """Absolute upper bound of the weight in the place of 1 + cliprange_high (TRL's and Liger's epsilon_high)."""

    @model_validator(mode="after")
    def _check_cap(self) -> "CISPOConfig":
        if self.ratio_cap is not None and self.ratio_cap < 1.0 - self.cliprange_low:
            raise ConfigError(
                f"ratio_cap={self.ratio_cap} lies below the lower bound 1 - cliprange_low={1.0 - self.cliprange_low}."
            )
        return self


@register_policy_loss("cispo", config=CISPOConfig, level=ratio_level, surrogate=True)
def cispo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: CISPOConfig
) -> Result:
    """Clipped importance sampling: `-sg(clip(r, 1 - low, 1 + high)) A log_prob`.

    arXiv:2506.13585, equations 4 and 5.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: Ratio and bounds.

    Returns:
        `[N]` and the fractions of bounded weights.
    """
    cfg = policy_loss_cfg
    ratio = cfg.bounded(log_prob, old_log_prob, segments)
    lowest = 1.0 - cfg.cliprange_low
    highest = 1.0 + cfg.cliprange_high if cfg.ratio_cap is None else cfg.ratio_cap
    metrics = {"clip_frac_low": mean_of(ratio < lowest), "clip_frac_high": mean_of(ratio > highest)}
    return score_loss(log_prob, advantages, ratio.clamp(lowest, highest)), {**metrics}


class DPPOConfig(PolicyLossConfig):
    """DPPO (arXiv:2602.04879): a trust region in divergence, not in ratio."""

    divergence_low: float = Field(default=0.2, ge=0.0)
    """Largest divergence of a token that the advantage pushes down."""
    divergence_high: float = Field(default=0.2, ge=0.0)
    """Largest divergence of a token that the advantage pushes up."""
    ratio_cap: float = Field(default=20.0, gt=0.0)
    """Cap of the importance weight, the paper's; verl's config gives 3."""


@register_policy_loss("dppo_tv", config=DPPOConfig, aliases=("dppo", "dppo_binary_tv"), surrogate=True)
def dppo_tv(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, policy_loss_cfg: DPPOConfig) -> Result:
    """Divergence PPO with total variation: `-A sg(min(r, cap)) log_prob` inside the trust region, else 0.

    Inside is `p - p_old <= high` for `A > 0`, else `p - p_old >= -low`. arXiv:2602.04879, the binary approximation.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats, of the policy that sampled.
        advantages: `[N]`.
        policy_loss_cfg: Trust region and cap.

    Returns:
        `[N]` and the fraction of tokens outside.
    """
    cfg = policy_loss_cfg
    inside = within_variation(log_prob, old_log_prob, advantages, cfg.divergence_low, cfg.divergence_high)
    return _dppo(log_prob, old_log_prob, advantages, inside, cfg)


@register_policy_loss("dppo_kl", config=DPPOConfig, aliases=("dppo_binary_kl",), surrogate=True)
def dppo_kl(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, policy_loss_cfg: DPPOConfig) -> Result:
    """Divergence PPO with the binary KL divergence; otherwise `dppo_tv`. arXiv:2602.04879, the binary approximation.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats, of the policy that sampled.
        advantages: `[N]`.
        policy_loss_cfg: Trust region and cap.

    Returns:
        `[N]` and the fraction of tokens outside.
    """
    cfg = policy_loss_cfg
    inside = within_divergence(log_prob, old_log_prob, advantages, cfg.divergence_low, cfg.divergence_high)
    return _dppo(log_prob, old_log_prob, advantages, inside, cfg)


def _dppo(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, inside: Tensor, cfg: DPPOConfig) -> Result:
    ratio = bounded_ratio((log_prob - old_log_prob).detach()).clamp(max=cfg.ratio_cap)
    factor = ratio * inside.to(ratio.dtype)
    return score_loss(log_prob, advantages, factor), {"trust_region_frac": mean_of(~inside)}


class TOPRConfig(PolicyLossConfig):
    """TOPR (arXiv:2503.14286): failed answers are weighted by their ratio, at most 1."""

    level: Literal["token", "sequence"] = "sequence"
    """Ratio of the whole sequence, as in the paper, or of the token, as in ROLL."""


@register_policy_loss("topr", config=TOPRConfig, level=level_field, surrogate=True)
def topr(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: TOPRConfig
) -> Tensor:
    """Tapered off-policy REINFORCE: `-A log_prob` for `A >= 0`, `-A sg(min(r, 1)) log_prob` below.

    arXiv:2503.14286, equation 8. The default ratio is the paper's, of the whole answer.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: Level of the ratio.

    Returns:
        `[N]`.
    """
    kind: RatioKind = "token" if policy_loss_cfg.level == "token" else "sequence_product"
    ratio = bounded_ratio(log_ratio_of(log_prob, old_log_prob, segments, kind)).detach()
    return score_loss(log_prob, advantages, tapered_factor(ratio, advantages))


class VESPOConfig(PolicyLossConfig):
    """VESPO (arXiv:2602.10693): a smooth weight of the whole sequence's ratio, parameters of TRL and Liger."""

    k_pos: float = Field(default=2.0, ge=0.0, allow_inf_nan=False)
    """Exponent of the ratio for A >= 0."""
    lambda_pos: float = Field(default=3.0, ge=0.0, allow_inf_nan=False)
    """Decay in the ratio for A >= 0."""
    k_neg: float = Field(default=3.0, ge=0.0, allow_inf_nan=False)
    """Exponent of the ratio for A < 0."""
    lambda_neg: float = Field(default=2.0, ge=0.0, allow_inf_nan=False)
    """Decay in the ratio for A < 0."""


@register_policy_loss("vespo", config=VESPOConfig, level="sequence", surrogate=True)
def vespo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    segments: Segments,
    is_weights: Tensor | None,
    policy_loss_cfg: VESPOConfig,
) -> Result:
    """Variational sequence-level soft policy optimisation: `-A sg(W^k exp(lambda (1 - W))) log_prob`.

    W is the ratio of the whole sequence, importance weights of its tokens included; see
    `rlloss.functional.policy_score.gamma_factor`. arXiv:2602.10693, its closed-form kernel.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        is_weights: `[N]` importance weights, or None.
        policy_loss_cfg: k and lambda for either sign of the advantage.

    Returns:
        `[N]` and the mean factor.
    """
    cfg = policy_loss_cfg
    factor = gamma_factor(
        log_prob - old_log_prob,
        advantages,
        segments,
        (cfg.k_pos, cfg.lambda_pos),
        (cfg.k_neg, cfg.lambda_neg),
        is_weights,
    )
    return score_loss(log_prob, advantages, factor), {"vespo_factor": mean_of(factor)}
