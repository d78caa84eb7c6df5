"""GRPO and its relatives: any registered policy loss, KL from a reference policy, entropy bonus."""

from typing import Any

from pydantic import Field, SerializeAsAny, field_validator, model_validator
from torch import Tensor

from rlloss.errors import ConfigError, RLLossError
from rlloss.functional.policy import bounded_ratio
from rlloss.heads import TokenStats
from rlloss.losses.policy_registry import PolicyLoss, PolicyLossConfig, get_policy_loss
from rlloss.losses.rl import BaseRLLossConfig, BaseRLLossContext, BaseRLLossKwargs
from rlloss.losses.terms import Term
from rlloss.metrics import EffectiveSampleSize, Metric, max_of, mean_of, min_of, moments_of


class GRPOLossConfig(BaseRLLossConfig):
    """Group relative policy optimisation (arXiv:2402.03300), with any registered policy loss in its place.

    `loss = sum_t w_t L_t + kl_loss_coef KL - entropy_coef H`, with weights `w` by `loss_reduction`.

    Example:
        >>> from rlloss import GRPOLossConfig
        >>> cfg = GRPOLossConfig(policy_loss_cfg=dict(loss_type="vanilla", cliprange_high=0.28), mode="chunk")
        >>> cfg.policy_loss_cfg["cliprange_low"]
        0.2
    """

    policy_loss_cfg: SerializeAsAny[PolicyLossConfig] | dict[str, Any] = Field(
        default_factory=dict, validate_default=True
    )
    """The policy loss: a dict with a `loss_type` (default vanilla) and its parameters, or its typed config."""

    @field_validator("policy_loss_cfg", mode="plain")
    @classmethod
    def _resolve_policy_loss(cls, given: Any) -> Any:
        if not isinstance(given, (dict, PolicyLossConfig)):
            raise ConfigError(f"policy_loss_cfg is a {type(given).__name__}, expected a dict or a PolicyLossConfig.")
        return get_policy_loss(given.get("loss_type") or "vanilla").configure(given)

    @model_validator(mode="after")
    def _check_policy_loss(self) -> "GRPOLossConfig":
        if self.mode == "liger" and "entropy" in self.policy_loss.needs:
            raise ConfigError(
                f"GRPOLossConfig: policy loss {self.policy_loss.name!r} asks for the entropy, which "
                f"mode='liger' does not "
                f"compute. Use mode='chunk'."
            )
        return self

    @property
    def policy_loss(self) -> PolicyLoss:
        """The registered policy loss."""
        try:
            return get_policy_loss(self.policy_loss_cfg.get("loss_type") or "vanilla")
        except RLLossError as error:
            raise type(error)(
                f"{error} A custom loss must be imported (registered) before its config is used."
            ) from error

    @property
    def loss_ctx_cls(self) -> type["GRPOLossContext"]:
        """`GRPOLossContext`."""
        return GRPOLossContext

    @property
    def _loss_kwargs_cls(self) -> type["GRPOLossKwargs"]:
        return GRPOLossKwargs

    def terms(self) -> tuple[Term, ...]:
        """Policy, KL and entropy."""
        loss = self.policy_loss
        policy = Term(
            "policy",
            self._policy,
            level=loss.level(self.policy_loss_cfg),
            reduction=self.loss_reduction,
            needs_entropy="entropy" in loss.needs,
            factor_field=None if "is_weights" in loss.needs else "is_weights",
            loss_length=self.loss_length,
        )
        return (policy, *self.shared_terms())

    def _policy(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Calls the policy loss with what its signature asks for, and adds the metrics of the ratio."""
        loss = self.policy_loss
        old = loss_kwargs.old_logprobs
        old = stats.log_prob.detach() if old is None else old
        available = {
            "log_prob": stats.log_prob,
            "old_log_prob": old,
            "ref_log_prob": loss_kwargs.ref_logprobs,
            "rollout_log_prob": loss_kwargs.rollout_logprobs,
            "advantages": loss_kwargs.advantages.to(stats.log_prob.dtype),
            "loss_weights": loss_kwargs.policy_loss_weight,
            "is_weights": loss_kwargs.is_weights,
            "mask": stats.labels == stats.labels,
            "entropy": stats.entropy,
            "segments": stats.segments,
            "policy_loss_cfg": self.policy_loss_cfg,
        }
        result = loss.fn(**{name: available[name] for name in loss.needs})
        values, metrics = result if isinstance(result, tuple) else (result, {})
        if values.shape not in ((), stats.log_prob.shape):
            raise ConfigError(
                f"policy loss {loss.name!r} returned shape {tuple(values.shape)}, expected "
                f"[N]={tuple(stats.log_prob.shape)} "
                f"or a scalar that already used loss_weights."
            )
        return values, {**_ratio_metrics(stats.log_prob, old), **_entropy_metric(stats), **metrics}


def _ratio_metrics(log_prob: Tensor, old_log_prob: Tensor) -> dict[str, Metric]:
    log_ratio = (log_prob - old_log_prob).detach()
    ratio = bounded_ratio(log_ratio)
    return {
        "ratio_mean": mean_of(ratio),
        "ratio_min": min_of(ratio),
        "ratio_max": max_of(ratio),
        "ess": moments_of(ratio, EffectiveSampleSize),
        "approx_kl_k1": mean_of(-log_ratio),
        "approx_kl_k2": mean_of(0.5 * log_ratio.square()),
        "approx_kl_k3": mean_of(ratio - 1.0 - log_ratio.clamp(-20.0, 20.0)),
    }


def _entropy_metric(stats: TokenStats) -> dict[str, Metric]:
    return {} if stats.entropy is None else {"entropy": mean_of(stats.entropy)}


class GRPOLossKwargs(BaseRLLossKwargs):
    """Tensors of a GRPO loss."""


class GRPOLossContext(BaseRLLossContext):
    """GRPO on one micro-batch."""

    loss_cfg: GRPOLossConfig
    loss_kwargs: GRPOLossKwargs

    def needed(self) -> tuple[str, ...]:
        """Old log-probs unless on policy, and what the policy loss and the KL term ask for."""
        asked = self.loss_cfg.policy_loss.needs
        names = ["old_logprobs"] if not self.loss_cfg.on_policy and "old_log_prob" in asked else []
        names += ["ref_logprobs"] if "ref_log_prob" in asked else []
        names += ["rollout_logprobs"] if "rollout_log_prob" in asked else []
        return tuple(dict.fromkeys((*names, *super().needed())))
