"""Policy losses on a ratio with gradient: clipped, gated or bare. The formulas are in `rlloss.functional.policy`."""

import warnings
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.functional.policy import (
    RatioKind,
    bounded_ratio,
    clipped_surrogate,
    geometric_surrogate,
    log_ratio_of,
    soft_gate,
)
from rlloss.layout import Segments
from rlloss.losses.policy_registry import PolicyLossConfig, register_policy_loss
from rlloss.losses.terms import Level
from rlloss.metrics import Metric

Result = tuple[Tensor, dict[str, Metric]]


class BoundedConfig(PolicyLossConfig):
    """Bounds of a log-ratio before `exp`: of a token, or of what the loss makes of a sequence."""

    log_prob_diff_min: float = Field(default=-20.0, le=0.0)
    """Lower bound of the log-ratio, nats; the gradient beyond is 0."""
    log_prob_diff_max: float = Field(default=20.0, ge=0.0)
    """Upper bound of the log-ratio, nats; the gradient beyond is 0."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "BoundedConfig":
        if self.log_prob_diff_min >= self.log_prob_diff_max:
            raise ConfigError(
                f"log_prob_diff_min={self.log_prob_diff_min} must lie below log_prob_diff_max={self.log_prob_diff_max}."
            )
        return self


class RatioConfig(BoundedConfig):
    """Which ratio of the current to the old policy, and its bounds before `exp`."""

    ratio: RatioKind = "token"
    """Of the token; geometric mean (sequence_mean) or product over the sequence; sequence_token: GSPO-token."""

    def bounded(self, log_prob: Tensor, old_log_prob: Tensor, segments: Segments) -> Tensor:
        """Returns the ratio, `[N]`."""
        log_ratio = log_ratio_of(log_prob, old_log_prob, segments, self.ratio)
        return bounded_ratio(log_ratio, self.log_prob_diff_min, self.log_prob_diff_max)


def ratio_level(cfg: RatioConfig) -> Level:
    """The level of a loss on this ratio."""
    return "token" if cfg.ratio == "token" else "sequence"


def level_field(cfg: Any) -> Level:
    """The level that a config names."""
    return cfg.level  # type: ignore[no-any-return]


class ClipConfig(RatioConfig):
    """Clip bounds of the ratio, as offsets from 1."""

    cliprange_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at 1 - cliprange_low."""
    cliprange_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped above at 1 + cliprange_high."""


class VanillaConfig(ClipConfig):
    """PPO's clipped objective (arXiv:1707.06347) with asymmetric bounds and dual clip (arXiv:1912.09729)."""

    clip_ratio_c: float | None = Field(default=3.0, gt=1.0)
    """For negative advantages the loss is at most -A * clip_ratio_c; None leaves the dual clip out."""
    delta: float | None = Field(default=None, gt=0.0)
    """Absolute cap of the ratio in the unclipped branch (TRL, arXiv:2505.07291); None: no cap."""

    @model_validator(mode="after")
    def _warn_tight_dual_clip(self) -> "VanillaConfig":
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1.0 + self.cliprange_high:
            warnings.warn(
                f"clip_ratio_c={self.clip_ratio_c} does not exceed 1 + cliprange_high={1.0 + self.cliprange_high}: "
                "the dual clip then cuts ratios that the ordinary clip allows. Papers use 3.0.",
                stacklevel=2,
            )
        return self


@register_policy_loss("vanilla", config=VanillaConfig, aliases=("ppo", "ppo_clip", "grpo"), level=ratio_level)
def vanilla(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: VanillaConfig
) -> Result:
    """PPO's clipped objective; see `rlloss.functional.policy.clipped_surrogate`.

    `max(-A r, -A clip(r, 1 - low, 1 + high))`, for `A < 0` at most `-A c`. arXiv:1707.06347, equation 7; asymmetric
    bounds arXiv:2503.14476, equation 10; dual clip arXiv:1912.09729, equation 5. With `ratio="sequence_product"` and
    `loss_reduction="sample"` it is the loss of TRL's RLOO, with "sequence_mean" TRL's level "sequence".

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: Ratio and bounds.

    Returns:
        `[N]` and the clip fractions.
    """
    cfg = policy_loss_cfg
    ratio = cfg.bounded(log_prob, old_log_prob, segments)
    return clipped_surrogate(
        ratio, advantages, cfg.cliprange_low, cfg.cliprange_high, dual_clip=cfg.clip_ratio_c, ratio_cap=cfg.delta
    )


@register_policy_loss("importance", config=RatioConfig, aliases=("importance_sampling",), level=ratio_level)
def importance(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: RatioConfig
) -> Tensor:
    """The importance-weighted objective without a clip: `-A r`, bounded by log_prob_diff_min and max only.

    arXiv:1707.06347, equation 6 (conservative policy iteration); Tinker's importance_sampling.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: Ratio and its bounds.

    Returns:
        `[N]`.
    """
    return -advantages * policy_loss_cfg.bounded(log_prob, old_log_prob, segments)


class GSPOConfig(ClipConfig):
    """GSPO (arXiv:2507.18071): PPO's clip on the geometric mean of a sequence's ratios, bounds of the paper."""

    ratio: Literal["sequence_mean", "sequence_token"] = "sequence_token"
    """sequence_token: the gradient goes to the token's own log-prob (the paper's GSPO-token, verl); sequence_mean: the
    mean is differentiated (the paper's GSPO, TRL). The two agree where a sequence has one advantage and one weight."""
    cliprange_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    """The ratio is clipped below at 1 - cliprange_low."""
    cliprange_high: float = Field(default=4e-4, ge=0.0)
    """The ratio is clipped above at 1 + cliprange_high."""
    log_prob_diff_max: float = Field(default=10.0, ge=0.0)
    """Upper bound of the sequence's mean log-ratio, nats (verl's); the gradient beyond is 0."""


@register_policy_loss(
    "gspo", config=GSPOConfig, aliases=("gspo_token",), level="sequence", reduction="sample", surrogate=True
)
def gspo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: GSPOConfig
) -> Result:
    """Group sequence policy optimisation: `max(-A s, -A clip(s, 1 - low, 1 + high))`, s the ratio of the sequence.

    `s = exp(mean_t d_t)`. arXiv:2507.18071, its GSPO and, for token advantages, GSPO-token. The paper averages
    sequences: give `loss_reduction="sample"`.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: Ratio and bounds.

    Returns:
        `[N]` and the clip fractions.
    """
    cfg = policy_loss_cfg
    ratio = cfg.bounded(log_prob, old_log_prob, segments)
    return clipped_surrogate(ratio, advantages, cfg.cliprange_low, cfg.cliprange_high)


class SAPOConfig(RatioConfig):
    """SAPO (arXiv:2511.20347): a soft gate in the place of the clip."""

    tau_pos: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Steepness for A > 0."""
    tau_neg: float = Field(default=1.05, gt=0.0, allow_inf_nan=False)
    """Steepness for A <= 0."""


@register_policy_loss("sapo", config=SAPOConfig, level=ratio_level, reduction="sample")
def sapo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: SAPOConfig
) -> Tensor:
    """Soft adaptive policy optimisation: `-A sigmoid(tau (r - 1)) 4 / tau`; see `rlloss.functional.policy.soft_gate`.

    arXiv:2511.20347. The paper averages sequences: give `loss_reduction="sample"`.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: Ratio and steepness.

    Returns:
        `[N]`.
    """
    ratio = policy_loss_cfg.bounded(log_prob, old_log_prob, segments)
    return soft_gate(ratio, advantages, policy_loss_cfg.tau_pos, policy_loss_cfg.tau_neg)


class GMPOConfig(BoundedConfig):
    """GMPO (arXiv:2507.20673): the geometric mean of clipped ratios; the paper's wide clip. Bounds are of the mean."""

    clip_log_ratio_low: float = Field(default=0.4, ge=0.0)
    """The log-ratio is clipped below at -clip_log_ratio_low where A < 0, nats."""
    clip_log_ratio_high: float = Field(default=0.4, ge=0.0)
    """The log-ratio is clipped above at clip_log_ratio_high where A > 0, nats."""


@register_policy_loss("gmpo", config=GMPOConfig, aliases=("geo_mean",), level="sequence", reduction="sample")
def gmpo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    segments: Segments,
    is_weights: Tensor | None,
    policy_loss_cfg: GMPOConfig,
) -> Result:
    """Geometric-mean policy optimisation; see `rlloss.functional.policy.geometric_surrogate`.

    `-mean(A) exp(mean_t d'_t)` for a sequence. arXiv:2507.20673. The paper averages sequences: give
    `loss_reduction="sample"`. Importance weights join as their geometric mean, as in verl.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        is_weights: `[N]` importance weights, or None.
        policy_loss_cfg: Bounds.

    Returns:
        `[N]` and the clip fractions.
    """
    cfg = policy_loss_cfg
    loss, metrics = geometric_surrogate(
        log_prob - old_log_prob,
        advantages,
        segments,
        (cfg.clip_log_ratio_low, cfg.clip_log_ratio_high),
        (cfg.log_prob_diff_min, cfg.log_prob_diff_max),
    )
    if is_weights is not None:
        log_weight = is_weights.to(loss.dtype).clamp(min=1e-10).log()
        loss = loss * segments.broadcast(segments.mean(log_weight).exp())
    return loss, metrics
