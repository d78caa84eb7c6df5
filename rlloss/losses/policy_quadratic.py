"""Policy losses with a squared log-ratio; the formula is in `rlloss.functional.policy_quadratic`."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from rlloss.functional.policy_quadratic import quadratic_loss
from rlloss.layout import Segments
from rlloss.losses.policy_losses import level_field
from rlloss.losses.policy_registry import PolicyLossConfig, register_policy_loss


class DROConfig(PolicyLossConfig):
    """DRO (arXiv:2405.19107); beta has no default that suits all."""

    beta: float = Field(gt=0.0, allow_inf_nan=False)
    """Weight of the squared log-ratio."""
    level: Literal["token", "sequence"] = "token"
    """Square of the token's log-ratio, as in verl and Tinker, or of the whole sequence's, as in the paper."""


class OPMDConfig(PolicyLossConfig):
    """Online policy mirror descent of Kimi k1.5 (arXiv:2501.12599)."""

    tau: float = Field(default=0.1, gt=0.0, allow_inf_nan=False)
    """Weight of the squared log-ratio; ROLL's default."""
    level: Literal["token", "sequence"] = "sequence"
    """Square of the whole sequence's log-ratio, as in the paper, or of the token's, as in ROLL's kimi15."""


@register_policy_loss("dro", config=DROConfig, level=level_field)
def dro(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: DROConfig
) -> Tensor:
    """Direct reward optimisation: `-(A log_prob - beta/2 d^2)`, `d = log_prob - old_log_prob`.

    arXiv:2405.19107, with the advantage in the place of reward minus value. See
    `rlloss.functional.policy_quadratic.quadratic_loss` for level "sequence".

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: beta and level.

    Returns:
        `[N]`.
    """
    spread = segments if policy_loss_cfg.level == "sequence" else None
    return quadratic_loss(log_prob, old_log_prob, advantages, policy_loss_cfg.beta, spread)


@register_policy_loss("opmd", config=OPMDConfig, aliases=("kimi15",), level=level_field)
def opmd(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, segments: Segments, policy_loss_cfg: OPMDConfig
) -> Tensor:
    """Online policy mirror descent: `-A log_prob + tau/2 d^2`, d the log-ratio of the whole sequence.

    arXiv:2501.12599, which states the negative of this loss's gradient.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats.
        advantages: `[N]`.
        segments: The sequence of each token.
        policy_loss_cfg: tau and level.

    Returns:
        `[N]`.
    """
    spread = segments if policy_loss_cfg.level == "sequence" else None
    return quadratic_loss(log_prob, old_log_prob, advantages, policy_loss_cfg.tau, spread)
