"""Cross-entropy: supervised fine-tuning with the same exact calibration and the same three modes."""

from typing import Any

from torch import Tensor

from rlloss.heads import HeadInputs, HeadOutput, Objective, TokenStats, fused_cross_entropy
from rlloss.losses.config import BaseLossConfig
from rlloss.losses.context import BaseLossContext
from rlloss.losses.kwargs import BaseLossKwargs
from rlloss.losses.terms import Reduction, Term, entropy_metric
from rlloss.metrics import Mean, Metric, Sum, mean_of


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
    return -stats.log_prob, {"nll": mean_of(-stats.log_prob), **entropy_metric(stats)}


class CELossKwargs(BaseLossKwargs):
    """Tensors of a cross-entropy loss."""


class CELossContext(BaseLossContext):
    """Cross-entropy on one micro-batch."""

    loss_cfg: CELossConfig
    loss_kwargs: CELossKwargs

    def _run_head(self, inputs: HeadInputs, objective: Objective) -> HeadOutput:
        """In liger mode on CUDA: by liger_kernel's own cross-entropy, where every token weighs the same."""
        config = self.loss_cfg
        plain = config.mode == "liger" and config.loss_reduction == "token" and config.logits_dtype == "auto"
        plain = plain and inputs.vocab is None
        weights = self.loss_kwargs.loss_weight
        if plain and weights is not None and type(self).token_loss is BaseLossContext.token_loss:
            total = fused_cross_entropy(inputs)
            flat = self.layout.take(weights)
            if total is not None and bool((flat == flat[0]).all()):
                count = total.new_tensor(float(flat.numel())).double()
                loss = total * flat[0].to(total.dtype)
                nll, share = Mean(total.detach().double(), count), Sum(loss.detach().double())
                return HeadOutput(loss, {"nll": nll, "ce_loss": share}, None)
        return super()._run_head(inputs, objective)
