"""Distillation from a teacher: forward KL on its top-k words, or an estimator on the sampled tokens."""

from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlloss.errors import BatchError, ConfigError, require_known
from rlloss.functional.bounds import bound
from rlloss.functional.distill import forward_kl_topk
from rlloss.functional.kl import KL_KINDS, ignores_reference, kl_penalty
from rlloss.heads import TokenStats
from rlloss.losses.batch import refuse_nan
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.kwargs import BaseLossKwargs, PerToken, TokenTensor
from rlloss.losses.terms import Reduction, Term, entropy_metric
from rlloss.metrics import Metric, mean_of


class DistillLossConfig(BaseLossConfig):
    """`loss = sum_t w_t D_t`, the distance D of the policy from a teacher at each token.

    `kind="topk"`: forward KL on the teacher's K words (`teacher_topk_ids`, `teacher_topk_logprobs`, both `[B, T, K]`),
    whose log-probs the head computes with gradient. Any other kind is an estimator of KL(policy || teacher) on the
    sampled tokens (`teacher_logprobs` `[B, T]`).
    """

    kind: str = "topk"
    """topk, or an estimator: k2 (mse), k3 (low_var_kl), abs, and any with "+", whose gradient is that of k2."""
    loss_reduction: Reduction = "token"
    """Denominator; see `rlloss.losses.calibration`."""
    log_prob_min: float | None = Field(default=None, lt=0.0)
    """Lower bound of the log-probs of kind topk, nats; verl's log_prob_min_clamp."""
    distance_cap: float | None = Field(default=None, gt=0.0)
    """Bound of D on both sides, nats; the gradient beyond is 0. verl's loss_max_clamp."""
    clamp_negative: bool = True
    """A negative D of kind topk (the teacher's words hold little mass) counts as 0, without gradient, as in verl."""
    kl_value_cap: float | None = Field(default=10.0, gt=0.0)
    """Bound of k3, nats; None removes it."""

    @model_validator(mode="after")
    def _check_kind(self) -> "DistillLossConfig":
        if self.kind != "topk":
            require_known("kind", self.kind.removesuffix("+"), ("topk", *KL_KINDS))
        if self.kind != "topk" and ignores_reference(self.kind):
            raise ConfigError(
                f"DistillLossConfig: the gradient of kind={self.kind!r} does not depend on the teacher. Use 'k3' or "
                f"'k1+', or give rlloss.reverse_kl_advantages to a policy loss."
            )
        if self.kind == "topk" and self.mode == "liger":
            raise ConfigError(
                "DistillLossConfig: mode='liger' has no log-probs of the teacher's words (kind='topk'). "
                "Use mode='chunk'."
            )
        return self

    @property
    def loss_ctx_cls(self) -> type["DistillLossContext"]:
        """`DistillLossContext`."""
        return DistillLossContext

    @property
    def _loss_kwargs_cls(self) -> type["DistillLossKwargs"]:
        return DistillLossKwargs

    def terms(self) -> tuple[Term, ...]:
        """The distance alone."""
        return (Term("distill", self._distance, reduction=self.loss_reduction, weight_field="loss_weight"),)

    def _distance(self, stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
        metrics = entropy_metric(stats)
        if self.kind == "topk":
            teacher = loss_kwargs.teacher_topk_logprobs
            if stats.extra_log_prob is None:
                raise BatchError(
                    "kind='topk' needs log-probs of the teacher's words: use forward, not forward_log_probs."
                )
            own = stats.extra_log_prob[:, : teacher.shape[1]]
            distance = forward_kl_topk(own, teacher, self.log_prob_min)
            if self.clamp_negative:
                distance = bound(distance, 0.0, torch.inf)
            metrics |= {"student_mass": mean_of(own.exp().sum(-1)), "teacher_mass": mean_of(teacher.exp().sum(-1))}
        else:
            distance = kl_penalty(stats.log_prob, loss_kwargs.teacher_logprobs, self.kind, self.kl_value_cap)
        metrics["distance"] = mean_of(distance)
        if self.distance_cap is not None:
            distance = bound(distance, -self.distance_cap, self.distance_cap)
        return distance, metrics


class DistillLossKwargs(BaseLossKwargs):
    """Tensors of a distillation loss.

    Attributes:
        teacher_logprobs: `[B, T]`, the teacher's log-probs of the labels, nats.
        teacher_topk_ids: `[B, T, K]` int64, words of the teacher.
        teacher_topk_logprobs: `[B, T, K]`, their log-probs under the teacher, nats.
    """

    teacher_logprobs: TokenTensor = None
    teacher_topk_ids: Annotated[Tensor | None, PerToken(0.0, kind="id", wide=True)] = None
    teacher_topk_logprobs: Annotated[Tensor | None, PerToken(0.0, wide=True)] = None


class DistillLossContext(BaseLossContext):
    """Distillation on one micro-batch."""

    loss_cfg: DistillLossConfig
    loss_kwargs: DistillLossKwargs

    def check(self) -> None:
        """Checks that the teacher's numbers are there.

        Raises:
            BatchError: They are missing or do not fit, or one is NaN while `check_finite` is on.
        """
        kwargs = self.loss_kwargs
        topk = self.loss_cfg.kind == "topk"
        names = ("teacher_topk_ids", "teacher_topk_logprobs") if topk else ("teacher_logprobs",)
        missing = [name for name in names if getattr(kwargs, name) is None]
        if missing:
            raise BatchError(f"DistillLossConfig(kind={self.loss_cfg.kind!r}) needs {', '.join(missing)} in the batch.")
        if topk:
            ids, teacher = kwargs.teacher_topk_ids, kwargs.teacher_topk_logprobs
            assert ids is not None and teacher is not None
            if ids.shape != teacher.shape:
                raise BatchError(
                    f"teacher_topk_ids {tuple(ids.shape)} and teacher_topk_logprobs {tuple(teacher.shape)} differ."
                )
        if self.loss_cfg.check_finite:
            refuse_nan(kwargs, names[-1:], self.loss_cfg.ignore_idx)

    def prepare(self) -> Tensor | None:
        """A sampled token of probability 0 for the teacher leaves the step."""
        teacher = self.loss_kwargs.teacher_logprobs
        return None if teacher is None or self.loss_cfg.kind == "topk" else torch.isinf(teacher)

    def extra_ids(self) -> Tensor | None:
        """The teacher's words of the tokens that count, `[N, K]`."""
        ids = self.loss_kwargs.teacher_topk_ids
        return None if ids is None or self.loss_cfg.kind != "topk" else self.layout.take(ids)

    def token_numbers(self, stats: TokenStats, loss_kwargs: Any) -> dict[str, Tensor]:
        """Log-probs, and the distance from the teacher."""
        return {**super().token_numbers(stats, loss_kwargs), "kl": self.loss_cfg._distance(stats, loss_kwargs)[0]}
