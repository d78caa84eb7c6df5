"""Digits of the gradients out of 16-bit hidden states and heads, against float64.

Two norms: `worst`, max(a-b) over max(b), and `mean`, the Frobenius norm. The best that a 16-bit gradient can be is the
exact one rounded to it; in float16 and with a loss scale of 1 that alone is 2e-2 off in the Frobenius norm: most
entries of a gradient over 2^18 tokens lie below float16's smallest normal number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import CELossConfig, Totals
from rlloss.heads import native, products
from rlloss.heads.products import Products

CHUNKS = [16, 64, 256, 1024, None]
STEP_TOKENS = 2.0**18


@pytest.fixture(params=["here", "cpu", "device"])
def operands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The products as they are here, as on any CPU, and as a CUDA device forms them.

    That is with 16-bit operands, float32 sums, and one tile.
    """
    if request.param != "here":
        monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    elif not native.multiplies_bfloat16():
        pytest.skip("no products of bfloat16 numbers here")
    if request.param == "device":
        made = Products.__init__

        def on_a_device(self: Products, weight: Tensor, *args: Any) -> None:
            made(self, weight, *args)
            self.on_cpu, self.operand_dtype = False, weight.dtype

        monkeypatch.setattr(Products, "__init__", on_a_device)
        monkeypatch.setattr(products, "multiply_wide", multiply_exactly)
    return str(request.param)


def multiply_exactly(left: Tensor, right: Tensor, out: Tensor, first: bool) -> None:
    product = left.to(out.dtype) @ right.to(out.dtype)
    out.copy_(product) if first else out.add_(product)


def tensors(n: int, h: int, v: int, dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, n, h, generator=make).to(dtype).requires_grad_()
    weight = (spread * torch.randn(v, h, generator=make) / h**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (1, n), generator=make)


def exact_gradients(
    parts: tuple[Tensor, Tensor, Tensor], tokens: float, softcap: float | None = None, rounds: bool = False
) -> list[Tensor]:
    """Gradients of the mean cross-entropy in float64: `(p - onehot) / tokens` times W and h.

    With `rounds` at the logits that a 16-bit model itself would form.
    """
    hidden, weight, labels = parts[0].detach()[0], parts[1].detach().double(), parts[2][0]
    grad_hidden, grad_weight = torch.zeros(hidden.shape, dtype=torch.float64), torch.zeros_like(weight)
    for start in range(0, hidden.shape[0], 1024):
        rows = hidden[start : start + 1024].double()
        logits = rows @ weight.T
        if rounds:
            logits = logits.to(hidden.dtype).double()
        capped = logits if softcap is None else softcap * (logits / softcap).tanh()
        slope = capped.softmax(-1)
        slope[torch.arange(len(rows)), labels[start : start + 1024]] -= 1.0
        slope /= tokens
        if softcap is not None:
            slope *= 1.0 - (capped / softcap) ** 2
        grad_hidden[start : start + 1024] = slope @ weight
        grad_weight += slope.T @ rows
    return [grad_hidden[None], grad_weight]


def gradients(
    parts: tuple[Tensor, Tensor, Tensor], scale: float = 1.0, tokens: float | None = None, **fields: Any
) -> list[Tensor]:
    config = CELossConfig(mode="chunk", **fields)
    totals = None if tokens is None else Totals(tokens=tokens)
    ready = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": parts[2]})], totals=totals)[0]
    return list(torch.autograd.grad(scale * ready.forward(*parts[:2]).loss, parts[:2]))


def mean(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def worst(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).abs().max() / true.abs().max())


def assert_bfloat16(n: int, h: int, v: int, chunks: list[int | None]) -> None:
    """Logits of a fresh model: both ways to form logits; sharper ones: each against the logits that it has."""
    for spread, logits, rounds in [
        (1.0, "auto", False),
        (1.0, "float32", False),
        (3.0, "auto", True),
        (3.0, "float32", False),
    ]:
        parts = tensors(n, h, v, torch.bfloat16, spread)
        true = exact_gradients(parts, n, rounds=rounds)
        rounding = [mean(each.bfloat16(), each) for each in true]
        errors = [
            [
                mean(mine, each)
                for mine, each in zip(gradients(parts, chunk_size=size, logits_dtype=logits), true, strict=True)
            ]
            for size in chunks
        ]
        for name, best, of_sizes in zip(("hidden", "weight"), rounding, zip(*errors, strict=True), strict=True):
            assert max(of_sizes) <= 1.15 * best, (name, spread, logits, of_sizes, best)
            assert max(of_sizes) <= 1.05 * min(of_sizes), (name, spread, logits, of_sizes)


def test_s9_bf16_gradients_are_flat_over_chunk_sizes(operands: str) -> None:
    """A bf16 accumulator loses a digit with every halving of the chunk; the float32 one loses none."""
    assert_bfloat16(1024, 16, 256, CHUNKS)


@pytest.mark.slow
def test_s9_bf16_gradients_of_8192_tokens(operands: str) -> None:
    assert_bfloat16(8192, 64, 4000, CHUNKS)


def assert_float16(n: int, h: int, scale: float, **fields: Any) -> None:
    parts = tensors(n, h, 32000, torch.float16)
    found = gradients(parts, scale, STEP_TOKENS, chunk_size=min(n, 128), **fields)
    true = [scale * part for part in exact_gradients(parts, STEP_TOKENS, fields.get("logit_softcap"))]
    assert worst(found[1], true[1]) <= 1e-2
    for mine, each in zip(found, true, strict=True):
        assert mean(mine, each) <= 1.15 * mean(each.half(), each)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_fp16_gradients_do_not_underflow(scale: float, softcap: float | None, operands: str) -> None:
    """2^18 tokens in the step: a gradient of 4e-6 / V has no room in float16 before the loss scale."""
    assert_float16(32, 8, scale, logit_softcap=softcap, logits_dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["auto", "float32"])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_fp16_gradients_of_512_tokens(scale: float, logits: str, operands: str) -> None:
    assert_float16(512, 64, scale, logits_dtype=logits)
