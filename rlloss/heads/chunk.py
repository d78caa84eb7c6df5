"""Chunk mode: loss and gradients in one forward pass, without ever holding more logits than one chunk.

`backward` only multiplies by the upstream gradient. The mathematics is in `softmax.py`, the chunk of logits in
`buffer.py`, the walk over chunks in `sweep.py`; here are the two autograd functions around them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlloss.heads.inputs import HeadInputs, HeadOptions, Objective, TokenStats
from rlloss.heads.softmax import RowGradients, RowStats
from rlloss.heads.sweep import Sweep
from rlloss.metrics import Metric, merge


@dataclass
class _Call:
    """Everything of a call that is no differentiable tensor, and the metrics that come back.

    The tensors in `inputs` have no graph: what backward needs of them goes through `save_for_backward`.
    """

    inputs: HeadInputs
    options: HeadOptions
    objective: Objective | None
    grad_enabled: bool
    metrics: dict[str, Metric] = field(default_factory=dict)

    def with_tensors(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "_Call":
        """Returns the call on tensors that autograd has kept and checked."""
        return replace(self, inputs=replace(self.inputs, hidden=hidden, weight=weight, bias=bias))

    def without_tensors(self) -> "_Call":
        """Returns the call with one number in the place of each differentiable tensor."""
        one = self.inputs.labels.new_empty(())
        return replace(self, inputs=replace(self.inputs, hidden=one, weight=one, bias=None))


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
        sweep = Sweep(call.inputs, call.options, _wanted(ctx, call))
        assert call.objective is not None
        run = _additive if call.objective.additive else _joint
        loss, ctx.row_grads = run(sweep, call, call.objective)
        ctx.gradients = sweep.gradients()
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call, ctx.dtype = call.without_tensors(), hidden.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        # The gradients are multiplied in place and handed out, so that a step holds them once; a second backward
        # through the same graph computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = _gradients_again(ctx)
        return *_scaled(gradients, grads[0], ctx.dtype), None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = Sweep(call.inputs, call.options, (False, False, False)).stats()
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call = call.without_tensors()
        if rows.entropy is not None and call.options.entropy != "gradient":
            ctx.mark_non_differentiable(rows.entropy)
        return rows.log_prob, rows.entropy, rows.extra_log_prob

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        call: _Call = ctx.call.with_tensors(*ctx.saved_tensors)
        sweep = Sweep(call.inputs, call.options, _wanted(ctx, call))
        entropy = grads[1] if call.options.entropy == "gradient" else None
        sweep.second_pass(RowGradients(grads[0], entropy, None if call.inputs.extra_ids is None else grads[2]))
        return *_scaled(sweep.gradients(), None, call.inputs.hidden.dtype), None


def _gradients_again(ctx: Any) -> list[Tensor | None]:
    call: _Call = ctx.call.with_tensors(*ctx.saved_tensors)
    sweep = Sweep(call.inputs, call.options, _wanted(ctx, call))
    assert call.objective is not None
    again = sweep.repeat if call.objective.additive else sweep.second_pass
    again(ctx.row_grads)
    return sweep.gradients()


def _scaled(gradients: list[Tensor | None], factor: Tensor | None, dtype: torch.dtype) -> Iterator[Tensor | None]:
    """Yields the gradients times a factor in the dtype of their tensors, and lets go of each in turn."""
    # Reading a number on a CPU costs nothing; on a device the product is cheaper than the wait.
    if factor is not None and factor.device.type == "cpu" and factor == 1.0:
        factor = None
    for number in range(len(gradients)):
        gradient, gradients[number] = gradients[number], None
        if gradient is not None and factor is not None:
            gradient.mul_(factor)
        yield None if gradient is None else gradient.to(dtype)


def _wanted(ctx: Any, call: _Call) -> tuple[bool, bool, bool]:
    # needs_input_grad alone is True under no_grad as well.
    hidden, weight, bias = ctx.needs_input_grad[:3]
    return call.grad_enabled and hidden, call.grad_enabled and weight, call.grad_enabled and bias


def _additive(sweep: Sweep, call: _Call, objective: Objective) -> tuple[Tensor, RowGradients | None]:
    """One sweep: the loss is a sum over tokens, so each chunk is evaluated and differentiated at once."""
    losses, all_grads, metrics = [], [], []
    for start, stop in sweep.chunks(call.inputs.layout.num_tokens):
        part = slice(start, stop)
        rows = sweep.forward(part)
        loss, grads, found = _differentiate(_stats(rows, call, part), part, sweep, objective)
        if grads is not None:
            sweep.backward(part, rows, grads)
            all_grads.append(grads)
        losses.append(loss)
        metrics.append(found)
    call.metrics.update(merge(metrics))
    return torch.stack(losses).sum(), RowGradients.cat(all_grads) if all_grads else None


def _joint(sweep: Sweep, call: _Call, objective: Objective) -> tuple[Tensor, RowGradients | None]:
    """Two sweeps: log-probs of all tokens, one evaluation, and gradients of the rows that have one."""
    everything = slice(0, call.inputs.layout.num_tokens)
    loss, grads, metrics = _differentiate(_stats(sweep.stats(), call, everything), everything, sweep, objective)
    if grads is not None:
        sweep.second_pass(grads)
    call.metrics.update(metrics)
    return loss, grads


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
