"""Chunk mode for losses on logits: automatic differentiation of one chunk at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlloss.heads.chunk import refuse_double_backward
from rlloss.metrics import Metric, merge

LogitsLoss = Callable[[Tensor, Tensor, Tensor | None, Any], tuple[Tensor, tuple[Tensor | None, dict[str, Any]]]]
"""`(hidden_states, head_weight, head_bias, loss_kwargs) -> (loss, (logits, extra))`."""

Tensors = tuple[Tensor, Tensor, Tensor | None]


def evaluate_per_chunk(
    loss_fn: LogitsLoss, tensors: Tensors, pieces: Sequence[Any], chunk_size: int
) -> tuple[Tensor, dict[str, Any]]:
    """Sums a loss over chunks along T; the graph of one chunk lives at a time.

    Args:
        loss_fn: The loss of one chunk.
        tensors: Hidden states `[B, T, H]`, head weight `[V, H]`, head bias `[V]` or None.
        pieces: The kwargs of each chunk.
        chunk_size: Tokens of a chunk.

    Returns:
        The summed loss, and `extra`: metrics merged, tensors stacked over chunks, all else listed.
    """
    extras: list[dict[str, Any]] = []
    call = (loss_fn, pieces, chunk_size, torch.is_grad_enabled(), extras)
    loss: Tensor = _PerChunk.apply(*tensors, call)  # type: ignore[no-untyped-call]
    return loss, _join(extras)


class _PerChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: tuple[Any, ...]) -> Tensor:
        loss_fn, pieces, size, grad_enabled, extras = call
        wanted = [grad_enabled and need for need in ctx.needs_input_grad[:3]]
        sums: list[Tensor | None] = [
            torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            if tensor is not None and want
            else None
            for tensor, want in zip((hidden, weight, bias), wanted, strict=True)
        ]
        total: Tensor | None = None
        for number, piece in enumerate(pieces):
            part = slice(number * size, (number + 1) * size)
            with torch.set_grad_enabled(any(wanted)):
                leaves = [
                    None if tensor is None else tensor.detach().requires_grad_(want)
                    for tensor, want in zip((hidden[:, part], weight, bias), wanted, strict=True)
                ]
                loss, (_, extra) = loss_fn(leaves[0], leaves[1], leaves[2], piece)
            extras.append({name: _detached(value) for name, value in extra.items()})
            total = loss.detach() if total is None else total + loss.detach()
            targets = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            if targets and loss.requires_grad:
                found = iter(torch.autograd.grad(loss, targets, allow_unused=True))
                gradients = [next(found) if want else None for want in wanted]
                _add(sums, gradients, part)
        ctx.save_for_backward(*sums)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return hidden.new_zeros(()) if total is None else total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        saved = ctx.saved_tensors
        pairs = zip(saved, ctx.dtypes, strict=True)
        return *(None if total is None else (total * grads[0]).to(dtype) for total, dtype in pairs), None


def _add(sums: list[Tensor | None], gradients: Sequence[Tensor | None], part: slice) -> None:
    for place, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
        if total is not None and gradient is not None:
            (total[:, part] if place == 0 else total).add_(gradient)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _join(extras: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = dict(merge(extras))
    for name in extras[0] if extras else ():
        values = [extra[name] for extra in extras if name in extra]
        if not isinstance(values[0], Metric):
            joined[name] = torch.stack(values) if isinstance(values[0], Tensor) else values
    return joined
