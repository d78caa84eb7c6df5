"""The compiled part of chunk mode: equal to torch's operators, whatever the tiles, threads and places of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from rlloss import CELossConfig, GRPOLossConfig
from rlloss.heads import native, passes
from small_tiles import cut_into_tiles


def draw(words: int, rows: int, scale: float = 5.0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(words * 1000 + rows)
    return scale * torch.randn(words, rows, generator=make), torch.randn(rows, generator=make)


@pytest.mark.usefixtures("with_native")
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 511, 512, 513, 1100])
@pytest.mark.parametrize("words", [1, 7, 255, 256, 300])
def test_exponentials_and_sums(words: int, rows: int) -> None:
    logits, shift = draw(words, rows)
    q = (logits - shift).double()
    kept = logits.clone()
    sums = passes.exponentiate(kept, shift, keep=True)
    torch.testing.assert_close(kept.double(), q.exp(), rtol=2e-7, atol=0)
    torch.testing.assert_close(sums.double().sum(0), q.exp().sum(0), rtol=5e-7, atol=0)
    assert sums.shape == (-(-words // passes.STRIP_WORDS), rows)
    kept = logits.clone()
    again, weighted = passes.exponentiate_with_entropy(kept, shift, keep=True)
    assert again.equal(sums)
    terms = q.exp() * q
    error = (weighted.double().sum(0) - terms.sum(0)).abs() / terms.abs().sum(0)
    assert error.max() < 1e-6
    left = logits.clone()
    assert passes.exponentiate(left, shift, keep=False).equal(sums)
    assert left.equal(logits)


@pytest.mark.usefixtures("with_native")
def test_numbers_at_the_ends() -> None:
    values = [float("nan"), float("inf"), -float("inf"), 100.0, 88.0, -86.9, -87.1, -100.0, 0.0, -1e30]
    logits = torch.tensor([values])
    wanted = logits.double().exp()
    wanted[:, [6, 7]] = 0.0  # no subnormal numbers
    wanted[:, 3] = torch.inf
    sums, weighted = passes.exponentiate_with_entropy(logits, torch.zeros(10), keep=True)
    torch.testing.assert_close(logits.double(), wanted, rtol=2e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(sums.double().sum(0), wanted.sum(0), rtol=1e-6, atol=0, equal_nan=True)
    assert weighted[0, [2, 6, 7, 9]].tolist() == [0.0] * 4
    assert weighted[0, 0].isnan()
    dense = torch.linspace(-87, 88, 200_001)[:, None].contiguous()
    error = dense.double().exp()
    passes.exponentiate(dense, torch.zeros(1), keep=True)
    assert ((dense.double() - error).abs() / error).max() < 1.3e-7


@pytest.mark.usefixtures("with_native")
def test_no_digit_depends_on_tiles_threads_or_the_place_of_a_row() -> None:
    logits, shift = draw(1500, 530)
    kept = logits.clone()
    sums = passes.exponentiate(kept, shift, keep=True)
    torch.set_num_threads(1)
    assert passes.exponentiate(logits.clone(), shift, keep=False).equal(sums)
    torch.set_num_threads(2)
    parts = [passes.exponentiate(part.clone(), shift, keep=False) for part in logits.split(3 * passes.STRIP_WORDS)]
    assert torch.cat(parts).equal(sums)
    for first, last in ((0, 3), (5, 40), (513, 530), (200, 201)):
        some = logits[:, first:last].contiguous()
        assert passes.exponentiate(some, shift[first:last], keep=True).equal(sums[:, first:last])
        assert some.equal(kept[:, first:last])


@pytest.mark.usefixtures("with_native")
def test_what_is_left_to_torch() -> None:
    plain, shift = torch.zeros(4, 4), torch.zeros(4)
    assert native.takes(plain, shift)
    assert native.takes(plain[1:3], shift)
    assert not native.takes(plain.double(), shift)
    assert not native.takes(plain[:, :2], shift)
    assert not native.takes(plain[:1].expand(4, 4), shift)
    assert not native.takes(torch.nn.Parameter(plain), shift)
    assert not native.takes(torch.zeros(4, 4, device="meta"), shift)
    assert not native.takes(plain, TwoTensor(shift, shift))
    assert not native.takes(plain, shift.double())
    assert not native.takes(plain, shift.to("meta"))


def test_a_foreign_or_older_library_is_not_used(tmp_path: Path, built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.load(str(tmp_path / "none.so")) is None
    (tmp_path / "text.so").write_text("no library")
    assert native.load(str(tmp_path / "text.so")) is None
    monkeypatch.setattr(native, "_VERSION", 0)
    assert native.load(built._name) is None


def step(entropy: bool) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 50, 24, generator=make).requires_grad_()
    weight = torch.randn(700, 24, generator=make).requires_grad_()
    labels = torch.randint(0, 700, (3, 50), generator=make)
    labels[1, :20] = -100
    if entropy:
        config: Any = GRPOLossConfig(mode="chunk", chunk_size=40, entropy_coef=0.1)
        batch = {"advantages": torch.tensor([1.0, -1.0, 0.0]), "old_logprobs": torch.full((3, 50), -6.0)}
    else:
        config, batch = CELossConfig(mode="chunk", chunk_size=40), {}
    context = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels, **batch})])[0]
    loss = context.forward(hidden, weight).loss
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("elements", [1 << 26, 4000])
def test_a_step_is_the_same_without_it(entropy: bool, elements: int, request: Any, monkeypatch: Any) -> None:
    cut_into_tiles(monkeypatch, elements, strip=32)
    request.getfixturevalue("without_native")
    wanted = step(entropy)
    request.getfixturevalue("with_native")
    for mine, theirs in zip(step(entropy), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("way", ["with_native", "without_native"])
def test_log_probs_alone_are_those_of_the_loss_in_tiles_of_other_widths(way: str, request: Any) -> None:
    """Log-probs alone are formed for more rows and fewer words at once; no digit differs."""
    request.getfixturevalue(way)
    make = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(1, 600, 16, generator=make), torch.randn(5000, 16, generator=make)
    labels = torch.randint(0, 5000, (1, 600), generator=make)
    config = CELossConfig(mode="chunk", chunk_size=128)
    (context,) = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels})])
    with torch.no_grad():
        alone = context.forward(hidden, weight, return_tokens=True).per_token
    found = context.forward(hidden, weight.requires_grad_(), return_tokens=True).per_token
    assert alone is not None
    assert found is not None
    assert found.log_prob.equal(alone.log_prob)
