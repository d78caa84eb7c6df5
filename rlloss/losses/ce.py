"""Cross-entropy: supervised fine-tuning with the same exact calibration and the same three modes."""

from typing import Any

from torch import Tensor

from rlloss.heads import TokenStats
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.kwargs import BaseLossKwargs
from rlloss.losses.terms import Reduction, Term
from rlloss.metrics import Metric, mean_of


class CELossConfig(BaseLossConfig):
    """`loss = -sum_t w_t log p(label_t)`, with weights `w` by `loss_reduction`."""

    loss_reduction: Reduction = "token"
    """Denominator; see `rlloss.losses.calibration`."""

    @property
    def loss_ctx_cls(self) -> type["CELossContext"]:
        """`CELossContext`."""
        return CELossContext

    @property
    def _loss_kwargs_cls(self) -> type["CELossKwargs"]:
        return CELossKwargs

    def terms(self) -> tuple[Term, ...]:
        """Cross-entropy alone."""
        return (Term("ce", _cross_entropy, reduction=self.loss_reduction, weight_field="loss_weight"),)


def _cross_entropy(stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
    metrics: dict[str, Metric] = {"nll": mean_of(-stats.log_prob)}
    if stats.entropy is not None:
        metrics["entropy"] = mean_of(stats.entropy)
    return -stats.log_prob, metrics


class CELossKwargs(BaseLossKwargs):
    """Tensors of a cross-entropy loss."""


class CELossContext(BaseLossContext):
    """Cross-entropy on one micro-batch."""

    loss_cfg: CELossConfig
    loss_kwargs: CELossKwargs
