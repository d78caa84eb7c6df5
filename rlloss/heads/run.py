"""Chooses the mode, and checks what a user hands to the head."""

from dataclasses import replace

import torch
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.heads.chunk import chunk_loss, chunk_stats
from rlloss.heads.eager import eager_stats
from rlloss.heads.inputs import HeadInputs, HeadOptions, HeadOutput, Mode, Objective, TokenStats
from rlloss.heads.joint import evaluate_all
from rlloss.heads.liger import liger_cross_entropy, liger_stats


def run_head(mode: Mode, inputs: HeadInputs, options: HeadOptions, objective: Objective) -> HeadOutput:
    """Evaluates a loss on hidden states in the given mode.

    Args:
        mode: "eager", "chunk" or "liger".
        inputs: The tensors of the call.
        options: What to compute.
        objective: The loss.

    Raises:
        BatchError: A tensor of the call does not fit.
    """
    inputs = _prepare(inputs)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if mode == "chunk":
            loss, metrics = chunk_loss(inputs, options, objective)
            return HeadOutput(loss, metrics, None)
        stats, logits = _stats_with_graph(mode, inputs, options)
        loss, metrics = evaluate_all(stats, objective)
        return HeadOutput(loss, metrics, logits)


def token_stats(mode: Mode, inputs: HeadInputs, options: HeadOptions) -> tuple[TokenStats, Tensor | None]:
    """Computes log-probs (and entropies) alone, differentiable in every mode, and the logits in eager mode."""
    inputs = _prepare(inputs)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if mode == "chunk":
            return chunk_stats(inputs, options), None
        return _stats_with_graph(mode, inputs, options)


def fused_cross_entropy(inputs: HeadInputs) -> Tensor | None:
    """Sums the cross-entropy of the tokens that count by one kernel, or returns None where it cannot run."""
    inputs = _prepare(inputs)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        return liger_cross_entropy(inputs)


def _stats_with_graph(mode: Mode, inputs: HeadInputs, options: HeadOptions) -> tuple[TokenStats, Tensor | None]:
    return eager_stats(inputs, options) if mode == "eager" else (liger_stats(inputs, options), None)


def _prepare(inputs: HeadInputs) -> HeadInputs:
    """Checks shapes and brings hidden states and head to one dtype (autocast's, or the wider of the two)."""
    hidden, weight, bias = inputs.hidden, _plain("head_weight", inputs.weight), inputs.bias
    if weight.ndim != 2 or weight.numel() == 0:
        raise BatchError(
            f"head_weight has shape {tuple(weight.shape)}, expected [vocabulary, hidden]. A sharded weight must be "
            f"gathered before the loss (ZeRO-3: GatheredParameters; FSDP2: call the loss inside the module)."
        )
    expected = (*inputs.layout.shape, weight.shape[1])
    if tuple(hidden.shape) != expected:
        raise BatchError(
            f"hidden_states has shape {tuple(hidden.shape)}, expected {expected}: [B, T] of shifted_labels and H of "
            f"head_weight {tuple(weight.shape)}."
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise BatchError(f"head_bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},).")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        if hidden.dtype == torch.float64 or weight.dtype == torch.float64:
            dtype = torch.float64
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return replace(
        inputs,
        hidden=_plain("hidden_states", hidden).to(dtype),
        weight=weight.to(dtype),
        bias=None if bias is None else _plain("head_bias", bias).to(dtype),
    )


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Unwraps a DTensor on one rank; refuses a sharded one, which would silently be a part of the head."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    if mesh.size() == 1:
        return tensor.to_local()  # type: ignore[attr-defined, no-any-return]
    raise BatchError(
        f"{name} is a DTensor on a mesh of {mesh.size()} ranks with placements {tensor.placements}. "  # type: ignore[attr-defined]
        f"Run the loss where the whole weight is gathered: put it inside the module with rlloss.LMHead."
    )
