"""The three matrix products of a head, some columns of the vocabulary at a time, and the dtypes they run in."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlloss.heads.memory import large_empty


class Folded(NamedTuple):
    """Hidden rows times a factor each, and the number that was divided out of all of them."""

    rows: Tensor
    unit: Tensor | None


class Products:
    """Multiplies with one head weight.

    On a CPU 16-bit operands are multiplied in float32, tile by tile: processors without 16-bit matrix units are several
    times slower in them, and the result is the more exact one. Elsewhere the products take 16-bit operands, and give
    float32 where torch offers that.

    Args:
        weight: `[V, H]`, without a graph.
        dtype: float32 or float64, of logits and sums.
        exact_logits: Form logits in `dtype` even out of 16-bit inputs; otherwise they are rounded as the model's are.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, exact_logits: bool) -> None:
        self.weight, self.dtype = weight, dtype
        self.narrow = weight.dtype != dtype
        self.rounds = self.narrow and not exact_logits
        self.on_cpu = weight.device.type == "cpu"
        self.operand_dtype = dtype if self.on_cpu else weight.dtype
        self._tile = weight.new_empty(0, dtype=dtype)

    def operand(self, hidden: Tensor) -> Tensor:
        """Returns hidden states in the dtype of the products."""
        return hidden.to(self.operand_dtype)

    def new_buffer(self, size: int) -> Tensor:
        """Returns uninitialised memory for `size` numbers."""
        return large_empty(self.weight, (size,), self.dtype)

    def project(self, hidden: Tensor, columns: slice, out: Tensor, bias: Tensor | None) -> None:
        """Writes `hidden W[columns]^T + bias` to `out`, in the precision of the model's own forward."""
        weight = self._weight(columns)
        if weight.dtype == self.dtype:
            if bias is None:
                torch.mm(hidden, weight.T, out=out)
            else:
                torch.addmm(bias[columns], hidden, weight.T, out=out)
            if self.rounds:
                out.copy_(out.to(self.weight.dtype))
        elif self.rounds:
            product = torch.mm(hidden, weight.T)
            out.copy_(product if bias is None else product.add_(bias[columns]))
        else:
            out.copy_(_mm_wide(hidden, weight.T, self.dtype))
            if bias is not None:
                out.add_(bias[columns])

    def add_hidden(self, numbers: Tensor, columns: slice, out: Tensor, first: bool) -> None:
        """Adds `numbers W[columns]` to `out` `[C, H]`, or writes it when it is the first."""
        self._accumulate(numbers.to(self.operand_dtype), self._weight(columns), out, first)

    def fold(self, hidden: Tensor, factor: Tensor) -> "Folded":
        """Returns `factor * hidden` as an operand; 16-bit ones with their largest number near 1, or they underflow."""
        folded = hidden * factor[:, None]
        if folded.dtype == self.operand_dtype:
            return Folded(folded, None)
        unit = folded.abs().amax().clamp(min=1e-30)
        return Folded((folded / unit).to(self.operand_dtype), unit)

    def add_weight(self, numbers: Tensor, folded: "Folded", out: Tensor, first: bool) -> None:
        """Adds `numbers^T folded` to `out`, the columns' rows of the weight gradient."""
        self._accumulate(numbers.to(self.operand_dtype).T, folded.rows, out, first, folded.unit)

    def _accumulate(self, left: Tensor, right: Tensor, out: Tensor, first: bool, unit: Tensor | None = None) -> None:
        if left.dtype == out.dtype:
            torch.mm(left, right, out=out) if first else out.addmm_(left, right)
            return
        product = _mm_wide(left, right, out.dtype)
        product = product if unit is None else product.mul_(unit)
        out.copy_(product) if first else out.add_(product)

    def _weight(self, columns: slice) -> Tensor:
        part = self.weight[columns]
        if part.dtype == self.operand_dtype:
            return part
        if self._tile.shape[0] < part.shape[0]:
            self._tile = part.new_empty(part.shape, dtype=self.operand_dtype)
        return self._tile[: part.shape[0]].copy_(part)


def _mm_wide(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies 16-bit matrices into float32; without rounding in between where torch has a product that does it."""
    if left.device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)
