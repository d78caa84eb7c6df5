"""Eager mode: whole logits and plain autograd. Slow and large, and easy to believe."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlloss.distributed import shared_input
from rlloss.heads.inputs import HeadInputs, HeadOptions, TokenStats
from rlloss.heads.logits import log_probs_of, scale_logits


def eager_stats(inputs: HeadInputs, options: HeadOptions) -> tuple[TokenStats, Tensor]:
    """Computes log-probs (and entropies) of the tokens that count from whole logits.

    Returns:
        The stats, with a graph, and the model's logits `[B, T, V]` (scaled and soft-capped, before temperature).
    """
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    if inputs.layout.index is not None:
        counts = torch.zeros(hidden.shape[0] * hidden.shape[1], dtype=torch.bool, device=hidden.device)
        counts = counts.index_fill(0, inputs.layout.index, True).reshape(hidden.shape[:2])
        # Garbage at an ignored position would reach the head gradient as 0 * nan.
        hidden = hidden.masked_fill(~counts[..., None], 0.0)
    if options.float32_logits and hidden.dtype != torch.float64:
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    vocab = inputs.vocab
    logits = F.linear(hidden if vocab is None else shared_input(hidden, vocab.group), weight, bias)
    logits = scale_logits(logits.to(inputs.compute_dtype), options.logit_scale, options.logit_softcap)
    rows = inputs.layout.take(logits)
    temperature = inputs.temperature
    rows = rows / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    evaluate = log_probs_of if vocab is None else vocab.log_probs_of
    log_prob, entropy, extra = evaluate(rows, inputs.labels, options.entropy != "none", inputs.extra_ids)
    if entropy is not None and options.entropy == "value":
        entropy = entropy.detach()
    return TokenStats(log_prob, entropy, inputs.layout.segments, inputs.labels, extra), logits
