"""Chunk mode: loss and gradients in one forward pass, without ever holding more logits than one chunk.

`backward` only multiplies by the upstream gradient. The mathematics is in `softmax.py`, the walk over chunks in
`sweep.py`; here are the two autograd functions around them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlloss.heads.inputs import HeadInputs, HeadOptions, Objective, TokenStats
from rlloss.heads.softmax import RowGradients, RowStats
from rlloss.heads.sweep import Sweep
from rlloss.metrics import Metric, merge

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass
class _Call:
    """Everything of a call that is no differentiable tensor, and the metrics that come back."""

    inputs: HeadInputs
    options: HeadOptions
    objective: Objective | None
    grad_enabled: bool
    metrics: dict[str, Metric] = field(default_factory=dict)


def chunk_loss(inputs: HeadInputs, options: HeadOptions, objective: Objective) -> tuple[Tensor, dict[str, Metric]]:
    """Evaluates a loss, and its gradients where they are wanted, chunk by chunk.

    Returns:
        A 0-dim loss, float32 or float64, and the merged metrics.
    """
    call = _Call(inputs, options, objective, torch.is_grad_enabled())
    loss: Tensor = _ChunkedLoss.apply(inputs.hidden, inputs.weight, inputs.bias, call)  # type: ignore[no-untyped-call]
    return loss, call.metrics


def chunk_stats(inputs: HeadInputs, options: HeadOptions) -> TokenStats:
    """Computes log-probs (and entropies); backward projects the chunks a second time."""
    call = _Call(inputs, options, None, torch.is_grad_enabled())
    log_prob, entropy, extra = _ChunkedLogProbs.apply(inputs.hidden, inputs.weight, inputs.bias, call)  # type: ignore[no-untyped-call]
    return TokenStats(log_prob, entropy, inputs.layout.segments, inputs.labels, extra)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        wanted = _wanted(ctx, call)
        sweep = Sweep(call.inputs, call.options, wanted)
        assert call.objective is not None
        run = _additive if call.objective.additive else _joint
        loss = run(sweep, call, call.objective)
        ctx.save_for_backward(*(gradient for gradient in sweep.gradients() if gradient is not None))
        ctx.wanted = wanted
        ctx.dtypes = tuple(None if part is None else part.dtype for part in (hidden, weight, bias))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        saved = iter(ctx.saved_tensors)
        scaled = [
            (next(saved) * grads[0]).to(dtype) if wanted else None
            for wanted, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
        ]
        return *scaled, None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = Sweep(call.inputs, call.options, (False, False, False)).stats()
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call = call
        if rows.entropy is not None and call.options.entropy != "gradient":
            ctx.mark_non_differentiable(rows.entropy)
        return rows.log_prob, rows.entropy, rows.extra_log_prob

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        call: _Call = ctx.call
        wanted = _wanted(ctx, call)
        sweep = Sweep(call.inputs, call.options, wanted)
        entropy = grads[1] if call.options.entropy == "gradient" else None
        sweep.second_pass(RowGradients(grads[0], entropy, None if call.inputs.extra_ids is None else grads[2]))
        inputs = (call.inputs.hidden, call.inputs.weight, call.inputs.bias)
        parts = zip(sweep.gradients(), inputs, strict=True)
        return *(None if gradient is None or of is None else gradient.to(of.dtype) for gradient, of in parts), None


def _wanted(ctx: Any, call: _Call) -> tuple[bool, bool, bool]:
    # needs_input_grad alone is True under no_grad as well.
    hidden, weight, bias = ctx.needs_input_grad[:3]
    return call.grad_enabled and hidden, call.grad_enabled and weight, call.grad_enabled and bias


def _additive(sweep: Sweep, call: _Call, objective: Objective) -> Tensor:
    """One sweep: the loss is a sum over tokens, so each chunk is evaluated and differentiated at once."""
    losses, metrics = [], []
    for start, stop in sweep.chunks(call.inputs.layout.num_tokens):
        part = slice(start, stop)
        rows = sweep.forward(part)
        loss, grads, found = _differentiate(_stats(rows, call, part), part, sweep, objective)
        if grads is not None:
            sweep.backward(part, rows, grads)
        losses.append(loss)
        metrics.append(found)
    call.metrics.update(merge(metrics))
    return torch.stack(losses).sum()


def _joint(sweep: Sweep, call: _Call, objective: Objective) -> Tensor:
    """Two sweeps: log-probs of all tokens, one evaluation, and gradients of the rows that have one."""
    everything = slice(0, call.inputs.layout.num_tokens)
    loss, grads, metrics = _differentiate(_stats(sweep.stats(), call, everything), everything, sweep, objective)
    if grads is not None:
        sweep.second_pass(grads)
    call.metrics.update(metrics)
    return loss


def _stats(rows: RowStats, call: _Call, part: slice) -> TokenStats:
    segments = call.inputs.layout.segments.rows(part.start, part.stop)
    return TokenStats(rows.log_prob, rows.entropy, segments, call.inputs.labels[part], rows.extra_log_prob)


def _differentiate(
    stats: TokenStats, rows: slice, sweep: Sweep, objective: Objective
) -> tuple[Tensor, RowGradients | None, dict[str, Metric]]:
    """Evaluates the loss on log-probs as leaves: value, its derivatives by them, metrics."""
    if not sweep.wants_gradients:
        loss, metrics = objective.fn(stats, rows)
        return loss.detach(), None, metrics
    entropy = stats.entropy if sweep.options.entropy == "gradient" else None
    outputs = {"log_prob": stats.log_prob, "entropy": entropy, "extra_log_prob": stats.extra_log_prob}
    with torch.enable_grad():
        leaves: dict[str, Any] = {
            name: part.detach().requires_grad_() for name, part in outputs.items() if part is not None
        }
        loss, metrics = objective.fn(stats._replace(**leaves), rows)
        found: list[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            found = list(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    grads = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return loss.detach(), RowGradients(grads["log_prob"], grads.get("entropy"), grads.get("extra_log_prob")), metrics


def refuse_double_backward() -> None:
    """Raises when a graph of the gradients is asked for, which would otherwise vanish silently."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "mode='chunk' cannot differentiate its gradients (create_graph=True). Use mode='eager' for that."
        )
