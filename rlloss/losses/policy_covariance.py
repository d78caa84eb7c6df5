"""Clip-Cov and KL-Cov: policy losses that choose tokens by a covariance over the whole step."""

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.functional.policy import bounded_ratio, clipped_surrogate
from rlloss.losses.policy_losses import BoundedConfig, Result
from rlloss.losses.policy_registry import register_policy_loss
from rlloss.losses.selection import StepTokens
from rlloss.metrics import mean_of


class CovarianceConfig(BoundedConfig):
    """The ratio of a token, and its bounds before `exp`."""

    def bounded(self, log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        """Returns the ratio, `[N]`."""
        return bounded_ratio(log_prob - old_log_prob, self.log_prob_diff_min, self.log_prob_diff_max)


class ClipCovConfig(CovarianceConfig):
    """Clip-Cov (arXiv:2505.22617): some tokens of high covariance lose their gradient."""

    cliprange_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at 1 - cliprange_low."""
    cliprange_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped above at 1 + cliprange_high."""
    clip_cov_ratio: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Share of all tokens that is left out; at least one token."""
    clip_cov_lb: float = 1.0
    """Only tokens of larger covariance are left out."""
    clip_cov_ub: float = 5.0
    """Only tokens of smaller covariance are left out."""
    seed: int = 0
    """Of the choice among them, which is a hash and no random number: no split of the step changes it."""

    @model_validator(mode="after")
    def _check_band(self) -> "ClipCovConfig":
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ConfigError(f"clip_cov_lb={self.clip_cov_lb} must lie below clip_cov_ub={self.clip_cov_ub}.")
        return self


class KLCovConfig(CovarianceConfig):
    """KL-Cov (arXiv:2505.22617): the tokens of highest covariance are held to the old policy."""

    kl_cov_ratio: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Share of all tokens that is held; at least one token."""
    ppo_kl_coef: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Weight of |log-ratio| at these tokens; verl's default, its code without a config takes 1."""


def covariances(step: StepTokens) -> tuple[Tensor, int]:
    """`(A - mean A)(log_prob - mean log_prob)` of each token, means over the whole step, and the number of tokens.

    arXiv:2505.22617, equation 10.
    """
    ones = torch.ones_like(step.advantages)
    count, total, total_log_prob = step.sums(ones, step.advantages, step.log_prob)
    count = max(count, 1.0)
    return (step.advantages - total / count) * (step.log_prob - total_log_prob / count), int(count)


def choose_clip_cov(step: StepTokens, cfg: ClipCovConfig) -> Tensor:
    """A share of the tokens in the covariance band that PPO's clip leaves alone, by their hash."""
    covariance, count = covariances(step)
    ratio = cfg.bounded(step.log_prob, step.old_log_prob)
    clipped = ratio.clamp(1.0 - cfg.cliprange_low, 1.0 + cfg.cliprange_high)
    free = ~(-step.advantages * clipped > -step.advantages * ratio)
    candidates = free & (covariance > cfg.clip_cov_lb) & (covariance < cfg.clip_cov_ub)
    wanted = max(int(cfg.clip_cov_ratio * count), 1)
    return step.smallest(torch.zeros_like(covariance), candidates, wanted, cfg.seed)


def choose_kl_cov(step: StepTokens, cfg: KLCovConfig) -> Tensor:
    """The share of tokens with the largest covariance."""
    covariance, count = covariances(step)
    wanted = max(int(cfg.kl_cov_ratio * count), 1)
    return step.smallest(-covariance, torch.ones_like(covariance, dtype=torch.bool), wanted)


@register_policy_loss("clip_cov", config=ClipCovConfig, level="step", selection=choose_clip_cov)
def clip_cov(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, selected: Tensor | None, policy_loss_cfg: ClipCovConfig
) -> Result:
    """PPO's clip without the dual clip, the chosen tokens left out.

    arXiv:2505.22617, equations 11 and 12. The choice is made in `build_batches` from `selection_logprobs`, where the
    paper and verl take the current log-probs of one micro-batch; it is a hash instead of a random number.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        selected: `[N]` bool, the chosen tokens.
        policy_loss_cfg: Bounds.

    Returns:
        `[N]`, the clip fractions, and the fraction left out.
    """
    cfg, chosen = policy_loss_cfg, _made(selected, "clip_cov")
    ratio = cfg.bounded(log_prob, old_log_prob)
    loss, metrics = clipped_surrogate(ratio, advantages, cfg.cliprange_low, cfg.cliprange_high)
    return torch.where(chosen, 0.0, loss), {**metrics, "selected_frac": mean_of(chosen)}


@register_policy_loss("kl_cov", config=KLCovConfig, level="step", selection=choose_kl_cov)
def kl_cov(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, selected: Tensor | None, policy_loss_cfg: KLCovConfig
) -> Result:
    """`-A r`, plus `ppo_kl_coef |log_prob - old_log_prob|` at the chosen tokens.

    arXiv:2505.22617, equations 13 and 14. The choice is made in `build_batches` from `selection_logprobs`.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        selected: `[N]` bool, the chosen tokens.
        policy_loss_cfg: Weight of the distance.

    Returns:
        `[N]` and the fraction held.
    """
    chosen = _made(selected, "kl_cov")
    distance = policy_loss_cfg.ppo_kl_coef * (log_prob - old_log_prob).abs()
    loss = -advantages * policy_loss_cfg.bounded(log_prob, old_log_prob)
    return loss + torch.where(chosen, distance, 0.0), {"selected_frac": mean_of(chosen)}


def _made(selected: Any, name: str) -> Tensor:
    if selected is None:
        raise ConfigError(
            f"policy loss {name!r} chooses tokens over the whole step, and build_batches has not made the choice. Use "
            f"GRPOLossConfig, and call build_batches on all micro-batches of the step."
        )
    return selected  # type: ignore[no-any-return]
