"""GRPO and its relatives: any registered policy loss, KL from a reference policy, entropy bonus."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, SerializeAsAny, field_validator, model_validator
from torch import Tensor

from rlloss.distributed import Group
from rlloss.errors import ConfigError, RLLossError
from rlloss.functional.policy import bounded_ratio
from rlloss.functional.policy_score import on_policy_sequences
from rlloss.heads import TokenStats
from rlloss.losses.batch import check_field
from rlloss.losses.kwargs import Computed, PerToken, TokenTensor
from rlloss.losses.policy_registry import PolicyLoss, PolicyLossConfig, get_policy_loss, policy_loss_of
from rlloss.losses.rl import BaseRLLossConfig, BaseRLLossContext
from rlloss.losses.rl_kwargs import BaseRLLossKwargs
from rlloss.losses.selection import spread, step_tokens
from rlloss.losses.terms import Term, entropy_metric
from rlloss.metrics import EffectiveSampleSize, Metric, Sum, max_of, mean_of, min_of, moments_of


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

    off_policy_limit: float | None = Field(default=None, ge=0.0)
    """Drop the policy term of a sequence with A < 0 whose mean log-prob fell by more than this, nats for each token,
    since it was sampled (from rollout_logprobs, else old_logprobs); DeepSeek-V3.2, arXiv:2512.02556, section 3.1."""
    top_entropy_quantile: float = Field(default=1.0, ge=0.0, le=1.0)
    """Keep this share of tokens, those of highest entropy over the whole step, in the policy and entropy terms; counts
    stay those of all tokens in the policy term. Needs selection_entropy. arXiv:2506.01939, section 5."""

    @field_validator("policy_loss_cfg", mode="plain")
    @classmethod
    def _resolve_policy_loss(cls, given: Any) -> Any:
        if not isinstance(given, (dict, PolicyLossConfig)):
            raise ConfigError(f"policy_loss_cfg is a {type(given).__name__}, expected a dict or a PolicyLossConfig.")
        return policy_loss_of(given).configure(given)

    @model_validator(mode="after")
    def _check_policy_loss(self) -> "GRPOLossConfig":
        paper = self.policy_loss.reduction
        if paper is not None and "loss_reduction" not in self.model_fields_set:
            warnings.warn(
                f"{type(self).__name__}: the paper of policy loss {self.policy_loss.name!r} uses "
                f"loss_reduction={paper!r}, and none is given; it stays 'token'. Give one to say which.",
                stacklevel=2,
            )
        if self.mode == "liger" and "entropy" in self.policy_loss.needs:
            raise ConfigError(
                f"GRPOLossConfig: policy loss {self.policy_loss.name!r} asks for the entropy, which mode='liger' does "
                "not compute. Use mode='chunk'."
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
        return (self._policy_term(), *self.shared_terms())

    def _policy_term(self) -> Term:
        loss = self.policy_loss
        level = loss.level(self.policy_loss_cfg)
        level = "step" if level == "token" and self.top_entropy_quantile < 1.0 else level
        return Term(
            "policy",
            self._policy,
            level="sequence" if self.off_policy_limit is not None else level,
            reduction=self.loss_reduction,
            needs_entropy="entropy" in loss.needs,
            factor_field=None if "is_weights" in loss.needs else "is_weights",
            loss_length=self.loss_length,
        )

    def _entropy_term(self) -> Term:
        term = super()._entropy_term()
        return term if self.top_entropy_quantile == 1.0 else replace(term, mask=lambda kwargs: kwargs.policy_mask)

    def _policy(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Calls the policy loss with what its signature asks for, and adds the metrics of the ratio."""
        loss = self.policy_loss
        old = self.old_of(loss_kwargs)
        old = stats.log_prob.detach() if old is None else old
        advantages = loss_kwargs.advantages.to(stats.log_prob.dtype)
        keep = self._kept(stats, loss_kwargs, old, advantages)
        weights = loss_kwargs.policy_loss_weight
        available = {
            "log_prob": stats.log_prob,
            "old_log_prob": old,
            "ref_log_prob": loss_kwargs.ref_logprobs,
            "rollout_log_prob": loss_kwargs.rollout_logprobs,
            "advantages": advantages,
            "loss_weights": weights if keep is None else torch.where(keep, weights, 0.0),
            "is_weights": loss_kwargs.is_weights,
            "mask": torch.ones_like(stats.labels, dtype=torch.bool),
            "entropy": stats.entropy,
            "segments": stats.segments,
            "selected": loss_kwargs.selected,
            "policy_loss_cfg": self.policy_loss_cfg,
        }
        # First, since a loss may write into its arguments.
        ratios = {**_ratio_metrics(stats.log_prob, old), **entropy_metric(stats)}
        values, metrics = loss.read(loss.fn(**{name: available[name] for name in loss.needs}), stats.log_prob)
        if keep is not None:
            values = values if values.ndim == 0 else torch.where(keep, values, 0.0)
            metrics = {**metrics, "policy_kept": mean_of(keep)}
        return values, {**ratios, **metrics}

    def _kept(self, stats: TokenStats, loss_kwargs: Any, old: Tensor, advantages: Tensor) -> Tensor | None:
        """Tokens that the two masks leave in the policy term, or None for all."""
        keep: Tensor | None = loss_kwargs.policy_mask if self.top_entropy_quantile < 1.0 else None
        if self.off_policy_limit is None:
            return keep
        sampled = loss_kwargs.rollout_logprobs
        # An engine that gave no number for a token says nothing about its drift.
        sampled = old if sampled is None else torch.where(sampled.isnan(), stats.log_prob.detach(), sampled)
        near = on_policy_sequences(stats.log_prob, sampled, advantages, stats.segments, self.off_policy_limit)
        return near if keep is None else keep & near


def _ratio_metrics(log_prob: Tensor, old_log_prob: Tensor) -> dict[str, Metric]:
    # Where a loss reads old log-probs, a token with an infinite one has left the step. Any other loss keeps the token,
    # which has no ratio.
    known = ~torch.isinf(old_log_prob)
    log_ratio = (log_prob - old_log_prob).detach()
    ratio = bounded_ratio(log_ratio)
    return {
        "ratio_mean": mean_of(ratio, known),
        "ratio_min": min_of(ratio, known),
        "ratio_max": max_of(ratio, known),
        "ratio_missing": Sum((~known).double().sum()),
        "ess": moments_of(ratio, EffectiveSampleSize, known),
        "approx_kl_k1": mean_of(-log_ratio, known),
        "approx_kl_k2": mean_of(0.5 * log_ratio.square(), known),
        "approx_kl_k3": mean_of(ratio - 1.0 - log_ratio.clamp(-20.0, 20.0), known),
    }


class GRPOLossKwargs(BaseRLLossKwargs):
    """Tensors of a GRPO loss.

    Attributes:
        selection_entropy: Entropies of the current policy at the start of the step, nats.
        selected: What the policy loss chose over the whole step (made by `build_batches`).
        policy_mask: Tokens that top_entropy_quantile keeps (made by `build_batches`).
    """

    selection_entropy: TokenTensor = None
    selected: Annotated[Tensor | None, PerToken(kind="mask"), Computed(refuses=True)] = None
    policy_mask: Annotated[Tensor | None, PerToken(kind="mask"), Computed(refuses=True)] = None


class GRPOLossContext(BaseRLLossContext):
    """GRPO on one micro-batch."""

    loss_cfg: GRPOLossConfig
    loss_kwargs: GRPOLossKwargs

    def needed(self) -> tuple[str, ...]:
        """Old log-probs unless on policy, and what the policy loss, its selection and the KL term ask for."""
        cfg, asked = self.loss_cfg, self.loss_cfg.policy_loss.needs
        names = ["ref_logprobs"] if "ref_log_prob" in asked else []
        names += ["rollout_logprobs"] if "rollout_log_prob" in asked else []
        names += ["selection_entropy"] if cfg.top_entropy_quantile < 1.0 else []
        if cfg.policy_loss.selection is not None and self.loss_kwargs.old_logprobs is None:
            names.append("selection_logprobs")
        return tuple(dict.fromkeys((*super().needed(), *names)))

    def _has_ratio(self) -> bool:
        cfg = self.loss_cfg
        asks = "old_log_prob" in cfg.policy_loss.needs or cfg.off_policy_limit is not None
        return asks or super()._has_ratio()

    def check(self) -> None:
        """Checks the tensors of the selections as well."""
        for name in ("selection_logprobs", "selection_entropy"):
            check_field(self.loss_kwargs, name)
        super().check()

    def _uses(self, name: str) -> bool:
        chooses = name == "selection_logprobs" and self.loss_cfg.policy_loss.selection is not None
        return chooses or super()._uses(name)

    @property
    def selects_step(self) -> bool:
        """Whether the policy loss or top_entropy_quantile chooses among the tokens of the step."""
        chooses = self.loss_cfg.policy_loss.selection is not None or self.loss_cfg.top_entropy_quantile < 1.0
        return chooses or super().selects_step

    def select_step(self, contexts: Sequence[Any], group: Group) -> None:
        """Writes the choice of the policy loss to `selected`, that of top_entropy_quantile to `policy_mask`."""
        super().select_step(contexts, group)
        cfg, choose = self.loss_cfg, self.loss_cfg.policy_loss.selection
        if choose is None and cfg.top_entropy_quantile == 1.0:
            return
        step = step_tokens(contexts, self.loss_kwargs.advantages, group)
        if choose is not None:
            spread(contexts, choose(step, cfg.policy_loss_cfg), "selected")
        if cfg.top_entropy_quantile < 1.0:
            spread(contexts, step.at_or_above_quantile(step.entropy, 1.0 - cfg.top_entropy_quantile), "policy_mask")
