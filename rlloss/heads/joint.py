"""A loss that looks across ranks is differentiated in forward, so that backward waits for nobody."""

from typing import Any

import torch
from torch import Tensor

from rlloss.heads.inputs import Objective, TokenStats
from rlloss.metrics import Metric


def evaluate_all(stats: TokenStats, objective: Objective) -> tuple[Tensor, dict[str, Metric]]:
    """Evaluates a loss on all tokens of a micro-batch.

    Plain autograd, except for a loss on sequences that are cut over ranks: its derivatives by log-probs and entropies,
    which need the other ranks, are taken at once.

    Args:
        stats: Numbers of the tokens that count, with a graph where gradients are wanted.
        objective: The loss.
    """
    everything = slice(0, int(stats.log_prob.shape[0]))
    if stats.segments.group is None or objective.additive or not torch.is_grad_enabled():
        return objective.fn(stats, everything)
    metrics: dict[str, Metric] = {}
    call = (stats, objective, everything, metrics)
    loss: Tensor = _Joint.apply(stats.log_prob, stats.entropy, stats.extra_log_prob, call)  # type: ignore[no-untyped-call]
    return loss, metrics


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_prob: Tensor, entropy: Tensor | None, extra: Tensor | None, call: tuple[Any, ...]
    ) -> Tensor:
        stats, objective, rows, metrics = call
        columns = {"log_prob": log_prob, "entropy": entropy, "extra_log_prob": extra}
        wanted = dict(zip(columns, ctx.needs_input_grad, strict=False))
        leaves = {
            name: part.detach().requires_grad_(wanted[name]) for name, part in columns.items() if part is not None
        }
        with torch.enable_grad():
            loss, found = objective.fn(stats._replace(**leaves), rows)
            asked = [leaf for leaf in leaves.values() if leaf.requires_grad]
            grads = torch.autograd.grad(loss, asked, allow_unused=True) if asked and loss.requires_grad else ()
        gradients = iter(grads or (None,) * len(asked))
        ctx.save_for_backward(*(next(gradients) if name in leaves and wanted[name] else None for name in columns))
        metrics.update(found)
        value: Tensor = loss.detach()
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if part is None else part * grads[0] for part in ctx.saved_tensors), None
