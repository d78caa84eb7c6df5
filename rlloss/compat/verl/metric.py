"""verl's metrics: values of micro-batches with the way to aggregate them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from rlloss.errors import ConfigError


class AggregationType(Enum):
    """How values of micro-batches and ranks become one number."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_REDUCE: dict[AggregationType, Callable[[Sequence[float]], float]] = {
    AggregationType.MEAN: lambda values: sum(values) / len(values),
    AggregationType.SUM: sum,
    AggregationType.MIN: min,
    AggregationType.MAX: max,
}


class Metric:
    """Numbers of micro-batches that are aggregated in one way.

    Args:
        aggregation: The way, or its name.
        value: A first number, or several.
    """

    def __init__(self, aggregation: AggregationType | str, value: Any = ()) -> None:
        self.aggregation = aggregation if isinstance(aggregation, AggregationType) else _named(aggregation)
        self.values: list[float] = []
        self.append(value)

    def append(self, value: Any) -> None:
        """Adds a number, a tensor of one element, another metric's numbers, or several of these.

        Raises:
            ConfigError: A metric of another aggregation.
        """
        if isinstance(value, Metric):
            if value.aggregation is not self.aggregation:
                raise ConfigError(f"a {value.aggregation.name} metric cannot be appended to a {self.aggregation.name}.")
            self.values += value.values
        elif isinstance(value, torch.Tensor):
            self.values.append(float(value.detach()))
        elif isinstance(value, Iterable):
            for item in value:
                self.append(item)
        else:
            self.values.append(float(value))

    def aggregate(self) -> float:
        """Returns the number of one rank."""
        return float(_REDUCE[self.aggregation](self.values))

    @classmethod
    def aggregate_dp(cls, ranks: Sequence["Metric"]) -> float:
        """Returns the number over ranks: a sum adds up micro-batches after averaging each over the ranks.

        Raises:
            ConfigError: The ranks aggregate in different ways, or have unequal numbers of values.
        """
        kinds, counts = {rank.aggregation for rank in ranks}, {len(rank.values) for rank in ranks}
        if len(kinds) != 1 or len(counts) != 1:
            raise ConfigError(
                f"aggregate_dp got {len(ranks)} ranks with aggregations {sorted(kind.name for kind in kinds)} and "
                f"numbers of values {sorted(counts)}; expected one of each."
            )
        (kind,) = kinds
        if kind in (AggregationType.MIN, AggregationType.MAX):
            return float(_REDUCE[kind]([value for rank in ranks for value in rank.values]))
        means = [sum(values) / len(values) for values in zip(*(rank.values for rank in ranks), strict=True)]
        return float(_REDUCE[kind](means))


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduces lists of numbers as verl does: by "max" or "min" in their name, else the mean.

    A name such as `minibatch_x` contains "min" and is reduced to its minimum; `Metric` has no such trap.
    """
    return {name: _reduced(name, value) for name, value in metrics.items()}


def _reduced(name: str, value: Any) -> float:
    if isinstance(value, Metric):
        return value.aggregate()
    kind = AggregationType.MAX if "max" in name else AggregationType.MIN if "min" in name else AggregationType.MEAN
    return Metric(kind, value).aggregate()


def _named(name: str) -> AggregationType:
    try:
        return AggregationType(name.lower())
    except ValueError as error:
        known = ", ".join(kind.value for kind in AggregationType)
        raise ConfigError(f"unknown aggregation {name!r}. Known: {known}.") from error
