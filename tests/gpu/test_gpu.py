"""Everything that only a CUDA device can show, in one call of at most five minutes: `pytest tests/gpu -m gpu -rA`.

Timings and peaks of the last test are recorded as properties (`--junitxml=gpu.xml` keeps them); nothing else is needed.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlloss import CELossConfig, GRPOLossConfig, LogProbConfig, Totals
from rlloss.bench.measure import Line, Plan, measure_errors, measure_peak, measure_times
from rlloss.bench.problem import Shape, exact_gradients, make_problem
from rlloss.bench.subjects import subjects
from rlloss.heads.products import _wide_products, multiply_wide

DEVICE = "cuda"
SIXTEEN_BITS = [torch.bfloat16, torch.float16]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def exact_float32() -> Any:
    """No TF32 in what is compared with float64, and no memory of the test before."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch.cuda.empty_cache()


def tensors(n: int, h: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, n, h, generator=make).to(DEVICE, dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=make) / h**0.5).to(DEVICE, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (1, n), generator=make).to(DEVICE)


def context(config: Any, batch: dict[str, Any], totals: Totals | None = None) -> Any:
    return config.loss_ctx_cls.build_batches([config.build(batch)], totals=totals)[0]


def rl_batch(labels: Tensor) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(1)
    n = labels.shape[1]
    return {
        "shifted_labels": labels,
        "advantages": torch.randn(1, n, generator=make).to(DEVICE),
        "old_logprobs": (-torch.rand(1, n, generator=make) - 6.5).to(DEVICE),
    }


def step(config: Any, batch: dict[str, Any], *leaves: Tensor, scale: float = 1.0, totals: Any = None) -> list[Tensor]:
    loss = context(config, batch, totals).forward(*leaves).loss
    return [loss.detach(), *torch.autograd.grad(scale * loss, leaves)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


def exact(hidden: Tensor, weight: Tensor, labels: Tensor, tokens: float, softcap: float | None = None) -> list[Tensor]:
    """Gradients of the cross-entropy in float64, 1024 rows at a time."""
    wide = weight.detach().double().requires_grad_()
    rows = hidden.detach()[0].double().requires_grad_()
    for part, target in zip(rows.split(1024), labels[0].split(1024), strict=True):
        logits = part @ wide.T
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        (F.cross_entropy(logits, target, reduction="sum") / tokens).backward(retain_graph=True)
    assert rows.grad is not None
    assert wide.grad is not None
    return [rows.grad[None], wide.grad]


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize("mode", ["chunk", "liger"])
def test_modes_agree_with_eager(dtype: torch.dtype, mode: Any) -> None:
    hidden, weight, labels = tensors(512, 64, 1000, dtype)
    found = [
        step(GRPOLossConfig(mode=each, chunk_size=128), rl_batch(labels), hidden, weight)  # type: ignore[arg-type]
        for each in ("eager", mode)
    ]
    assert_close(found[1], found[0], 1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS], ids=str)
def test_entropy_cap_bias_and_temperatures_agree_with_eager(dtype: torch.dtype) -> None:
    hidden, weight, labels = tensors(512, 64, 1000, dtype)
    bias = torch.linspace(-1.0, 1.0, 1000, device=DEVICE).to(dtype).requires_grad_()
    batch = {**rl_batch(labels), "temperature": torch.linspace(0.5, 2.0, 512, device=DEVICE)[None]}
    found = []
    for mode in ("eager", "chunk"):
        config = GRPOLossConfig(mode=mode, chunk_size=100, entropy_coef=0.1, logit_softcap=5.0, logit_scale=0.7)  # type: ignore[arg-type]
        found.append(step(config, batch, hidden, weight, bias))
    assert_close(found[1], found[0], 1e-4 if dtype == torch.float32 else 3e-2)


def test_liger_cross_entropy_takes_the_triton_kernel() -> None:
    hidden, weight, labels = tensors(512, 64, 1000, torch.float32)
    found = [
        step(CELossConfig(mode=mode), {"shifted_labels": labels}, hidden, weight)  # type: ignore[arg-type]
        for mode in ("eager", "liger")
    ]
    assert_close(found[1], found[0], 1e-3)


def test_under_autocast_and_a_gradient_scaler() -> None:
    """Float32 weights, 16-bit products, gradients in the weights' own dtype."""
    hidden, weight, labels = tensors(512, 64, 1000, torch.float32)
    plain = step(CELossConfig(mode="chunk"), {"shifted_labels": labels}, hidden, weight)
    for dtype in SIXTEEN_BITS:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
        optimizer = torch.optim.SGD([hidden, weight], lr=0.0)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=dtype):
            loss = context(CELossConfig(mode="chunk"), {"shifted_labels": labels}).forward(hidden, weight).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert hidden.grad is not None
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        assert_close([loss.detach(), hidden.grad, weight.grad], plain, 2e-2)


def test_on_a_stream_of_its_own() -> None:
    hidden, weight, labels = tensors(2048, 256, 8000, torch.bfloat16)
    plain = step(CELossConfig(mode="chunk", chunk_size=256), {"shifted_labels": labels}, hidden, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step(CELossConfig(mode="chunk", chunk_size=256), {"shifted_labels": labels}, hidden, weight)
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(found, plain, 1e-3)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_products_are_not_rounded_to_16_bits(dtype: torch.dtype, record_property: Any) -> None:
    """torch 2.13 multiplies 16-bit matrices into float32; whether it also adds them there is recorded."""
    multiplies, adds = _wide_products(torch.device(DEVICE, torch.cuda.current_device()), dtype)
    record_property("adds in the product", str(adds))
    assert multiplies
    make = torch.Generator().manual_seed(2)
    left, right = (torch.randn(size, generator=make).to(DEVICE, dtype) for size in ((300, 70), (70, 90)))
    out = torch.empty(300, 90, device=DEVICE)
    true = left.double() @ right.double()
    for times, first in ((1, True), (2, False)):
        multiply_wide(left, right, out, first)
        assert error(out, times * true) < 1e-6


def test_bf16_gradients_are_flat_over_chunk_sizes() -> None:
    hidden, weight, labels = tensors(8192, 512, 4000, torch.bfloat16)
    true = exact(hidden, weight, labels, 8192)
    for logits in ("auto", "float32"):
        errors = []
        for size in (16, 64, 256, 1024, None):
            config = CELossConfig(mode="chunk", chunk_size=size, logits_dtype=logits)  # type: ignore[arg-type]
            found = step(config, {"shifted_labels": labels}, hidden, weight)[1:]
            errors.append([error(mine, each) for mine, each in zip(found, true, strict=True)])
        for of_sizes, each in zip(zip(*errors, strict=True), true, strict=True):
            assert max(of_sizes) <= 1.05 * min(of_sizes), (logits, of_sizes)
            assert max(of_sizes) <= 1.15 * error(each.bfloat16(), each), (logits, of_sizes)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_fp16_gradients_do_not_underflow(scale: float, softcap: float | None) -> None:
    hidden, weight, labels = tensors(512, 64, 32000, torch.float16)
    config = CELossConfig(mode="chunk", chunk_size=128, logit_softcap=softcap, logits_dtype="float32")
    totals = Totals(tokens=2.0**18)
    found = step(config, {"shifted_labels": labels}, hidden, weight, scale=scale, totals=totals)[1:]
    true = [scale * part for part in exact(hidden, weight, labels, 2.0**18, softcap)]
    assert (found[1].double() - true[1]).abs().max() <= 1e-2 * true[1].abs().max()
    for mine, each in zip(found, true, strict=True):
        assert error(mine, each) <= 1.15 * error(each.half(), each)


@pytest.mark.parametrize("size", [1024, 16400])
def test_e22_more_numbers_than_an_int32_counts(size: int) -> None:
    """16,400 tokens of 131,072 words; in chunks, and as one chunk that alone has more than 2^31 numbers."""
    hidden, weight, labels = tensors(16400, 8, 131072, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    found = []
    for part in (slice(None), slice(-1, None)):
        ready = LogProbConfig(mode="chunk", chunk_size=size).build({"shifted_labels": labels[:, part]})
        log_prob = ready.forward(hidden[:, part], weight).loss[0, -1]
        grad_hidden, grad_weight = torch.autograd.grad(log_prob, (hidden, weight))
        assert grad_hidden[0, :-1].eq(0).all()
        found.append([log_prob.detach(), grad_hidden[0, -1], grad_weight])
    for whole, alone in zip(*found, strict=True):
        torch.testing.assert_close(whole, alone, rtol=1e-3, atol=1e-3)
    if size == 1024:
        assert torch.cuda.max_memory_allocated() < 4 * 16400 * 131072 // 4
    every_row = step(CELossConfig(mode="chunk", chunk_size=size), {"shifted_labels": labels}, hidden, weight)
    assert_close(every_row[1:], exact(hidden, weight, labels, 16400), 2e-2)


class Reads:
    """Counts the waits of the host for the device."""

    def __enter__(self) -> Reads:
        torch.cuda.synchronize()
        self._caught = warnings.catch_warnings(record=True)
        self._found = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(*error)

    @property
    def count(self) -> int:
        return sum("synchronizing" in str(each.message) for each in self._found)


def test_the_counter_of_reads_counts() -> None:
    with Reads() as reads:
        float(torch.ones(1, device=DEVICE))
    assert reads.count == 1


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1, "logit_softcap": 5.0}], ids=["plain", "entropy and cap"])
@pytest.mark.parametrize("skip", [True, False])
def test_host_reads(skip: bool, options: dict[str, Any]) -> None:
    """None in backward; in forward one for each chunk, and none at all with `skip_zero_rows=False`."""
    hidden, weight, labels = tensors(512, 64, 1000, torch.bfloat16)
    config = GRPOLossConfig(mode="chunk", chunk_size=128, skip_zero_rows=skip, **options)
    ready = context(config, rl_batch(labels))
    ready.forward(hidden, weight).loss.backward()
    with Reads() as forward:
        loss = ready.forward(hidden, weight).loss
    with Reads() as backward:
        (3.0 * loss).backward()
    assert (forward.count, backward.count) == (4 if skip else 0, 0)


@pytest.mark.parametrize("logits", ["auto", "float32"])
@pytest.mark.parametrize("n", [4096, 16384])
def test_peak_memory_is_one_chunk(n: int, logits: Any) -> None:
    """Above inputs, gradients and accumulator; flat in N; backward adds at most one copy of the gradients."""
    h, v, chunk = 512, 64000, 1024
    hidden, weight, labels = tensors(n, h, v, torch.bfloat16)
    ready = context(CELossConfig(mode="chunk", chunk_size=chunk, logits_dtype=logits), {"shifted_labels": labels})
    ready.forward(hidden, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = ready.forward(hidden, weight).loss
    gradients = 2 * n * h + 4 * v * h
    assert torch.cuda.max_memory_allocated() - before - gradients - 64 * n <= 1.8 * 4 * chunk * v
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - held <= 2 * (n * h + v * h) + (1 << 21)


@pytest.mark.parametrize("batch", ["dense", "rl"])
def test_time_and_memory(batch: Any, record_property: Any) -> None:
    """The bench's table at a realistic shape; the numbers are recorded, the accuracy and memory are asserted."""
    shape = Shape(8192, 2048, 128000, 1024, "bfloat16", batch, DEVICE)
    problem = make_problem(shape)
    exact_pair = exact_gradients(problem, block=512)
    errors: dict[str, float] = {}
    for subject in subjects(problem)[0]:
        line = Line(subject.name)
        if "no_grad" not in subject.name:
            measure_errors(subject, line, exact_pair)
            assert line.weight_error is not None
            errors[subject.name] = line.weight_error
        line.peak_mib = measure_peak(subject, shape)
        measure_times(subject, line, shape, Plan(9, 15, 9.0), None, lambda: None)
        record_property(subject.name, str(line.summary()))
        if subject.name == "rlloss chunk":
            gradients = 2 * shape.tokens * shape.hidden + 4 * shape.vocabulary * shape.hidden
            assert line.peak_mib is not None
            assert line.peak_mib * 2**20 < gradients + 1.8 * shape.chunk_bytes + 2 * shape.vocabulary * shape.hidden
    assert errors["rlloss chunk"] <= 1.05 * errors["torch, whole logits"]
