"""The products of a bfloat16 head on processors that multiply pairs of bfloat16 numbers (`csrc/bf16.c`)."""

import ctypes

import torch
from torch import Tensor

from rlloss.heads import native
from rlloss.heads.products import Folded, Products


def products_of(
    weight: Tensor, dtype: torch.dtype, exact_logits: bool, hidden: Tensor, bias: Tensor | None
) -> Products:
    """Chooses the products for a head weight `[V, H]`.

    Args:
        weight: `[V, H]`, without a graph.
        dtype: float32 or float64, of logits and sums.
        exact_logits: Form logits in `dtype` even out of 16-bit inputs.
        hidden: `[N, H]`, what it will be multiplied with; compiled products read its memory.
        bias: `[V]` or `None`, what will be added; the same.

    Returns:
        Compiled products where the processor, the dtype and the places of all tensors allow them, else torch's.
    """
    fits = weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] % 2 == 0
    if fits and native.all_plain(weight, hidden, bias) and native.multiplies_bfloat16():
        return BFloat16Products(weight, dtype, exact_logits)
    return Products(weight, dtype, exact_logits)


class BFloat16Products(Products):
    """Multiplies bfloat16 operands into float32 sums, several times as fast as float32 ones.

    Exponentials are rounded to bfloat16 for hidden gradients, which are rounded to it themselves. Their sum over the
    words of a row, its label aside, is kept (`scale`): else what words have in common, which cancels with the label's
    part, would leave an error. Derivatives in the chunk (entropies, soft caps, teachers) have both signs, and are two
    bfloat16 numbers each, which hold 16 bits. So are all numbers for the weight gradient: its sum runs over tokens and
    micro-batches, and is to be no worse than its own last rounding.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, exact_logits: bool) -> None:
        super().__init__(weight, dtype, exact_logits)
        self.converts = False
        self.operand_dtype = weight.dtype
        self._work = weight.new_empty(0, dtype=torch.int32)
        self._sums: Tensor | None = None

    @property
    def weight_apart(self) -> bool:
        """The labels' numbers are in the chunk when it is multiplied with hidden states."""
        return False

    def numbers(self, chunk: Tensor) -> Tensor:
        """Returns the chunk as it is: numbers are rounded while they are packed."""
        return chunk

    def project(self, hidden: Tensor, words: slice, out: Tensor, bias: Tensor | None) -> None:
        """Writes `W[words] hidden^T + bias` to `out` `[words, C]`, rounded to bfloat16 unless they are to be exact."""
        part = None if bias is None else bias[words].contiguous()
        place = None if part is None else part.data_ptr()
        self._call("project", words, hidden.contiguous(), out, place, int(self.rounds))

    def add_hidden(self, numbers: Tensor, words: slice, out: Tensor, first: bool, positive: bool) -> None:
        """Adds `numbers^T W[words]` to `out` `[C, H]`, or writes it when it is the first."""
        sums = numbers.new_zeros(2, numbers.shape[1]) if first or self._sums is None else self._sums
        self._call("add_hidden", words, None, numbers, out.data_ptr(), sums.data_ptr(), int(first), int(not positive))
        self._sums = sums if positive else None

    def scale(self) -> Tensor | None:
        """Returns the sum of each row before rounding over that after it `[C]`, or `None`: 1."""
        if self._sums is None:
            return None
        kept, lost = self._sums
        return torch.where(kept > 0, 1.0 + lost / kept, 1.0)

    def fold(self, hidden: Tensor, factor: Tensor) -> Folded:
        """Returns hidden rows `[C, H]` as they are, and factors `[C]`, by which the chunk is multiplied instead."""
        return Folded(self.operand(hidden).contiguous(), factor.contiguous())

    def add_weight(self, numbers: Tensor, folded: Folded, out: Tensor, first: bool) -> None:
        """Adds `numbers folded` to `out` `[words, H]`, the words' rows of the weight gradient."""
        assert folded.unit is not None
        words = slice(0, numbers.shape[0])
        self._call("add_weight", words, folded.rows, numbers, folded.unit.data_ptr(), out.data_ptr(), int(first))

    def _call(self, name: str, words: slice, hidden: Tensor | None, chunk: Tensor, *arguments: int | None) -> None:
        """Calls one of the three products on rows of the chunk `[words, C]`."""
        library, part = native.library(), self.weight[words]
        assert library is not None
        head = native.Head(
            words=chunk.shape[0],
            rows=chunk.shape[1],
            width=part.shape[1],
            weight=part.data_ptr(),
            hidden=None if hidden is None else hidden.data_ptr(),
            chunk=chunk.data_ptr(),
            stride=chunk.stride(0),
            threads=torch.get_num_threads(),
        )
        size = library.rlloss_bf16_workspace(ctypes.byref(head))
        if self._work.numel() < size:
            self._work = self._work.new_empty(size)
        head.work = self._work.data_ptr()
        getattr(library, f"rlloss_bf16_{name}")(ctypes.byref(head), *arguments)
