"""Compiled products of bfloat16 heads: against float64, at every edge of their blocks."""

from __future__ import annotations

import ctypes
import mmap
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from rlloss import CELossConfig, DistillLossConfig, GRPOLossConfig
from rlloss.heads import native
from rlloss.heads.bfloat16 import BFloat16Products, products_of
from rlloss.heads.products import Products

ROWS = [1, 5, 6, 13, 48, 64, 65, 97, 530]
WORDS = [1, 2, 95, 96, 97, 257, 600]
WIDTHS = [2, 16, 62, 64, 66, 300]
SHAPES = [
    *((rows, 97, 66) for rows in ROWS),
    *((13, words, 62) for words in WORDS),
    *((65, 257, width) for width in WIDTHS),
    (530, 600, 300),
]

every_shape = pytest.mark.parametrize(("rows", "words", "width"), SHAPES)


@pytest.fixture
def compiled(with_native: None) -> None:
    if not native.multiplies_bfloat16():
        pytest.skip("this processor has no products of bfloat16 numbers")


def draw(rows: int, words: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(rows * words + width)
    hidden, weight = torch.randn(rows, width, generator=make), torch.randn(words, width, generator=make)
    return hidden.bfloat16(), weight.bfloat16(), torch.rand(words, rows, generator=make)


def made(weight: Tensor, exact: bool = True) -> BFloat16Products:
    products = products_of(weight, torch.float32, exact, weight[:1], None)
    assert isinstance(products, BFloat16Products)
    return products


def assert_sums(found: Tensor, left: Tensor, right: Tensor, bound: float) -> None:
    """Compares with `left right` in float64, relative to the sums of the absolute terms."""
    left, right = left.double(), right.double()
    error = (found.double() - left @ right).abs() / (left.abs() @ right.abs())
    assert float(error.max()) <= bound


@pytest.mark.usefixtures("compiled")
@every_shape
def test_logits(rows: int, words: int, width: int) -> None:
    hidden, weight, _ = draw(rows, words, width)
    bias = torch.linspace(-3, 3, words)
    out = torch.full((words, rows), torch.nan)
    made(weight).project(hidden, slice(0, words), out, None)
    assert_sums(out, weight, hidden.T, 1e-6)
    with_bias = torch.full((words, rows), torch.nan)
    made(weight).project(hidden, slice(0, words), with_bias, bias)
    assert with_bias.equal(out + bias[:, None])
    rounded = torch.full((words, rows), torch.nan)
    made(weight, exact=False).project(hidden, slice(0, words), rounded, bias)
    assert rounded.equal(with_bias.bfloat16().float())
    half = words // 2
    made(weight).project(hidden, slice(half, words), out[half:].fill_(torch.nan), bias)
    assert out[half:].equal(with_bias[half:])


@pytest.mark.usefixtures("compiled")
@every_shape
def test_hidden_gradients(rows: int, words: int, width: int) -> None:
    _, weight, numbers = draw(rows, words, width)
    wider = torch.full((words, rows + 3), torch.nan)
    wider[:, :rows] = numbers
    products, whole = made(weight), slice(0, words)
    out = torch.full((rows, width), torch.nan)
    products.add_hidden(wider[:, :rows], whole, out, True, True)
    assert_sums(out, numbers.bfloat16().T, weight, 1e-6)
    before = out.clone()
    products.add_hidden(numbers, whole, out, False, True)
    torch.testing.assert_close(out, before + before, rtol=1e-6, atol=1e-5)


@pytest.mark.usefixtures("compiled")
@every_shape
def test_weight_gradients(rows: int, words: int, width: int) -> None:
    """Numbers of the chunk keep 16 bits: 2^-17 is lost at most, of each."""
    hidden, weight, numbers = draw(rows, words, width)
    factor = torch.linspace(-2, 1, rows)
    wider = torch.full((words, rows + 3), torch.nan)
    wider[:, :rows] = numbers
    products = made(weight)
    folded = products.fold(hidden.float(), factor)
    out = torch.full((words, width), torch.nan)
    products.add_weight(wider[:, :rows], folded, out, True)
    assert_sums(out, numbers * factor, hidden, 2.0**-17 + 1e-6)
    before = out.clone()
    products.add_weight(numbers, folded, out, False)
    torch.testing.assert_close(out, before + before, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("compiled")
def test_no_digit_depends_on_threads_or_the_place_of_a_row() -> None:
    hidden, weight, numbers = draw(530, 600, 300)
    products = made(weight)

    def results(first: int, last: int) -> list[Tensor]:
        logits, sums = torch.empty(600, last - first), torch.empty(last - first, 300)
        products.project(hidden[first:last], slice(0, 600), logits, None)
        products.add_hidden(numbers[:, first:last], slice(0, 600), sums, True, True)
        return [logits.T, sums]

    whole = results(0, 530)
    total = torch.empty(600, 300)
    products.add_weight(numbers, products.fold(hidden, torch.ones(530)), total, True)
    torch.set_num_threads(1)
    for first, last in ((0, 530), (0, 1), (7, 60), (529, 530)):
        for part, each in zip(results(first, last), whole, strict=True):
            assert part.equal(each[first:last])
    again = torch.empty(600, 300)
    products.add_weight(numbers, products.fold(hidden, torch.ones(530)), again, True)
    assert again.equal(total)


def before_a_forbidden_page(values: Tensor) -> Tensor:
    """A copy whose last number is the last one of a page, before one that nobody may read."""
    size = prod(values.shape) * values.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return (
        torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=pages - size)
        .view_as(values)
        .copy_(values)
    )


@pytest.mark.usefixtures("compiled")
@every_shape
def test_nothing_is_read_or_written_beyond_the_tensors(rows: int, words: int, width: int) -> None:
    """The process would end."""
    hidden, weight, numbers = (before_a_forbidden_page(part) for part in draw(rows, words, width))
    products = made(weight)
    sums, total = (before_a_forbidden_page(torch.zeros(size, width)) for size in (rows, words))
    products.add_hidden(numbers, slice(0, words), sums, True, False)
    factor = before_a_forbidden_page(torch.ones(rows))
    products.add_weight(numbers, products.fold(hidden, factor), total, True)
    products.project(hidden, slice(0, words), numbers, before_a_forbidden_page(torch.zeros(words)))
    assert_sums(numbers, weight, hidden.T, 1e-6)


@pytest.mark.usefixtures("compiled")
def test_a_sum_of_many_equal_terms_keeps_its_digits() -> None:
    """Term by term a float32 sum of ones times 1e-3 that begins at a thousand is 2 % off."""
    rows = 4096
    hidden, weight = torch.full((rows, 2), 1e-3).bfloat16(), torch.ones(1, 2).bfloat16()
    products, out = made(weight), torch.zeros(1, 2)
    folded, term = products.fold(hidden, torch.ones(rows)), float(hidden[0, 0])
    for turn in range(250):
        products.add_weight(torch.ones(1, rows), folded, out, turn == 0)
    assert float(out[0, 0]) == pytest.approx(250 * rows * term, rel=1e-5)


@pytest.mark.usefixtures("compiled")
def test_what_is_left_to_torch() -> None:
    weight, rows, bias = torch.ones(8, 6).bfloat16(), torch.ones(2, 6).bfloat16(), torch.ones(8)

    def kind(weight: Tensor, rows: Tensor = rows, bias: Tensor | None = bias) -> type:
        return type(products_of(weight, torch.float32, False, rows, bias))

    assert kind(weight) is kind(weight, bias=None) is BFloat16Products
    odd, strided = weight[:, :5].contiguous(), weight[:, :4]
    others = (weight.float(), weight.half(), odd, strided, weight.T, weight.to("meta"), torch.nn.Parameter(weight))
    assert {kind(other) for other in others} == {Products}
    # What is not in the memory of the CPU has no place there to read from, or one that is not its own.
    assert {kind(weight, rows=other) for other in (rows.to("meta"), TwoTensor(rows, rows))} == {Products}
    assert {kind(weight, bias=other) for other in (bias.to("meta"), TwoTensor(bias, bias))} == {Products}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_a_subclass(dtype: torch.dtype, with_native: None) -> None:
    """They hold no memory of their own: reading it ended the process."""
    hidden, weight = torch.randn(1, 5, 8).to(dtype), torch.randn(11, 8).to(dtype)
    config = CELossConfig(mode="chunk")
    (context,) = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": torch.tensor([[1, 2, 3, 4, 5]])})])
    found, plain = context.forward(TwoTensor(hidden, hidden), weight).loss, context.forward(hidden, weight).loss
    assert float(found.a if isinstance(found, TwoTensor) else found) == pytest.approx(float(plain), rel=1e-2)


@pytest.mark.usefixtures("without_native")
def test_without_the_compiled_part_torch_multiplies() -> None:
    weight = torch.ones(8, 6).bfloat16()
    assert type(products_of(weight, torch.float32, False, weight, None)) is Products


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("words", [1, 2, 17, 256, 300])
def test_the_sum_of_a_row_is_kept(words: int) -> None:
    _, weight, numbers = draw(70, words, 6)
    numbers[:, 3] = 0.0
    products, out = made(weight), torch.empty(70, 6)
    wanted = numbers.double().sum(0) / numbers.bfloat16().double().sum(0)
    wanted[3] = 1.0
    for threads in (2, 1):
        torch.set_num_threads(threads)
        products.add_hidden(numbers, slice(0, words), out, True, True)
        once = products.scale()
        assert once is not None
        torch.testing.assert_close(once.double(), wanted, rtol=2e-7, atol=0)
        products.add_hidden(numbers, slice(0, words), out, False, True)
        torch.testing.assert_close(products.scale(), once, rtol=2e-7, atol=0)
    numbers[:, 3] = 1e-3
    products.add_hidden(-numbers, slice(0, words), out, True, False)
    assert products.scale() is None
    assert_sums(out, -numbers.T, weight, 2.0**-17 + 1e-6)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", ["alike", "common"])
def test_hidden_gradients_that_cancel_keep_their_digits(case: str) -> None:
    """The label and one rival of about its probability are nearly one word; or all words have much in common."""
    make = torch.Generator().manual_seed(4)
    directions = torch.randn(300, 64, generator=make)
    if case == "alike":
        directions[1] = directions[0] + 0.02 * torch.randn(64, generator=make)
        hidden, labels = directions[0].repeat(40, 1) / 4 + 0.1 * torch.randn(40, 64, generator=make), torch.zeros(40)
    else:
        directions += 10 * torch.randn(64, generator=make)
        hidden, labels = torch.randn(40, 64, generator=make), torch.randint(0, 300, (40,), generator=make)
    weight = directions.bfloat16()
    leaf = hidden.bfloat16()[None].requires_grad_()
    config = CELossConfig(mode="chunk", chunk_size=16, logits_dtype="float32")
    (context,) = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels.long()[None]})])
    (found,) = torch.autograd.grad(context.forward(leaf, weight).loss, leaf)
    exact = leaf.detach().double().requires_grad_()
    logits = (exact @ weight.double().T)[0]
    (true,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels.long()), exact)
    assert (found.double() - true).norm() <= 1.41 * (true.bfloat16().double() - true).norm()


def contexts(name: str, labels: Tensor) -> Any:
    """Losses whose gradients reach the chunk in each way: one factor a row, entropies, more words, a soft cap."""
    make = torch.Generator().manual_seed(2)
    batch: dict[str, Tensor] = {"shifted_labels": labels}
    config: Any = CELossConfig(mode="chunk", chunk_size=50, temperature=0.7, logits_dtype="float32")
    if name == "cap":
        config = config.model_copy(update={"logit_softcap": 3.0})
    elif name == "entropy":
        config = GRPOLossConfig(mode="chunk", chunk_size=50, entropy_coef=0.3, logits_dtype="float32")
        advantages = torch.randn(labels.shape, generator=make).round()
        batch |= {"advantages": advantages, "old_logprobs": torch.full(labels.shape, -5.0)}
    elif name == "teacher":
        config = DistillLossConfig(mode="chunk", chunk_size=50, logits_dtype="float32")
        ids = torch.stack([torch.randperm(300, generator=make)[:4] for _ in range(labels.numel())])
        batch |= {
            "teacher_topk_ids": ids.view(*labels.shape, 4),
            "teacher_topk_logprobs": torch.randn(*labels.shape, 4, generator=make).log_softmax(-1) - 0.1,
        }
    return config.loss_ctx_cls.build_batches([config.build(batch)])[0]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["plain", "cap", "entropy", "teacher"])
def test_steps_are_those_of_float64(name: str) -> None:
    make = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 90, 32, generator=make).bfloat16().requires_grad_()
    weight = (torch.randn(300, 32, generator=make) / 4).bfloat16().requires_grad_()
    bias = torch.randn(300, generator=make).bfloat16().requires_grad_()
    labels = torch.randint(0, 300, (2, 90), generator=make)
    labels[1, 70:] = -100
    leaves = [hidden, weight, bias]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    context = contexts(name, labels)
    loss, true = context.forward(*leaves).loss, context.forward(*exact).loss
    assert float(loss.detach()) == pytest.approx(float(true.detach()), rel=1e-5)
    wanted = torch.autograd.grad(true, exact)
    # Rounding exponentials adds at most as much as rounding hidden gradients; the rest is as exact as it can be.
    bounds = (1.41 if name == "plain" else 1.05, 1.05, 1.05)
    for found, each, bound in zip(torch.autograd.grad(loss, leaves), wanted, bounds, strict=True):
        assert found.dtype == torch.bfloat16
        error, rounding = (found.double() - each).norm(), (each.bfloat16().double() - each).norm()
        assert error <= bound * rounding
