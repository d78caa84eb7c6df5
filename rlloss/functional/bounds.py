"""A clamp for numbers that are exponentiated later."""

import torch
from torch import Tensor


def bound(values: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Clamps numbers; the gradient beyond the bounds is 0, and that of a NaN is not.

    `torch.clamp` sends a gradient of 0 to a NaN, which would hide it from whoever looks at gradients only.

    Args:
        values: Any shape.
        low: Lower bound, a number or a tensor of that shape.
        high: Upper bound.

    Returns:
        The shape of `values`.
    """
    return torch.where(values > high, high, torch.where(values < low, low, values))
