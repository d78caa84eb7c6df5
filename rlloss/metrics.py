"""Metrics that know how to be added up exactly over chunks, micro-batches and ranks.

A metric is a small record of 0-dim tensors without a graph. Its type says how it merges, so that nothing
has to be guessed from its name. Derived numbers (a mean, a standard deviation, an effective sample size)
are computed once, from the merged record.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rlloss.distributed import Group, all_gather_text, all_reduce_max, all_reduce_sum, world_size
from rlloss.errors import BatchError, ConfigError

M = TypeVar("M", bound="Metric")

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda mine, theirs: mine + theirs,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Metric:
    """Base of all metrics: its fields are 0-dim tensors that merge by `OPERATION`."""

    OPERATION: ClassVar[str] = "sum"

    def __post_init__(self) -> None:
        for name, value in self.parts().items():
            object.__setattr__(self, name, value.detach())

    def parts(self) -> dict[str, Tensor]:
        """Returns the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def merge(self: M, other: M) -> M:
        """Returns the metric of both parts together."""
        combine = _COMBINE[self.OPERATION]
        mine, theirs = self.parts(), other.parts()
        return type(self)(**{name: combine(mine[name], theirs[name]) for name in mine})

    def compute(self) -> Tensor:
        """Returns the number that is reported, a 0-dim tensor."""
        return next(iter(self.parts().values()))

    def __float__(self) -> float:
        return float(self.compute())


@dataclass(frozen=True)
class Sum(Metric):
    """A plain sum."""

    total: Tensor


@dataclass(frozen=True)
class Mean(Metric):
    """`total / count`, and 0 where nothing was counted."""

    total: Tensor
    count: Tensor

    def compute(self) -> Tensor:
        """Returns the mean."""
        return torch.where(self.count > 0, self.total / self.count.clamp(min=1e-300), 0.0)


@dataclass(frozen=True)
class Max(Metric):
    """A maximum; over nothing it reports 0."""

    OPERATION: ClassVar[str] = "max"
    value: Tensor

    def compute(self) -> Tensor:
        """Returns the maximum."""
        return torch.where(self.value == -torch.inf, 0.0, self.value)


@dataclass(frozen=True)
class Min(Metric):
    """A minimum; over nothing it reports 0."""

    OPERATION: ClassVar[str] = "min"
    value: Tensor

    def compute(self) -> Tensor:
        """Returns the minimum."""
        return torch.where(self.value == torch.inf, 0.0, self.value)


@dataclass(frozen=True)
class Moments(Metric):
    """Count, sum and sum of squares; reports the unbiased standard deviation."""

    count: Tensor
    total: Tensor
    total_sq: Tensor

    def variance(self) -> Tensor:
        """Returns the unbiased variance, 0 for fewer than two numbers."""
        mean = self.total / self.count.clamp(min=1)
        spread = self.total_sq - self.count * mean * mean
        # What is left of equal numbers is rounding, which differs from split to split.
        spread = torch.where(spread <= 1e-13 * self.total_sq, 0.0, spread)
        return torch.where(self.count > 1, spread / (self.count - 1).clamp(min=1), 0.0)

    def compute(self) -> Tensor:
        """Returns the unbiased standard deviation."""
        return self.variance().sqrt()


@dataclass(frozen=True)
class EffectiveSampleSize(Moments):
    """`(sum w)^2 / (n sum w^2)` of importance ratios, a fraction in (0, 1]."""

    def compute(self) -> Tensor:
        """Returns the fraction, and 0 where nothing was counted."""
        denominator = self.count * self.total_sq
        return torch.where(denominator <= 0, 0.0, self.total.square() / denominator.clamp(min=1e-300))


@dataclass(frozen=True)
class ExplainedVariance(Metric):
    """`1 - Var(target - predicted) / Var(target)` from named sums; 1 is perfect, below 0 is worse than a constant."""

    count: Tensor
    error: Tensor
    error_sq: Tensor
    target: Tensor
    target_sq: Tensor

    def compute(self) -> Tensor:
        """Returns the fraction, and 0 where the targets do not vary."""
        spread = Moments(self.count, self.target, self.target_sq).variance()
        missed = Moments(self.count, self.error, self.error_sq).variance()
        return torch.where(spread <= 0, 0.0, 1.0 - missed / spread.clamp(min=1e-300))


def explained_variance_of(predicted: Tensor, target: Tensor) -> ExplainedVariance:
    """Returns how much of the variance of a tensor another one of its shape predicts."""
    target = target.detach().double()
    error = target - predicted.detach().double()
    count = target.new_tensor(float(target.numel()))
    return ExplainedVariance(count, error.sum(), error.square().sum(), target.sum(), target.square().sum())


def mean_of(values: Tensor, counted: Tensor | None = None) -> Mean:
    """Returns the mean metric of a tensor of numbers, or of those that a mask of its shape counts."""
    values, count = _those(values, counted, 0.0)
    return Mean(values.sum(), count)


def max_of(values: Tensor, counted: Tensor | None = None) -> Max:
    """Returns the maximum metric of a tensor, which may be empty, or of the numbers that a mask counts."""
    values, _ = _those(values, counted, -torch.inf)
    return Max(values.amax() if values.numel() else values.new_tensor(-torch.inf))


def min_of(values: Tensor, counted: Tensor | None = None) -> Min:
    """Returns the minimum metric of a tensor, which may be empty, or of the numbers that a mask counts."""
    values, _ = _those(values, counted, torch.inf)
    return Min(values.amin() if values.numel() else values.new_tensor(torch.inf))


def moments_of(values: Tensor, kind: type[Moments] = Moments, counted: Tensor | None = None) -> Moments:
    """Returns count, sum and sum of squares of a tensor, or of the numbers that a mask counts."""
    values, count = _those(values, counted, 0.0)
    return kind(count, values.sum(), values.square().sum())


def _those(values: Tensor, counted: Tensor | None, fill: float) -> tuple[Tensor, Tensor]:
    """The numbers in float64, `fill` in the place of those that are not counted, and how many are."""
    values = values.detach().double()
    if counted is None:
        return values, values.new_tensor(float(values.numel()))
    return torch.where(counted, values, fill), counted.sum().double()


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the metrics of chunks or micro-batches, name by name.

    Args:
        parts: One mapping for each chunk or micro-batch. Anything in it that is no `Metric` is left out.

    Raises:
        BatchError: A part is no mapping, as where one mapping is given in the place of a list.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise BatchError(f"merge got a {type(part).__name__}, expected a list of mappings: merge([output.extra]).")
        for name, metric in part.items():
            if isinstance(metric, Metric):
                merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def require_metrics(owner: str, found: dict[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics of a loss; refuses numbers that do not add up over chunks, micro-batches and ranks.

    Raises:
        ConfigError: One is no `Metric`.
    """
    for name, value in found.items():
        if not isinstance(value, Metric):
            raise ConfigError(
                f"{owner} returned the metric {name!r} as a {type(value).__name__}, which does not add up over chunks "
                f"and ranks. Give a Metric of rlloss.metrics, such as mean_of(numbers)."
            )
    return found


def reduce(metrics: Mapping[str, Metric], group: Group = None) -> dict[str, float]:
    """Reduces metrics over ranks and reads them on the host.

    Every rank must hold the same names, which a first small collective makes sure of. Sums travel in a second one,
    maxima and minima in a third one; outside of torch.distributed there is none. A NaN on one rank is NaN on all.

    Args:
        metrics: Merged metrics of this rank.
        group: The ranks to reduce over; `None` is the default group.

    Returns:
        One float for each name.

    Raises:
        BatchError: The ranks hold different metrics; raised on all of them.
    """
    return {name: float(metric) for name, metric in over_ranks(metrics, group).items()}


def over_ranks(metrics: Mapping[str, Metric], group: Group = None) -> dict[str, Metric]:
    """Reduces metrics over ranks to metrics, on the host, that may be merged further; see `reduce`."""
    if not isinstance(metrics, Mapping):
        raise BatchError(f"reduce got a {type(metrics).__name__}, expected one mapping: reduce(merge(extras)).")
    kept = {name: metrics[name] for name in sorted(metrics) if isinstance(metrics[name], Metric)}
    _check_alike(kept, group)
    if not kept:
        return {}
    slots = [(name, part) for name, metric in kept.items() for part in metric.parts()]
    values = torch.stack([kept[name].parts()[part].double() for name, part in slots])
    operations = [kept[name].OPERATION for name, _ in slots]
    is_sum = torch.tensor([op == "sum" for op in operations], device=values.device)
    sign = torch.tensor([-1.0 if op == "min" else 1.0 for op in operations], device=values.device).double()
    # What a backend makes of the maximum of NaN depends on the order of ranks, so NaN travels with the sums.
    missing = values.isnan()
    sums = all_reduce_sum(torch.where(is_sum | missing, values, 0.0), group)
    extremes = all_reduce_max(torch.where(is_sum | missing, -torch.inf, sign * values), group)
    reduced = dict(zip(slots, torch.where(is_sum, sums, sign * extremes + sums).cpu().unbind(), strict=True))
    return {
        name: type(metric)(**{part: reduced[name, part] for part in metric.parts()}) for name, metric in kept.items()
    }


def _check_alike(metrics: Mapping[str, Metric], group: Group) -> None:
    """Compares names and types over ranks, whose vectors would otherwise not fit together."""
    if world_size(group) == 1:
        return
    names = [f"{name}: {type(metric).__name__}" for name, metric in metrics.items()]
    mark = float(zlib.crc32("\n".join(names).encode()))
    device = next((part.device for metric in metrics.values() for part in metric.parts().values()), None)
    highest, lowest = all_reduce_max(torch.tensor([mark, -mark], device=device, dtype=torch.float64), group).tolist()
    if highest == -lowest:
        return
    held = [set(text.split("\n")) - {""} for text in all_gather_text("\n".join(names), group)]
    everywhere = set.intersection(*held)
    odd = "; ".join(f"rank {rank} of the group: {sorted(own - everywhere)}" for rank, own in enumerate(held))
    raise BatchError(
        f"the ranks hold different metrics, beside those that all hold: {odd}. Reduce the merged metrics of the same "
        f"contexts on every rank; one without data has those of loss_cfg.empty(like=batch)."
    )
