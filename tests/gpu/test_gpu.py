"""Everything that only a CUDA device can show, in one call of a few minutes: `pytest tests/gpu -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlloss import CELossConfig, GRPOLossConfig, LogProbConfig, Totals
from rlloss.bench.measure import Line, Plan, measure_errors, measure_peak, measure_times
from rlloss.bench.problem import Shape, exact_gradients, make_problem
from rlloss.bench.subjects import subjects

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def tensors(n: int, h: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, n, h, generator=make).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=make) / h**0.5).to("cuda", dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (1, n), generator=make).cuda()


def context(config: Any, batch: dict[str, Any], totals: Totals | None = None) -> Any:
    return config.loss_ctx_cls.build_batches([config.build(batch)], totals=totals)[0]


def exact_weight_gradient(hidden: Tensor, weight: Tensor, labels: Tensor, tokens: float) -> Tensor:
    wide = weight.detach().double().requires_grad_()
    for part, target in zip(hidden.detach()[0].split(1024), labels[0].split(1024), strict=True):
        (F.cross_entropy(part.double() @ wide.T, target, reduction="sum") / tokens).backward()
    assert wide.grad is not None
    return wide.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["chunk", "liger"])
def test_modes_agree_with_eager(dtype: torch.dtype, mode: Any) -> None:
    hidden, weight, labels = tensors(512, 64, 1000, dtype)
    make = torch.Generator().manual_seed(1)
    batch = {
        "shifted_labels": labels,
        "advantages": torch.randn(1, 512, generator=make).cuda(),
        "old_logprobs": (-torch.rand(1, 512, generator=make) - 6.5).cuda(),
    }
    found = []
    for each in ("eager", mode):
        output = context(GRPOLossConfig(mode=each, chunk_size=128), batch).forward(hidden, weight)
        found.append([output.loss.detach(), *torch.autograd.grad(output.loss, (hidden, weight))])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert (mine.float() - theirs.float()).norm() <= tolerance * theirs.float().norm()


def test_entropy_cap_and_temperatures_agree_with_eager() -> None:
    hidden, weight, labels = tensors(512, 64, 1000, torch.float32)
    batch = {
        "shifted_labels": labels,
        "advantages": torch.ones(1, 512, device="cuda"),
        "old_logprobs": torch.full((1, 512), -7.0, device="cuda"),
        "temperature": torch.linspace(0.5, 2.0, 512, device="cuda")[None],
    }
    found = []
    for mode in ("eager", "chunk"):
        config = GRPOLossConfig(mode=mode, chunk_size=100, entropy_coef=0.1, logit_softcap=5.0)  # type: ignore[arg-type]
        loss = context(config, batch).forward(hidden, weight).loss
        found.append(torch.autograd.grad(loss, (hidden, weight)))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm()


def test_liger_cross_entropy_takes_the_triton_kernel() -> None:
    hidden, weight, labels = tensors(512, 64, 1000, torch.float32)
    found = []
    for mode in ("eager", "liger"):
        loss = context(CELossConfig(mode=mode), {"shifted_labels": labels}).forward(hidden, weight).loss  # type: ignore[arg-type]
        found.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight))])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-3 * theirs.norm()


def test_bf16_head_gradient_is_flat_over_chunk_sizes() -> None:
    hidden, weight, labels = tensors(8192, 512, 4000, torch.bfloat16)
    true = exact_weight_gradient(hidden, weight, labels, 8192)
    errors = []
    for size in (16, 128, 1024):
        config = CELossConfig(mode="chunk", chunk_size=size)
        loss = context(config, {"shifted_labels": labels}).forward(hidden, weight).loss
        errors.append(float((torch.autograd.grad(loss, weight)[0].double() - true).norm() / true.norm()))
    assert max(errors) <= 1.1 * min(errors)
    assert max(errors) < 5e-3


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_fp16_does_not_underflow(scale: float) -> None:
    hidden, weight, labels = tensors(512, 64, 32000, torch.float16)
    ready = context(CELossConfig(mode="chunk"), {"shifted_labels": labels}, Totals(tokens=2.0**18))
    found = torch.autograd.grad(scale * ready.forward(hidden, weight).loss, weight)[0].double()
    true = scale * exact_weight_gradient(hidden, weight, labels, 2.0**18)
    rounding = float((true.half().double() - true).norm() / true.norm())
    assert float((found - true).norm() / true.norm()) < max(1e-2, 1.5 * rounding)


def test_e22_more_numbers_than_an_int32_counts() -> None:
    hidden, weight, labels = tensors(16400, 8, 131072, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    whole = LogProbConfig(mode="chunk").build({"shifted_labels": labels}).forward(hidden, weight).loss
    alone = LogProbConfig(mode="chunk").build({"shifted_labels": labels[:, -1:]}).forward(hidden[:, -1:], weight).loss
    torch.testing.assert_close(whole[0, -1], alone[0, 0], rtol=1e-3, atol=1e-3)
    whole[0, -1].backward()
    assert hidden.grad is not None
    assert hidden.grad[0, :-1].eq(0).all()
    assert torch.cuda.max_memory_allocated() < 4 * 16400 * 131072


def test_no_host_synchronisation_in_backward() -> None:
    hidden, weight, labels = tensors(512, 64, 1000, torch.bfloat16)
    loss = context(CELossConfig(mode="chunk", chunk_size=128), {"shifted_labels": labels}).forward(hidden, weight).loss
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch", ["dense", "rl"])
def test_time_and_memory(batch: Any, record_property: Any) -> None:
    """The bench's table at a realistic shape; the numbers are recorded, the accuracy and memory are asserted."""
    shape = Shape(8192, 2048, 128000, 1024, "bfloat16", batch, "cuda")
    problem = make_problem(shape)
    exact = exact_gradients(problem, block=512)
    for subject in subjects(problem)[0]:
        line = Line(subject.name)
        measure_errors(subject, line, exact) if "no_grad" not in subject.name else None
        line.peak_mib = measure_peak(subject, shape)
        measure_times(subject, line, shape, Plan(5, 10, 9.0), None, lambda: None)
        record_property(subject.name, str(line.summary()))
        if subject.name == "rlloss chunk":
            gradients = 2 * shape.tokens * shape.hidden + 4 * shape.vocabulary * shape.hidden
            assert line.peak_mib is not None
            assert line.peak_mib * 2**20 < gradients + 1.8 * shape.chunk_bytes + 2 * shape.vocabulary * shape.hidden
