"""XTuner's metric names: tensors of a micro-batch, and their reduction over micro-batches and ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlloss.distributed import all_reduce_max, all_reduce_sum
from rlloss.functional.policy import bounded_ratio
from rlloss.metrics import Metric, Sum

PREFIX = "reduced_train_policy_"

PARTS = {
    "max_ratio": ("ratio_max", "value"),
    f"{PREFIX}ratio_max": ("ratio_max", "value"),
    f"{PREFIX}ratio_min": ("ratio_min", "value"),
    f"{PREFIX}ratio_abs_dev_sum": ("ratio_abs_dev", "total"),
    f"{PREFIX}kl1_sum": ("approx_kl_k1", "total"),
    f"{PREFIX}kl3_sum": ("approx_kl_k3", "total"),
    f"{PREFIX}valid_count": ("approx_kl_k1", "count"),
    f"{PREFIX}clip_low_count": ("ratio_below", "total"),
    f"{PREFIX}clip_high_count": ("ratio_above", "total"),
    "local_base_loss": ("loss", "total"),
}
"""XTuner's name in `extra` -> our metric, and the part of it."""

_MEANS = {
    f"{PREFIX}ratio_abs_dev_mean": f"{PREFIX}ratio_abs_dev_sum",
    f"{PREFIX}kl1": f"{PREFIX}kl1_sum",
    f"{PREFIX}kl3": f"{PREFIX}kl3_sum",
    f"{PREFIX}clip_frac_low": f"{PREFIX}clip_low_count",
    f"{PREFIX}clip_frac_high": f"{PREFIX}clip_high_count",
}


class ExtraInfo(dict[str, Any]):
    """`extra` under XTuner's names, 0-dim tensors that XTuner's log can stack.

    Args:
        tensors: By XTuner's name.
        metrics: The same facts and more as rlloss's metrics, for `rlloss.metrics.merge` and `reduce`.
    """

    def __init__(self, tensors: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
        super().__init__(tensors)
        self.metrics = dict(metrics)


def extra_info(extra: Mapping[str, Any]) -> ExtraInfo:
    """Names metrics as XTuner does; what a loss of the user's own returned as a tensor stays as it is."""
    metrics = {name: value for name, value in extra.items() if isinstance(value, Metric)}
    own = {name: value for name, value in extra.items() if isinstance(value, Tensor)}
    # Over no token a minimum is inf and a maximum 0, so that they take no part in the extremes of a step.
    named = {
        theirs: getattr(metrics[ours], part).clamp(min=0.0) if part == "value" else getattr(metrics[ours], part)
        for theirs, (ours, part) in PARTS.items()
        if ours in metrics
    }
    return ExtraInfo({**named, **own}, metrics)


def ratio_counts(log_prob: Tensor, old_log_prob: Tensor, policy_loss_cfg: Any) -> dict[str, Metric]:
    """Counts how far ratios are from 1, and how many lie outside of the clip bounds, whatever the advantage."""
    # A token with an infinite old log-prob has no ratio, and is not in the count that XTuner divides by.
    log_ratio = torch.where(torch.isinf(old_log_prob), 0.0, (log_prob - old_log_prob).detach())
    ratio = bounded_ratio(log_ratio).double()
    found: dict[str, Metric] = {"ratio_abs_dev": Sum((ratio - 1.0).abs().sum())}
    low, high = policy_loss_cfg.get("cliprange_low"), policy_loss_cfg.get("cliprange_high")
    if low is not None and high is not None:
        found["ratio_below"] = Sum((ratio < 1.0 - low).double().sum())
        found["ratio_above"] = Sum((ratio > 1.0 + high).double().sum())
    return found


def finalize_train_policy_metrics(
    extra_info_dict: Mapping[str, Any], device: str | torch.device | None = None
) -> dict[str, Any]:
    """Reduces the sums of one rank's step over ranks and divides them by the number of tokens.

    Args:
        extra_info_dict: Numbers under XTuner's names, merged over micro-batches; it is only read. Without a
            `reduced_train_policy_valid_count` it is returned as it is.
        device: Where the collectives run.

    Returns:
        A new dict: `reduced_train_policy_{ratio_abs_dev_mean,kl1,kl3,clip_frac_low,clip_frac_high,ratio_max,ratio_min}`
        and `max_ratio` in the place of sums and counts; 0 where no token counts. Ratios take part in it whatever the
        sign of the advantage.
    """
    count_name = f"{PREFIX}valid_count"
    if count_name not in extra_info_dict:
        return dict(extra_info_dict)
    clipped = all(_MEANS[name] in extra_info_dict for name in _MEANS if "clip" in name)
    means = [name for name in _MEANS if clipped or "clip" not in name]
    sums = [*(_MEANS[name] for name in means), count_name]
    edges = [f"{PREFIX}ratio_max", f"{PREFIX}ratio_min"]
    total = all_reduce_sum(_vector(extra_info_dict, sums, device))
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64, device=device)
    extremes = signs * all_reduce_max(signs * _vector(extra_info_dict, edges, device))
    *numerators, count = total.tolist()
    found = {name: value / count if count > 0 else 0.0 for name, value in zip(means, numerators, strict=True)}
    highest, lowest = (float(value) if count > 0 else 0.0 for value in extremes)
    reduced = {*_MEANS.values(), count_name, *edges, "max_ratio"}
    kept = {name: value for name, value in extra_info_dict.items() if name not in reduced}
    return {**kept, **found, edges[0]: highest, edges[1]: lowest, "max_ratio": highest}


def _vector(numbers: Mapping[str, Any], names: Iterable[str], device: Any) -> Tensor:
    return torch.tensor([float(numbers.get(name, 0.0)) for name in names], dtype=torch.float64, device=device)
