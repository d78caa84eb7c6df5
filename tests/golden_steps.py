"""One recorded micro-batch of log-probs `[B, R]` through the public API, by log-probs or by the two-word head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss import GRPOLossConfig, GRPOLossContext, Totals
from rlloss.metrics import Metric

WAYS = ("log_probs", "eager", "chunk")
HEADS: dict[str, dict[str, Any]] = {
    "log_probs": {},
    "eager": {"mode": "eager"},
    "chunk": {"mode": "chunk", "chunk_size": 3},
}


@dataclass
class Outcome:
    """Loss, gradient of it in each log-prob and entropy `[B, R]`, and metrics."""

    loss: Tensor
    grad: Tensor
    entropy_grad: Tensor | None
    extra: dict[str, float]


def labels_of(mask: Tensor) -> Tensor:
    """Word 0 where the mask is set."""
    return torch.where(mask != 0, 0, -100)


def run_log_probs(
    fields: dict[str, Any],
    batch: dict[str, Any],
    log_probs: Tensor,
    *,
    entropy: Tensor | None = None,
    totals: Totals | None = None,
    way: str = "log_probs",
) -> Outcome:
    """Evaluates one micro-batch; gradients of the heads are divided by the slope of the two-word head."""
    config = GRPOLossConfig(**{"reduce_loss": False, **fields, **HEADS[way]})
    context = GRPOLossContext.build_batches([config.build(batch)], totals=totals)[0]
    if way == "log_probs":
        leaf = log_probs.detach().clone().requires_grad_()
        spread = None if entropy is None else entropy.detach().clone().requires_grad_()
        output = context.forward_log_probs(leaf, spread)
        output.loss.backward()
        assert leaf.grad is not None
        return Outcome(output.loss.detach(), leaf.grad, None if spread is None else spread.grad, numbers(output.extra))
    hidden = torch.stack([log_probs, torch.log(-torch.expm1(log_probs))], dim=-1).detach().requires_grad_()
    output = context.forward(hidden, torch.eye(2, dtype=log_probs.dtype))
    output.loss.backward()
    assert hidden.grad is not None
    slope = -torch.expm1(log_probs)
    counts = batch["shifted_labels"] != -100
    torch.testing.assert_close(hidden.grad[..., 0], -hidden.grad[..., 1], rtol=1e-6, atol=1e-12, equal_nan=True)
    grad = torch.where(counts, hidden.grad[..., 0] / slope, hidden.grad[..., 0])
    return Outcome(output.loss.detach(), grad, None, numbers(output.extra))


def numbers(extra: dict[str, Any]) -> dict[str, float]:
    """Metrics as floats."""
    return {name: float(value) for name, value in extra.items() if isinstance(value, Metric)}


def typeable(log_probs: Tensor, mask: Tensor) -> bool:
    """Whether the two-word head can have these log-probs: finite and below 0."""
    kept = log_probs[mask != 0]
    return bool(((kept < 0) & kept.isfinite()).all())
