"""The built-in policy losses: typed configs around the formulas of `rlloss.functional`."""

from pydantic import Field, model_validator
from torch import Tensor

from rlloss.errors import ConfigError
from rlloss.functional.policy import bounded_ratio, clipped_surrogate
from rlloss.losses.policy_registry import PolicyLossConfig, register_policy_loss
from rlloss.metrics import Metric


class ClipConfig(PolicyLossConfig):
    """Bounds of the ratio, as offsets from 1, and of the log-ratio before `exp`."""

    cliprange_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at 1 - cliprange_low."""
    cliprange_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped above at 1 + cliprange_high."""
    log_prob_diff_min: float = Field(default=-20.0, le=0.0)
    """Lower bound of the log-ratio, nats; the gradient beyond is 0."""
    log_prob_diff_max: float = Field(default=20.0, ge=0.0)
    """Upper bound of the log-ratio, nats; the gradient beyond is 0."""


class VanillaConfig(ClipConfig):
    """PPO's clipped objective (arXiv:1707.06347) with asymmetric bounds and dual clip (arXiv:1912.09729)."""

    clip_ratio_c: float | None = Field(default=3.0, gt=1.0)
    """For negative advantages the loss is at most -A * clip_ratio_c; None leaves the dual clip out."""

    @model_validator(mode="after")
    def _warn_tight_dual_clip(self) -> "VanillaConfig":
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1.0 + self.cliprange_high:
            import warnings

            warnings.warn(
                f"clip_ratio_c={self.clip_ratio_c} does not exceed 1 + "
                f"cliprange_high={1.0 + self.cliprange_high}: the dual "
                f"clip then cuts ratios that the ordinary clip allows. Papers use 3.0.",
                stacklevel=2,
            )
        if self.log_prob_diff_min >= self.log_prob_diff_max:
            raise ConfigError(
                f"log_prob_diff_min={self.log_prob_diff_min} must lie below log_prob_diff_max={self.log_prob_diff_max}."
            )
        return self


@register_policy_loss("vanilla", config=VanillaConfig, aliases=("ppo", "grpo"))
def vanilla(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, policy_loss_cfg: VanillaConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """PPO's clipped objective, token by token; see `rlloss.functional.policy.clipped_surrogate`.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        policy_loss_cfg: The bounds.
    """
    cfg = policy_loss_cfg
    ratio = bounded_ratio(log_prob - old_log_prob, cfg.log_prob_diff_min, cfg.log_prob_diff_max)
    return clipped_surrogate(ratio, advantages, cfg.cliprange_low, cfg.cliprange_high, cfg.clip_ratio_c)
