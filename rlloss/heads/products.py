"""The three matrix products of a head, some words of the vocabulary at a time, and the dtypes they run in."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlloss.heads.memory import large_empty

SMALL_HEAD = 1 << 14
"""Numbers of a weight gradient up to which it is summed over the tokens of a chunk in float64."""

SMALL_PIECE = 1 << 18
"""Numbers of the chunk, or of hidden states, that are float64 at once for that."""


class Folded(NamedTuple):
    """Hidden rows times a factor each, less what was divided out: one number of all, or one of each row."""

    rows: Tensor
    unit: Tensor | None


class Products:
    """Multiplies with one head weight, by torch's products.

    On a CPU 16-bit operands are multiplied in float32, tile by tile: processors without 16-bit matrix units are several
    times slower in them, and the result is the more exact one. Elsewhere the products take 16-bit operands, and give
    float32 where torch offers that.

    Args:
        weight: `[V, H]`, without a graph.
        dtype: float32 or float64, of logits and sums.
        exact_logits: Form logits in `dtype` even out of 16-bit inputs; otherwise they are rounded as the model's are.

    Attributes:
        converts: Whether operands are converted on the way, some words at a time.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, exact_logits: bool) -> None:
        self.weight, self.dtype = weight, dtype
        self.converts = weight.dtype != dtype
        self.rounds = self.converts and not exact_logits
        self.on_cpu = weight.device.type == "cpu"
        self.operand_dtype = dtype if self.on_cpu else weight.dtype
        self._tile = weight.new_empty(0, dtype=dtype)

    @property
    def hidden_apart(self) -> bool:
        """Whether the labels' numbers stay out of `add_hidden`: the largest of a row is not rounded to 16 bits."""
        return self.operand_dtype != self.dtype

    @property
    def weight_apart(self) -> bool:
        """Whether they stay out of `add_weight`."""
        return self.hidden_apart

    def operand(self, hidden: Tensor) -> Tensor:
        """Returns hidden states in the dtype of the products."""
        return hidden.to(self.operand_dtype)

    def numbers(self, chunk: Tensor) -> Tensor:
        """Returns some words of the chunk as `add_hidden` and `add_weight` take them."""
        return chunk.to(self.operand_dtype)

    def new_buffer(self, size: int) -> Tensor:
        """Returns uninitialised memory for `size` numbers."""
        return large_empty(self.weight, (size,), self.dtype)

    def project(self, hidden: Tensor, words: slice, out: Tensor, bias: Tensor | None) -> None:
        """Writes `W[words] hidden^T + bias` to `out`, in the precision of the model's own forward."""
        weight, column = self._weight(words), None if bias is None else bias[words, None]
        if weight.dtype == self.dtype:
            if column is None:
                torch.mm(weight, hidden.T, out=out)
            else:
                torch.addmm(column, weight, hidden.T, out=out)
            if self.rounds:
                out.copy_(out.to(self.weight.dtype))
        elif self.rounds:
            narrow = None if column is None else column.to(weight.dtype)
            out.copy_(torch.mm(weight, hidden.T) if narrow is None else torch.addmm(narrow, weight, hidden.T))
        else:
            multiply_wide(weight, hidden.T, out, first=True)
            if column is not None:
                out.add_(column)

    def add_hidden(self, numbers: Tensor, words: slice, out: Tensor, first: bool, positive: bool) -> None:
        """Adds `numbers^T W[words]` to `out` `[C, H]`, or writes it when it is the first.

        Args:
            numbers: `[words, C]`.
            words: Which they are.
            out: Hidden gradients so far.
            first: Whether there are none yet.
            positive: Whether no number is negative.
        """
        self._accumulate(numbers.T, self._weight(words), out, first)

    def scale(self) -> Tensor | None:
        """Returns what each row of `add_hidden`'s sums is to be multiplied by `[C]`, or `None`: 1."""
        return None

    def fold(self, hidden: Tensor, factor: Tensor) -> "Folded":
        """Returns `factor * hidden` as an operand; in float16 with its largest number near 1, or it underflows."""
        folded = large_empty(hidden, tuple(hidden.shape), self.dtype)
        torch.mul(hidden, factor[:, None], out=folded)
        if self.operand_dtype != torch.float16:
            return Folded(folded.to(self.operand_dtype), None)
        unit = folded.abs().amax().clamp(min=1e-30)
        return Folded((folded / unit).to(self.operand_dtype), unit)

    def add_weight(self, numbers: Tensor, folded: "Folded", out: Tensor, first: bool) -> None:
        """Adds `numbers folded` to `out`, the words' rows of the weight gradient."""
        if self.on_cpu and out.numel() <= SMALL_HEAD and out.dtype == torch.float32:
            # MKL sums a product of few rows or columns term by term on some processors: a million terms lose 3 digits.
            product = torch.zeros_like(out, dtype=torch.float64)
            step = max(SMALL_PIECE // max(out.shape), 1)
            for columns, rows in zip(torch.split(numbers, step, dim=1), torch.split(folded.rows, step), strict=True):
                product.addmm_(columns.double(), rows.double())
            out.copy_(product) if first else out.add_(product)
        else:
            self._accumulate(numbers, folded.rows, out, first, folded.unit)

    def _accumulate(self, left: Tensor, right: Tensor, out: Tensor, first: bool, unit: Tensor | None = None) -> None:
        if left.dtype == out.dtype:
            torch.mm(left, right, out=out) if first else out.addmm_(left, right)
        elif unit is None:
            multiply_wide(left, right, out, first)
        else:
            product = torch.empty_like(out)
            multiply_wide(left, right, product, first=True)
            torch.mul(product, unit, out=out) if first else out.addcmul_(product, unit)

    def _weight(self, words: slice) -> Tensor:
        part = self.weight[words]
        if part.dtype == self.operand_dtype:
            return part
        if self._tile.shape[0] < part.shape[0]:
            self._tile = part.new_empty(part.shape, dtype=self.operand_dtype)
        return self._tile[: part.shape[0]].copy_(part)


def multiply_wide(left: Tensor, right: Tensor, out: Tensor, first: bool) -> None:
    """Writes the product of 16-bit matrices to a float32 one, or adds it; rounds in between only where torch has to."""
    multiplies, adds = (False, False) if left.device.type != "cuda" else _wide_products(left.device, left.dtype)
    if first and multiplies:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    elif adds and not first:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        product = torch.mm(left, right, out_dtype=out.dtype) if multiplies else torch.mm(left, right)
        out.copy_(product) if first else out.add_(product)


@functools.cache
def _wide_products(device: torch.device, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether this torch multiplies 16-bit matrices into float32 on a device, and whether it adds them to one."""
    one = torch.ones(1, 1, device=device, dtype=dtype)
    total = torch.ones(1, 1, device=device)
    # torch has it since 2.8, not on ROCm; a float32 matrix to add to was refused at first.
    return (
        _runs(lambda: torch.mm(one, one, out_dtype=torch.float32)),
        _runs(lambda: torch.addmm(total, one, one, out_dtype=torch.float32, out=total)),
    )


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, TypeError):
        return False
    return True
