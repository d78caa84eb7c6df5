"""The products of a bfloat16 head on processors that multiply pairs of bfloat16 numbers (`csrc/bf16.c`)."""

import ctypes

import torch
from torch import Tensor

from rlloss.heads import native
from rlloss.heads.products import Folded, Products


def products_of(weight: Tensor, dtype: torch.dtype, exact_logits: bool) -> Products:
    """Chooses the products for a head weight `[V, H]`, by its device and dtype; takes the arguments of `Products`."""
    plain = type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if plain and weight.is_contiguous() and weight.shape[1] % 2 == 0 and native.multiplies_bfloat16():
        return BFloat16Products(weight, dtype, exact_logits)
    return Products(weight, dtype, exact_logits)


class BFloat16Products(Products):
    """Multiplies bfloat16 operands into float32 sums, several times as fast as float32 ones.

    Numbers of the chunk are rounded to bfloat16 for hidden gradients, which are rounded to it themselves; only the
    label's, the largest of a row, keeps its digits. For the weight gradient they are two bfloat16 numbers each, which
    hold 16 bits: its sum runs over tokens and micro-batches, and is to be no worse than its own last rounding.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, exact_logits: bool) -> None:
        super().__init__(weight, dtype, exact_logits)
        self.converts = False
        self.operand_dtype = weight.dtype
        self._work = weight.new_empty(0, dtype=torch.int32)

    @property
    def labels_apart(self) -> bool:
        """The labels' numbers stand in the chunk; `lost` says what they lose."""
        return False

    def numbers(self, chunk: Tensor) -> Tensor:
        """Returns the chunk as it is: numbers are rounded while they are packed."""
        return chunk

    def project(self, hidden: Tensor, words: slice, out: Tensor, bias: Tensor | None) -> None:
        """Writes `W[words] hidden^T + bias` to `out`, rounded to bfloat16 unless exact logits are wanted."""
        part = None if bias is None else bias[words].contiguous()
        place = None if part is None else part.data_ptr()
        self._call("project", words, hidden.contiguous(), out, place, int(self.rounds))

    def add_hidden(self, numbers: Tensor, words: slice, out: Tensor, first: bool) -> None:
        """Adds `numbers^T W[words]` to `out` `[C, H]`, or writes it when it is the first."""
        self._call("add_hidden", words, None, numbers, out.data_ptr(), int(first))

    def lost(self, labels: Tensor) -> Tensor:
        """Returns what rounding takes from the labels' numbers `[C]`."""
        return labels - labels.to(self.operand_dtype)

    def fold(self, hidden: Tensor, factor: Tensor) -> Folded:
        """Returns hidden rows as they are, and their factors, by which numbers of the chunk are multiplied instead."""
        return Folded(self.operand(hidden).contiguous(), factor.contiguous())

    def add_weight(self, numbers: Tensor, folded: Folded, out: Tensor, first: bool) -> None:
        """Adds `numbers folded` to `out`, the words' rows of the weight gradient."""
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
