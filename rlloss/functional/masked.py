"""Statistics of the numbers that a mask counts, over the whole batch and all ranks."""

import torch
from torch import Tensor

from rlloss.distributed import Group, all_reduce_sum

VARIANCE_EPS = 1e-8
"""Added to the variance before its root is divided by, as in verl and TRL."""


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sums the numbers that count; what stands elsewhere, NaN included, has no part in value or gradient.

    Args:
        values: Any shape.
        mask: The same shape, bool or numbers; a number is a weight.
        dim: Dimension to sum over; None is all.

    Returns:
        0-dim, or `values` without `dim`.
    """
    weighted = torch.where(mask != 0, values, 0.0) * mask.to(_floating(values))
    return weighted.sum() if dim is None else weighted.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Averages the numbers that count on this rank: `sum x m / sum m`, and 0 where nothing counts.

    Args:
        values: Any shape.
        mask: The same shape, bool or numbers; a number is a weight.
        dim: Dimension to average over; None is all.
    """
    count = mask.to(_floating(values))
    count = count.sum() if dim is None else count.sum(dim)
    return masked_sum(values, mask, dim) / torch.where(count == 0, 1.0, count)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True, group: Group = None) -> Tensor:
    """Returns the variance of the numbers that count, 0 for fewer than two.

    `sum m (x - mean)^2 / sum m`, times `n / (n - 1)` when unbiased.

    Args:
        values: Any shape.
        mask: The same shape, bool or 0/1.
        unbiased: Whether to divide by n - 1.
        group: Ranks that hold parts of the batch; None is every rank. Two collectives.

    Returns:
        0-dim, the dtype of `values` (float32 for integers); without a graph.
    """
    return _moments(values, mask, unbiased, group)[1].to(_floating(values))


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, unbiased: bool = True, group: Group = None
) -> Tensor:
    """Scales the numbers that count to variance 1 (and mean 0), token by token.

    `(x - mean) / sqrt(var + 1e-8)`, plus the mean again without `shift_mean`. A single number becomes 0 (or stays).

    Args:
        values: Any shape.
        mask: The same shape, bool or 0/1.
        shift_mean: Whether the mean becomes 0.
        unbiased: Whether the variance divides by n - 1.
        group: Ranks that hold parts of the batch; None is every rank. Two collectives, which all of them must reach.

    Returns:
        The shape of `values` (float32 for integers), without a graph, 0 where the mask is 0: TRL and verl leave
        `mean - mean / std` there, which leaks into valid tokens in whatever is computed next.
    """
    mean, variance = _moments(values, mask, unbiased, group)
    scaled = (values.detach().double() - mean) * torch.rsqrt(variance + VARIANCE_EPS)
    scaled = scaled if shift_mean else scaled + mean
    return torch.where(mask != 0, scaled, 0.0).to(_floating(values))


def _floating(values: Tensor) -> torch.dtype:
    """The type of a statistic: that of the numbers, and float32 for integers, which would cut it off."""
    return values.dtype if values.is_floating_point() else torch.float32


def _moments(values: Tensor, mask: Tensor, unbiased: bool, group: Group) -> tuple[Tensor, Tensor]:
    """Mean and variance over ranks, float64, in two passes so that a large mean costs no digits."""
    counted = mask != 0
    numbers = torch.where(counted, values.detach(), 0.0).double()
    count, total = all_reduce_sum(torch.stack([counted.sum().double(), numbers.sum()]), group).unbind()
    mean = total / count.clamp(min=1.0)
    spread = all_reduce_sum(torch.where(counted, numbers - mean, 0.0).square().sum(), group)
    degrees = count - 1.0 if unbiased else count
    return mean, torch.where(count > 1, spread / degrees.clamp(min=1.0), 0.0 * spread)
