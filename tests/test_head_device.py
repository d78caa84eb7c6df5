"""What a CUDA device would see, on meta tensors: they cost nothing, have any size, and raise when a number is read.

Chunk mode takes the route of a device there: one tile for the whole chunk, 16-bit operands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss.heads import HeadInputs, HeadOptions, Objective, TokenStats
from rlloss.heads.chunk import chunk_loss
from rlloss.layout import token_layout
from test_head_limits import Watch

OPTIONS = {
    "plain": HeadOptions(skip_zero_rows=False),
    "float32 logits": HeadOptions(skip_zero_rows=False, float32_logits=True),
    "entropy and cap": HeadOptions(skip_zero_rows=False, entropy="gradient", logit_softcap=30.0),
}


def problem(n: int, h: int, v: int, dtype: torch.dtype) -> HeadInputs:
    layout = token_layout(torch.ones(1, n, dtype=torch.bool), None, n)
    hidden, weight, bias = (
        torch.empty(shape, device="meta", dtype=dtype).requires_grad_() for shape in ((1, n, h), (v, h), (v,))
    )
    return HeadInputs(hidden, weight, bias, torch.empty(n, device="meta", dtype=torch.int64), 1.0, layout)


def summed(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Any]]:
    total = stats.log_prob.sum()
    return (total if stats.entropy is None else total + stats.entropy.sum()), {}


@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_number_is_read_by_the_host(dtype: torch.dtype, name: str, additive: bool) -> None:
    inputs = problem(12, 8, 1000, dtype)
    loss, _ = chunk_loss(inputs, replace(OPTIONS[name], chunk_size=5), Objective(summed, additive))
    (3.0 * loss).backward()
    assert inputs.bias is not None
    for leaf in (inputs.hidden, inputs.weight, inputs.bias):
        assert leaf.grad is not None
        assert (leaf.grad.dtype, leaf.grad.shape) == (dtype, leaf.shape)


def test_reading_rows_without_a_gradient_is_the_one_read() -> None:
    options = HeadOptions(chunk_size=5)
    with pytest.raises(RuntimeError, match="meta"):
        chunk_loss(problem(12, 8, 1000, torch.bfloat16), options, Objective(summed, additive=True))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_peak_memory_at_full_size(dtype: torch.dtype, name: str) -> None:
    """4,096 tokens, H=4096, V=151,936: above inputs, gradients and accumulator a chunk of float32 logits and a bit."""
    n, h, v, chunk = 4096, 4096, 151936, 1024
    inputs = problem(n, h, v, dtype)
    with Watch() as watch:
        loss, _ = chunk_loss(inputs, replace(OPTIONS[name], chunk_size=chunk), Objective(summed, additive=True))
    kept = torch.float32.itemsize if dtype == torch.float16 else dtype.itemsize
    gradients = kept * n * h + 4 * v * h
    assert (watch.peak - gradients) / (4 * chunk * v) < (1.3 if dtype == torch.float32 else 1.8)
    with Watch() as watch:
        loss.backward()
    scaled = 0 if dtype == torch.float32 else (v * h + v + (n * h if dtype == torch.float16 else 0)) * dtype.itemsize
    assert watch.peak <= scaled + 4096
