"""From logits to log-probs and entropy with plain autograd, the readable reference."""

from typing import Any

import torch
from torch import Tensor

LOG_FLOOR = -1e4
"""Log-probs end here, those of words of probability 0 included; their gradient stays that of log-softmax. In sums over
words, logits this far below the maximum count as this far: `0 * -inf` never arises, and `exp` of it is 0 anyway."""


class _Floor(torch.autograd.Function):
    """`max(values, LOG_FLOOR)` with the gradient of `values`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clamp(min=LOG_FLOOR)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def floored(log_probs: Tensor) -> Tensor:
    """Returns log-probs no lower than `LOG_FLOOR`, with their own gradient."""
    found: Tensor = _Floor.apply(log_probs)  # type: ignore[no-untyped-call]
    return found


def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Applies a model's own logit scale and final soft cap, differentiable."""
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def log_probs_of(
    logits: Tensor, labels: Tensor, with_entropy: bool, extra_ids: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns log-probs of the labels, entropies, and log-probs of more words.

    `log_prob = max(q_y - log sum exp q, LOG_FLOOR)` and `H = log sum exp q - sum p q` with `q = logits - max`, bounded
    below in sums so that words of probability 0 add nothing to value or gradient.

    Args:
        logits: `[N, V]`, float32 or float64.
        labels: `[N]` int64 in `[0, V)`.
        with_entropy: Whether the entropy is wanted.
        extra_ids: `[N, K]` int64 in `[0, V)`, or `None`.

    Returns:
        `[N]`, `[N]` or `None`, `[N, K]` or `None`, nats.
    """
    whole = logits - logits.detach().amax(dim=-1, keepdim=True)
    # Unlike clamp, this leaves the gradient of a NaN a NaN.
    shifted = whole.masked_fill(whole < LOG_FLOOR, LOG_FLOOR)
    log_sum = torch.logsumexp(shifted, dim=-1)
    log_prob = floored(whole.gather(-1, labels[:, None]).squeeze(-1) - log_sum)
    extra = None if extra_ids is None else floored(whole.gather(-1, extra_ids) - log_sum[:, None])
    if not with_entropy:
        return log_prob, None, extra
    return log_prob, log_sum - ((shifted - log_sum[:, None]).exp() * shifted).sum(dim=-1), extra


def gather_logprobs(logits: Tensor, shifted_labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of labels out of whole logits.

    Args:
        logits: `[..., V]`, any floating dtype; 16-bit logits are taken to float32 first.
        shifted_labels: `[...]` integers aligned with the logits; negative labels are ignored.
        temperature: The logits are divided by it.

    Returns:
        `[...]`, nats, float32 or float64, differentiable; 0 where the label is negative.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    labels = shifted_labels.reshape(-1).long()
    # What stands at an ignored token, NaN included, has no part in the gradient either.
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype).masked_fill((labels < 0)[:, None], 0.0)
    flat = flat.div_(temperature)  # into the copy above: another one of all logits would be large
    log_prob, _, _ = log_probs_of(flat, labels.clamp(min=0), with_entropy=False)
    return torch.where(labels >= 0, log_prob, 0.0).reshape(shifted_labels.shape)
