"""From what a user hands to `forward` to the inputs of the head, with the checks that need both."""

from typing import Any

import torch
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.heads import HeadInputs, TokenStats
from rlloss.heads.vocab_parallel import Vocabulary, shard_vocabulary
from rlloss.layout import from_jagged, require_tensor


def head_inputs(context: Any, tensors: tuple[Tensor, Tensor, Tensor | None], vocab: Vocabulary) -> HeadInputs:
    """Collects the inputs of the head for one micro-batch.

    Args:
        context: The context.
        tensors: Hidden states, head weight, head bias.
        vocab: Group and mesh of the ranks that the vocabulary is cut over.

    Raises:
        BatchError: A label lies outside of the vocabulary, or the weight is cut in another way.
    """
    hidden, weight, bias = tensors
    require_tensor("hidden_states", hidden, "[B, T, H]")
    require_tensor("head_weight", weight, "[V, H]")
    if bias is not None:
        require_tensor("head_bias", bias, "[V]")
    layout, cfg = context.layout, context.loss_cfg
    labels = layout.take(context.loss_kwargs.shifted_labels).long()
    weight, bias, shard = shard_vocabulary(weight, bias, labels, vocab)
    vocabulary = int(weight.shape[0]) if shard is None else shard.total
    facts = context.label_facts
    # A head that is not [V, H] has an error of its own.
    fits = weight.ndim == 2 and vocabulary and hidden.shape[-1:] == weight.shape[1:]
    if facts.count and fits and facts.highest >= vocabulary:
        raise BatchError(
            f"shifted_labels contains {facts.highest}, but head_weight has {vocabulary} rows. Check the "
            f"tokenizer, or mark the token with ignore_idx={cfg.ignore_idx}."
        )
    given = context.loss_kwargs.temperature
    temperature = cfg.temperature if given is None else layout.take(given)
    words = context.extra_ids()
    if words is not None:
        check_words("extra_ids", words, vocabulary)
    return HeadInputs(from_jagged(hidden), weight, bias, labels, temperature, layout, words, shard)


def stats_of_log_probs(context: Any, log_probs: Tensor, entropy: Tensor | None) -> TokenStats:
    """Collects what a loss sees of the model from log-probs that an engine already has.

    Args:
        context: The context.
        log_probs: `[B, T]` or jagged, nats; ignored positions may hold anything.
        entropy: The same, where the loss needs it.

    Raises:
        BatchError: A shape does not fit, or the entropies that the loss needs are missing.
    """
    require_tensor("log_probs", log_probs, "[B, T]")
    if entropy is not None:
        require_tensor("entropy", entropy, "[B, T]")
    log_probs, entropy = from_jagged(log_probs), None if entropy is None else from_jagged(entropy)
    expected = tuple(context.loss_kwargs.shifted_labels.shape)
    for name, tensor in (("log_probs", log_probs), ("entropy", entropy)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise BatchError(
                f"{name} has shape {tuple(tensor.shape)}, expected {expected}, the shape of shifted_labels."
            )
    if entropy is None and context.loss_cfg.head_options().entropy == "gradient":
        raise BatchError(
            f"{type(context.loss_cfg).__name__} needs entropies: give entropy={expected} to forward_log_probs."
        )
    layout = context.layout
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    taken = None if entropy is None else layout.take(entropy.to(wide.dtype))
    labels = layout.take(context.loss_kwargs.shifted_labels).long()
    return TokenStats(layout.take(wide), taken, layout.segments, labels)


def check_words(name: str, ids: Tensor, vocabulary: int) -> None:
    """Refuses ids of words that are not in the vocabulary; one host synchronisation.

    Raises:
        BatchError: One lies outside of `[0, vocabulary)`.
    """
    if not ids.numel():
        return
    lowest, highest = torch.stack([ids.amin(), ids.amax()]).tolist()
    if lowest < 0 or highest >= vocabulary:
        raise BatchError(
            f"{name} runs from {lowest} to {highest} at tokens that count, but head_weight has {vocabulary} rows. "
            f"Teacher and student must share a vocabulary."
        )
