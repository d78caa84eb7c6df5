"""XTuner's rollout correction on packed tensors, with its numbers under its names."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rlloss
from rlloss.distributed import all_reduce_max, all_reduce_sum
from rlloss.errors import BatchError
from rlloss.functional.rollout import RolloutCorrection, correct_rollout, mismatch_metrics, rollout_statistic
from rlloss.layout import Segments, TokenLayout, token_layout
from rlloss.losses.batch import offsets_of
from rlloss.metrics import EffectiveSampleSize, moments_of

PREFIX = "mismatch/"

MISMATCH = {
    "mismatch_training_ppl": "train_ppl",
    "mismatch_training_log_ppl": "train_log_ppl",
    "mismatch_kl": "mismatch_k1",
    "mismatch_k3_kl": "mismatch_k3",
    "mismatch_rollout_ppl": "rollout_ppl",
    "mismatch_rollout_log_ppl": "rollout_log_ppl",
    "mismatch_log_ppl_diff": "log_ppl_diff",
    "mismatch_log_ppl_abs_diff": "log_ppl_abs_diff",
    "mismatch_log_ppl_diff_max": "log_ppl_diff_max",
    "mismatch_log_ppl_diff_min": "log_ppl_diff_min",
    "mismatch_ppl_ratio": "ppl_ratio",
    "mismatch_logprob_abs_diff": "mismatch_abs",
}
"""XTuner's name after `mismatch/` -> our metric. XTuner's perplexities are those of the whole packed row, and so are
the numbers given under its names; ours, in `extra`, are of each sequence."""

Numbers = dict[str, Any]


class RolloutImportanceSampling(rlloss.RolloutImportanceSampling):
    """The rules of `rlloss.RolloutImportanceSampling`, with XTuner's method."""

    def compute_rollout_importance_weights_and_metrics(
        self, old_log_prob: Tensor, rollout_log_prob: Tensor, num_tokens: Tensor, response_mask: Tensor
    ) -> tuple[Tensor | None, Tensor, Numbers, Numbers]:
        """Computes importance weights and rejection of a packed row.

        Args:
            old_log_prob: `[1, T]`, the trainer's, nats.
            rollout_log_prob: `[1, T]`, the sampling engine's, nats.
            num_tokens: `[S]`, lengths of the packed sequences.
            response_mask: `[1, T]`, tokens that count.

        Returns:
            Weights `[1, T]`, 0 at positions that do not count, or None without rules; the mask `[1, T]` of what is
            kept; numbers of the policies' distance; numbers of weights and rejection, none without rules.

        Raises:
            BatchError: The shapes do not fit.
        """
        layout = _layout(old_log_prob, num_tokens, response_mask)
        old, new = layout.take(old_log_prob).double(), layout.take(rollout_log_prob).double()
        mismatch = mismatch_numbers(old, new)
        if not self.compiled():
            return None, response_mask, mismatch, {}
        found = correct_rollout(old - new, layout.segments, self.compiled())
        weights = layout.put(found.weights.to(old_log_prob.dtype))
        mask = layout.put(found.keep.to(torch.float32))
        return weights, mask, mismatch, weight_numbers(self, old - new, layout.segments, found)


def metrics_of_context(context: Any) -> tuple[Numbers, Numbers]:
    """Returns XTuner's numbers of a context whose correction is computed."""
    kwargs, rules = context.loss_kwargs, context.loss_cfg.rollout_is
    mask = kwargs.shifted_labels != context.loss_cfg.ignore_idx
    layout = token_layout(mask, kwargs.cu_seq_lens, int(mask.sum()))
    old, new = layout.take(kwargs.old_logprobs).double(), layout.take(kwargs.rollout_logprobs).double()
    if not rules.compiled():
        return mismatch_numbers(old, new), {}
    found = correct_rollout(old - new, layout.segments, rules.compiled())
    return mismatch_numbers(old, new), weight_numbers(rules, old - new, layout.segments, found)


def mismatch_numbers(old_log_prob: Tensor, rollout_log_prob: Tensor) -> Numbers:
    """Measures the distance of two policies on the tokens `[N]` of one packed row."""
    whole = Segments(torch.zeros_like(old_log_prob, dtype=torch.int64), 1)
    found = mismatch_metrics(old_log_prob, rollout_log_prob, whole)
    numbers = {PREFIX + theirs: float(found[ours]) for theirs, ours in MISMATCH.items()}
    return {PREFIX + "valid": bool(old_log_prob.numel()), **numbers}


def weight_numbers(rules: Any, log_ratio: Tensor, segments: Segments, found: RolloutCorrection) -> Numbers:
    """Returns XTuner's numbers of weights and rejection; those of weights are none without rollout_is_threshold.

    Fractions and means of sequences are over sequences that have a token; XTuner also counts those without any.

    Args:
        rules: A `RolloutImportanceSampling`.
        log_ratio: `[N]`, nats.
        segments: The sequence of each token.
        found: The correction.
    """
    numbers = _rejection_numbers(rules, log_ratio, segments)
    if rules.rollout_is_threshold is not None:
        numbers |= _ratio_numbers(rules, log_ratio, segments)
    metrics = {PREFIX + "rollout_is_" + name: float(value) for name, value in numbers.items()}
    return {PREFIX + "valid": bool(log_ratio.numel()), **metrics}


def _ratio_numbers(rules: Any, log_ratio: Tensor, segments: Segments) -> Numbers:
    low, high = rules.rollout_is_threshold
    ratio = rollout_statistic(log_ratio, segments, rules.rollout_is_level, "ratio")
    present = segments.sizes > 0
    by_sequence = segments.mean(ratio)[present]
    by_unit = by_sequence if rules.rollout_is_level == "sequence" else ratio
    clamped = ratio.clamp(low, high)
    return {
        "max": _extreme(ratio, torch.amax),
        "min": _extreme(ratio, torch.amin),
        "mean": _mean(ratio),
        "ratio_fraction_high": _mean(by_unit > high),
        "ratio_fraction_low": _mean(by_unit < low),
        "std": clamped.std(correction=0) if clamped.numel() > 1 else 0.0,
        "eff_sample_size": moments_of(clamped, EffectiveSampleSize),
        "seq_mean": _mean(by_sequence),
        "seq_std": by_sequence.std() if by_sequence.numel() > 1 else 0.0,
        "seq_max": _extreme(by_sequence, torch.amax),
        "seq_min": _extreme(by_sequence, torch.amin),
        "seq_max_deviation": _extreme((by_sequence - 1.0).abs(), torch.amax),
        "seq_fraction_high": _mean(by_sequence > high),
        "seq_fraction_low": _mean(by_sequence < low),
    }


def _rejection_numbers(rules: Any, log_ratio: Tensor, segments: Segments) -> Numbers:
    present = segments.sizes > 0
    outside = {action: torch.zeros_like(log_ratio, dtype=torch.bool) for action in ("mask", "veto")}
    masks = False
    for rule in rules.compiled():
        if rule.action != "clamp":
            masks = masks or rule.action == "mask"
            values = rollout_statistic(log_ratio, segments, rule.level, rule.statistic)
            outside[rule.action] = outside[rule.action] | rule.outside(values)
    touched = {action: (segments.sum(value.double()) > 0)[present] for action, value in outside.items()}
    numbers = {"veto_fraction": _mean(touched["veto"]), "catastrophic_token_fraction": _mean(outside["veto"])}
    if masks:
        numbers |= {"masked_fraction": _mean(outside["mask"]), "seq_masked_fraction": _mean(touched["mask"])}
    return numbers


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def _extreme(values: Tensor, operation: Callable[[Tensor], Tensor]) -> float:
    return float(operation(values)) if values.numel() else 0.0


def _layout(row: Tensor, num_tokens: Tensor, mask: Tensor) -> TokenLayout:
    total = int(num_tokens.sum())
    if row.ndim != 2 or row.shape[0] != 1 or row.shape != mask.shape or total > row.shape[1]:
        raise BatchError(
            f"old_log_prob {tuple(row.shape)} and response_mask {tuple(mask.shape)} must be one packed row [1, T], "
            f"T at least the sum of num_tokens, {total}."
        )
    counts = mask != 0
    return token_layout(counts, offsets_of(num_tokens.to(row.device)), int(counts.sum()))


def merge_rollout_is_metrics(
    rollout_is_metrics: Sequence[Numbers], device: str | torch.device | None = None
) -> dict[str, float]:
    """Merges numbers of micro-batches and ranks as XTuner does: by "max" or "min" in their name, else their mean.

    Every micro-batch that has a token counts alike in a mean, whatever its size; the metrics in `extra` are exact.

    Args:
        rollout_is_metrics: One dict for each micro-batch, at least one.
        device: Where the collectives run.
    """
    valid = [bool(numbers.get(PREFIX + "valid", True)) for numbers in rollout_is_metrics]
    names = [name for name in rollout_is_metrics[0] if name != PREFIX + "valid"]
    signs = [1.0 if "max" in name else -1.0 if "min" in name else 0.0 for name in names]
    kept = [numbers for numbers, ok in zip(rollout_is_metrics, valid, strict=True) if ok]
    sums = torch.tensor([sum(float(numbers[name]) for numbers in kept) for name in names] + [float(len(kept))])
    best = [
        max((sign * float(n[name]) for n in kept), default=-torch.inf) for name, sign in zip(names, signs, strict=True)
    ]
    *totals, count = all_reduce_sum(sums.double().to(device)).tolist()
    extremes = all_reduce_max(torch.tensor(best, dtype=torch.float64, device=device)).tolist()
    return {
        name: 0.0 if not count else sign * extreme if sign else total / count
        for name, sign, extreme, total in zip(names, signs, extremes, totals, strict=True)
    }
