"""OREAL: the policy loss on positive and negative samples, each with its own denominator, SFT on positive ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from rlloss.heads import TokenStats
from rlloss.losses.grpo import GRPOLossConfig, GRPOLossContext, GRPOLossKwargs
from rlloss.losses.kwargs import WeightTensor
from rlloss.losses.terms import Term, TermFn
from rlloss.metrics import Metric


class OrealLossConfig(GRPOLossConfig):
    """OREAL's loss (arXiv:2502.06781, equations 5 to 7), with XTuner's fields.

    With `N+` tokens of A > 0 and `N-` tokens of A <= 0:

        positive_loss_factor / N+ sum_{A>0} (pos_policy_loss_weight L_t - pos_sft_loss_weight log p_t)
        + negative_loss_factor / N- sum_{A<=0} L_t + kl_loss_coef KL

    A step with tokens of one sign only has no term for the other. `loss_reduction` other than "token" takes that
    reduction over each of the two sets.
    """

    positive_loss_factor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Factor of both terms on tokens with a positive advantage."""
    pos_sft_loss_weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Factor of the SFT term on them."""
    pos_policy_loss_weight: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Factor of the policy term on them."""
    negative_loss_factor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Factor of the policy term on all other tokens."""

    @property
    def loss_ctx_cls(self) -> type["OrealLossContext"]:
        """`OrealLossContext`."""
        return OrealLossContext

    @property
    def _loss_kwargs_cls(self) -> type["OrealLossKwargs"]:
        return OrealLossKwargs

    def terms(self) -> tuple[Term, ...]:
        """Policy on positive and on negative tokens (in one weight field), SFT on positive ones, KL, entropy."""
        factor = self.positive_loss_factor
        sft = Term(
            "sft",
            _sft,
            mask=_is_positive,
            reduction=self.loss_reduction,
            coef=factor * self.pos_sft_loss_weight,
            loss_length=self.loss_length,
            weight_field="sft_loss_weight",
        )
        return (
            self._policy_on("positive_policy", _is_positive, factor * self.pos_policy_loss_weight),
            self._policy_on("negative_policy", _is_not_positive, self.negative_loss_factor),
            sft,
            *self.shared_terms(),
        )

    def _policy_on(self, name: str, mask: Callable[[Any], Tensor], coef: float) -> Term:
        own: TermFn = self._restricted(mask)
        term = self._policy_term()
        return replace(term, name=name, fn=own, mask=mask, coef=coef, weight_field="policy_loss_weight")

    def _restricted(self, mask: Callable[[Any], Tensor]) -> TermFn:
        def policy(stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
            own = mask(loss_kwargs)
            weights = torch.where(own, loss_kwargs.policy_loss_weight, 0.0)
            values, metrics = self._policy(stats, loss_kwargs.with_tensors({"policy_loss_weight": weights}))
            return values if values.ndim == 0 else torch.where(own, values, 0.0), metrics

        return policy


def _is_positive(loss_kwargs: Any) -> Tensor:
    return loss_kwargs.advantages > 0  # type: ignore[no-any-return]


def _is_not_positive(loss_kwargs: Any) -> Tensor:
    return ~_is_positive(loss_kwargs)


def _sft(stats: TokenStats, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
    return -stats.log_prob, {}


class OrealLossKwargs(GRPOLossKwargs):
    """Tensors of an OREAL loss.

    Attributes:
        sft_loss_weight: `[B, T]`, token weights of the SFT term, its coefficients included.
    """

    sft_loss_weight: WeightTensor = None


class OrealLossContext(GRPOLossContext):
    """OREAL on one micro-batch."""

    loss_cfg: OrealLossConfig
    loss_kwargs: OrealLossKwargs
