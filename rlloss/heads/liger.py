"""Liger mode: log-probs through liger_kernel's tiled head, then the same losses as in the other modes."""

import os
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import BackendUnavailableError, ConfigError
from rlloss.heads.inputs import HeadInputs, HeadOptions, TokenStats
from rlloss.heads.logits import floored


def liger_stats(inputs: HeadInputs, options: HeadOptions) -> TokenStats:
    """Computes log-probs of the tokens that count, tile by tile, with liger_kernel.

    The result is float32 whatever comes in, with a graph that recomputes the tiles in backward.

    Raises:
        BackendUnavailableError: liger_kernel is not installed.
        ConfigError: An option that this mode does not have.
    """
    if inputs.extra_ids is not None:
        raise ConfigError(
            "mode='liger' computes the log-prob of the label alone, but the loss asks for those of more words of each "
            "token (extra_ids, a teacher's top-k). Use mode='chunk'."
        )
    if options.entropy != "none":
        raise ConfigError(
            "mode='liger' computes no entropies, but the loss asks for them (a term with needs_entropy). "
            "Use mode='chunk'."
        )
    if inputs.vocab is not None:
        raise ConfigError("mode='liger' takes a whole head weight, not one cut over ranks. Use mode='chunk'.")
    temperature = inputs.temperature
    if isinstance(temperature, Tensor):
        raise ConfigError(
            "mode='liger' takes one temperature for the whole batch, but the batch holds a temperature for each token. "
            "Use mode='chunk'."
        )
    _refuse_infinite_bias(inputs.bias)
    hidden, weight, bias = inputs.layout.take(inputs.hidden), inputs.weight, inputs.bias
    if options.float32_logits and hidden.dtype != torch.float64:
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    if hidden.shape[0] == 0:
        # liger_kernel has no tile to run: an empty product keeps the graph.
        log_prob = (hidden @ weight.T).sum(dim=-1).float()
        if bias is not None:
            log_prob = log_prob + bias.sum().float() * 0.0
    else:
        log_prob = _kernel().chunk_forward(
            hidden[None], weight, inputs.labels[None], bias=bias, temperature=float(temperature)
        )
        log_prob = _RefuseDoubleBackward.apply(log_prob)  # type: ignore[no-untyped-call]
    return TokenStats(floored(log_prob.reshape(-1)), None, inputs.layout.segments, inputs.labels)


def liger_cross_entropy(inputs: HeadInputs) -> Tensor | None:
    """Sums the cross-entropy of the tokens that count with liger_kernel's Triton kernel.

    Returns:
        A scalar with a graph, or `None` where that kernel does not run: no CUDA device (or TRITON_INTERPRET=1), no
        token, float64, a temperature.

    Raises:
        BackendUnavailableError: liger_kernel or Triton is not installed.
    """
    on_device = inputs.hidden.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    plain = not isinstance(inputs.temperature, Tensor) and inputs.temperature == 1.0 and inputs.extra_ids is None
    if not (on_device and plain) or inputs.labels.numel() == 0 or inputs.hidden.dtype == torch.float64:
        return None
    _refuse_infinite_bias(inputs.bias)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise _unavailable(error) from error
    kernel = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
    total = kernel(inputs.weight, inputs.layout.take(inputs.hidden), inputs.labels, inputs.bias)
    return _RefuseDoubleBackward.apply(total.float())  # type: ignore[no-untyped-call, no-any-return]


def _refuse_infinite_bias(bias: Tensor | None) -> None:
    if bias is not None and bool(torch.isneginf(bias).any()):
        raise ConfigError(
            "mode='liger' cannot take -inf in head_bias: its gradients would be NaN. Use mode='chunk', or a large "
            "negative number such as -1e4."
        )


def _kernel() -> Any:
    try:
        from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
    except ImportError as error:
        raise _unavailable(error) from error
    return LigerFusedLinearPPOBase


def _unavailable(error: ImportError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"mode='liger' needs liger_kernel, which could not be imported ({error}). "
        f"Install it with `pip install 'liger-kernel>=0.8.5,<0.9'`, or use mode='chunk'."
    )


class _RefuseDoubleBackward(torch.autograd.Function):
    """The identity, which raises when a graph of the gradients is asked for: the kernel would lose it silently."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "mode='liger' cannot differentiate its gradients (create_graph=True). Use mode='eager' for that."
            )
        return grads[0]
