"""Rollout correction of a micro-batch, and of the step it belongs to: what `build_batches` does with the rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlloss.distributed import Group, all_reduce_sum
from rlloss.errors import BatchError
from rlloss.functional.rollout import RolloutRule, correct_rollout, mismatch_metrics
from rlloss.layout import exchange_sizes, token_layout
from rlloss.losses.seen import Seen
from rlloss.metrics import Metric


@dataclass(frozen=True)
class RolloutOutcome:
    """The correction of one micro-batch.

    Attributes:
        sources: The tensors that it was computed from; a changed one outdates it.
        rules: The rules that were applied; others outdate it.
        weights: `[B, T]`, importance weights before they are normalised over the step; 1 at ignored positions.
        rejected: `[B, T]` bool, tokens that leave the step.
        mismatch: Metrics of the two policies' distance.
        metrics: Metrics of weights and rejection.
        normalizer: `[2]` float64, sum and number of the weights.
    """

    sources: tuple[Seen, ...]
    rules: tuple[RolloutRule, ...]
    weights: Tensor
    rejected: Tensor
    mismatch: dict[str, Metric]
    metrics: dict[str, Metric]
    normalizer: Tensor


def rollout_outcome(context: Any, leaves: Tensor | None) -> RolloutOutcome:
    """Computes weights and rejection of a micro-batch; labels and inputs stay as they are.

    Args:
        context: The context; its `loss_kwargs` hold `rollout_logprobs`.
        leaves: `[B, T]` bool, tokens that leave the step anyway and take no part, or None.

    Raises:
        BatchError: The log-probs of the trainer's policy are missing.
    """
    kwargs, cfg = context.loss_kwargs, context.loss_cfg
    train, rollout = check_policy(context), kwargs.rollout_logprobs
    counts = kwargs.shifted_labels != cfg.ignore_idx
    counts = counts if leaves is None else counts & ~leaves
    layout = token_layout(counts, kwargs.cu_seq_lens, int(counts.sum()), kwargs.shard)
    segments, _ = exchange_sizes([(layout.segments, [])])[0]
    old, new = layout.take(train).double(), layout.take(rollout).double()
    rules = cfg.rollout_is.compiled()
    found = correct_rollout(old - new, segments, rules)
    dtype = torch.float64 if torch.float64 in (train.dtype, rollout.dtype) else torch.float32
    return RolloutOutcome(
        sources=tuple(Seen.of(tensor) for tensor in _sources(context)),
        rules=rules,
        weights=layout.put(found.weights.to(dtype), fill=1.0),
        rejected=layout.put((~found.keep).to(torch.uint8)) != 0,
        mismatch=mismatch_metrics(old, new, segments),
        metrics=found.metrics,
        normalizer=found.normalizer,
    )


def check_policy(context: Any) -> Tensor:
    """Returns the log-probs of the policy that the sampling engine is compared with.

    Raises:
        BatchError: They are missing.
    """
    kwargs, name = context.loss_kwargs, type(context.loss_cfg).__name__
    current = context.loss_cfg.rollout_is.policy == "current"
    found: Tensor | None = kwargs.selection_logprobs if current else kwargs.old_logprobs
    if found is not None:
        return found
    put = "into the batch, or set them on ctx.loss_kwargs before build_batches"
    if current:
        raise BatchError(
            f"{name}: rollout_is.policy='current' compares rollout_logprobs with selection_logprobs, which are "
            f"missing. Put the log-probs of the current policy before the step {put}; policy='old' takes "
            f"old_logprobs instead."
        )
    raise BatchError(
        f"{name}: rollout_is compares rollout_logprobs with old_logprobs, which are missing. Put them {put}; "
        f"on_policy=True does not replace them. For rejection by the current policy set rollout_is.policy='current'."
    )


def is_current(outcome: RolloutOutcome | None, context: Any) -> bool:
    """Tells whether an outcome was computed from the tensors and the rules that the context holds now."""
    if outcome is None or outcome.rules != context.loss_cfg.rollout_is.compiled():
        return False
    return all(before.is_still(now) for before, now in zip(outcome.sources, _sources(context), strict=True))


def normalize_step(contexts: Sequence[Any], like: Tensor, group: Group) -> None:
    """Divides the weights of all contexts by their mean over the step; one collective.

    Args:
        contexts: The contexts; none where this rank's batches failed and it only takes part in the collective.
        like: A tensor on the device.
        group: The ranks of the step.
    """
    total = like.new_zeros(2, dtype=torch.float64)
    corrected = [context for context in contexts if context._rollout is not None]
    for context in corrected:
        total = total + context._rollout.normalizer
    total = all_reduce_sum(total, group)
    mean = total[0] / total[1].clamp(min=1.0)
    factor = torch.where(mean > 1e-8, 1.0 / mean.clamp(min=1e-300), 1.0)
    for context in corrected:
        weights = context._rollout.weights
        context.loss_kwargs.set_computed("is_weights", (weights.double() * factor).to(weights.dtype))


def _sources(context: Any) -> tuple[Tensor | None, ...]:
    kwargs = context.loss_kwargs
    return (
        kwargs.shifted_labels,
        kwargs.rollout_logprobs,
        kwargs.old_logprobs,
        kwargs.selection_logprobs,
        kwargs.ref_logprobs,
        kwargs.cu_seq_lens,
    )
