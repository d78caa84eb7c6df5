"""A loss is a list of terms; each has its own mask, reduction and coefficient, and all share one evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlloss.errors import NotCalibratedError, named_arguments
from rlloss.metrics import Metric, Sum, mean_of

Level = Literal["token", "step", "sequence"]
LEVELS = ("token", "step", "sequence")
"""What a number depends on, lowest first: its token; its token and a choice over the step that `build_batches` made;
its sequence. Only the last one keeps a loss from being evaluated chunk by chunk."""

Reduction = Literal["token", "sample", "square", "sequence_sum", "constant", "prompt", "sum"]

TermFn = Callable[[Any, Any], tuple[Tensor, dict[str, Metric]]]
"""Stats (`TokenStats`, of a critic `ValueStats`) and flat kwargs of the tokens that count ->
numbers `[N]` (weighted later) or a scalar that already is."""


@named_arguments
@dataclass(frozen=True)
class Term:
    """One summand of a loss.

    Attributes:
        name: Its name; `<name>_loss` is its share of the loss in the metrics.
        fn: From stats and flat kwargs to `[N]` or a weighted scalar.
        level: "token" when its numbers depend on their own token only, "step", or "sequence"; see `LEVELS`.
        mask: Which of the tokens that count it is about: flat kwargs -> `[N]` bool; None is all.
        reduction: Its denominator.
        coef: Factor; the weights in the kwargs contain it.
        weight_field: Kwargs field that holds its weights; `<name>_loss_weight` by default. Terms on disjoint tokens may
            share one.
        needs_entropy: Whether it reads the entropy (with gradient).
        factor_field: Kwargs field `[B, T]` that multiplies its weights (importance weights), or None.
        loss_length: L of the reduction "constant".
    """

    name: str
    fn: TermFn
    level: Level = "token"
    mask: Callable[[Any], Tensor] | None = None
    reduction: Reduction = "token"
    coef: float = 1.0
    weight_field: str = ""
    needs_entropy: bool = False
    factor_field: str | None = None
    loss_length: float | None = None

    @property
    def weight_name(self) -> str:
        """The kwargs field that holds the weights of this term."""
        return self.weight_field or f"{self.name}_loss_weight"

    @property
    def needs_sequences(self) -> bool:
        """Whether the term or its denominator must know where sequences begin."""
        return self.level != "token" or self.reduction not in ("token", "sum")


def evaluate(terms: Sequence[Term], stats: NamedTuple, loss_kwargs: Any) -> tuple[Tensor, dict[str, Metric]]:
    """Sums the terms over the given tokens.

    Args:
        terms: The terms of the loss.
        stats: Numbers of the model for the tokens that count; the first field is `[N]`.
        loss_kwargs: Flat kwargs of the same tokens.

    Returns:
        A scalar, additive over tokens for token-level losses, and the metrics.

    Raises:
        NotCalibratedError: A weight that a term multiplies with is None.
    """
    total: Tensor = stats[0].new_zeros(())
    metrics: dict[str, Metric] = {}
    for term in terms:
        weights = getattr(loss_kwargs, term.weight_name)
        if weights is None:
            raise NotCalibratedError(
                f"{term.weight_name} is None: the token weights are not calibrated. Call build_batches on the list of "
                f"all micro-batches of the optimiser step before forward."
            )
        own = _without_gradient(stats, weights == 0) if term.level == "token" else stats
        values, found = term.fn(own, loss_kwargs)
        share = values if values.ndim == 0 else weighted_sum(values, weights)
        metrics.update(found)
        metrics[f"{term.name}_loss"] = Sum(share.detach().double())
        total = total + share.to(total.dtype)
    return total, metrics


def _without_gradient(stats: Any, rows: Tensor) -> Any:
    """Cuts the graph of tokens whose numbers count for nothing: 0 times a NaN derivative would be NaN."""
    cut = {}
    for name, part in stats._asdict().items():
        if isinstance(part, Tensor) and part.requires_grad:
            mask = rows.reshape(-1, *[1] * (part.ndim - 1))
            cut[name] = torch.where(mask, part.detach(), part)
    return stats._replace(**cut)


def entropy_metric(stats: Any) -> dict[str, Metric]:
    """The mean entropy, where the head computed it."""
    return {} if stats.entropy is None else {"entropy": mean_of(stats.entropy)}


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Returns `sum values * weights`; a token of weight 0 adds nothing, whatever its number is.

    A NaN at a token of non-zero weight stays visible.
    """
    dtype = torch.promote_types(values.dtype, weights.dtype)
    product = torch.where(weights == 0, 0.0, values).to(dtype) * weights.to(dtype)
    return product.sum(dtype=torch.float64).to(dtype)
