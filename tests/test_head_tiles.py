"""Column tiles, estimated shifts and moved rows change nothing: chunk mode against eager mode in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import CELossConfig
from rlloss.heads import HeadInputs, HeadOptions, Objective, TokenStats, buffer, run_head, token_stats
from rlloss.heads.products import Products
from rlloss.heads.softmax import Transform
from rlloss.heads.words import WordPlaces
from rlloss.layout import token_layout
from small_tiles import cut_into_tiles

TOKENS, WIDTH, VOCABULARY = 13, 6, 101


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tiles of 16 words or fewer."""
    cut_into_tiles(monkeypatch, 64)


def problem(scale: float = 1.0, dtype: torch.dtype = torch.float64, extra: bool = False) -> HeadInputs:
    make = torch.Generator().manual_seed(7)
    mask = torch.ones(1, TOKENS + 2, dtype=torch.bool)
    mask[0, [2, 9]] = False
    hidden = (scale * torch.randn(1, TOKENS + 2, WIDTH, generator=make, dtype=torch.float64)).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    bias = torch.randn(VOCABULARY, generator=make, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=make)
    ids = torch.randint(0, VOCABULARY, (TOKENS, 3), generator=make) if extra else None
    if ids is not None:
        ids[1, 2] = labels[1]
    leaves = [part.requires_grad_() for part in (hidden, weight, bias)]
    return HeadInputs(leaves[0], leaves[1], leaves[2], labels, 1.0, token_layout(mask, None, TOKENS), ids)


def objective(additive: bool, zero: tuple[int, ...] = ()) -> Objective:
    """A weighted sum of everything a head gives; rows in `zero` have no gradient."""
    slopes = torch.linspace(-1.0, 2.0, TOKENS, dtype=torch.float64)
    slopes[list(zero)] = 0.0

    def loss(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Any]]:
        own = slopes[rows].to(stats.log_prob.dtype)
        total = (own * stats.log_prob).sum()
        if stats.entropy is not None:
            total = total + (own * 0.3 * stats.entropy).sum()
        if stats.extra_log_prob is not None:
            total = total + (own[:, None] * 0.1 * stats.extra_log_prob).sum()
        return total, {}

    return Objective(loss, additive)


def gradients(mode: Any, inputs: HeadInputs, options: HeadOptions, wanted: Objective) -> list[Tensor]:
    output = run_head(mode, inputs, options, wanted)
    assert inputs.bias is not None
    return [output.loss.detach(), *torch.autograd.grad(0.7 * output.loss, [inputs.hidden, inputs.weight, inputs.bias])]


def assert_equal(inputs: HeadInputs, options: HeadOptions, wanted: Objective, atol: float = 1e-12) -> None:
    eager = gradients("eager", inputs, options, wanted)
    for mine, theirs in zip(gradients("chunk", inputs, options, wanted), eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("size", [1, 5, 13, 40])
@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("extra", [False, True])
def test_tiles_equal_eager(size: int, additive: bool, entropy: Any, softcap: float | None, extra: bool) -> None:
    options = HeadOptions(chunk_size=size, logit_scale=0.8, logit_softcap=softcap, entropy=entropy)
    assert_equal(problem(extra=extra), options, objective(additive, zero=(0, 1, 6, 11)))


@pytest.mark.parametrize("scale", [30.0, 400.0])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_logits_that_outgrow_the_first_tile(scale: float, entropy: Any) -> None:
    """The estimated shift of the first tile is wrong by hundreds: the chunk falls back to exact ones."""
    assert_equal(problem(scale), HeadOptions(chunk_size=5, entropy=entropy), objective(True), atol=1e-10)


def test_temperature_of_each_token() -> None:
    temperature = torch.linspace(0.4, 2.0, TOKENS, dtype=torch.float64)
    assert_equal(replace(problem(), temperature=temperature), HeadOptions(chunk_size=5), objective(True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_breaks_itself_only(value: float) -> None:
    inputs = problem()
    with torch.no_grad():
        inputs.hidden[0, 4] = value
    stats, _ = token_stats("chunk", inputs, HeadOptions(chunk_size=5))
    clean, _ = token_stats("eager", inputs, HeadOptions())
    assert stats.log_prob.isnan().equal(clean.log_prob.isnan())
    torch.testing.assert_close(stats.log_prob, clean.log_prob, equal_nan=True, rtol=0, atol=1e-12)


def test_words_of_probability_zero() -> None:
    inputs = problem()
    assert inputs.bias is not None
    with torch.no_grad():
        inputs.bias[:20] = -torch.inf
        inputs.labels[:] = inputs.labels.clamp(min=20)
    options = HeadOptions(chunk_size=5, entropy="gradient")
    eager = gradients("eager", inputs, options, objective(True))
    for mine, theirs in zip(gradients("chunk", inputs, options, objective(True)), eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_log_probs_do_not_depend_on_whether_gradients_are_wanted() -> None:
    inputs = problem(3.0, torch.float32)
    options = HeadOptions(chunk_size=5)
    seen: list[Tensor] = []

    def watch(stats: TokenStats, rows: slice) -> tuple[Tensor, dict[str, Any]]:
        seen.append(stats.log_prob.detach())
        return stats.log_prob.sum(), {}

    run_head("chunk", inputs, options, Objective(watch, additive=True))
    with torch.no_grad():
        alone, _ = token_stats("chunk", inputs, options)
    assert torch.cat(seen).equal(alone.log_prob)


def test_rows_that_are_kept_move_to_the_front() -> None:
    """Every choice out of up to seven rows."""
    products = Products(torch.zeros(9, 2), torch.float32, exact_logits=False)
    for count in range(1, 8):
        for chosen in itertools.product([False, True], repeat=count):
            chunk = buffer.ChunkLogits(products, Transform(None, 1.0, None), count, keep=True)
            chunk.fill(torch.zeros(count, 2), torch.zeros(count, dtype=torch.int64), 1.0, None, with_entropy=False)
            for piece in chunk.pieces(count):
                piece.numbers.copy_(torch.arange(count).expand_as(piece.numbers))
            kept = chunk.compact(torch.tensor(chosen))
            if kept is None:
                assert all(chosen)
                continue
            assert sorted(kept.tolist()) == [row for row in range(count) if chosen[row]]
            for piece in chunk.pieces(len(kept)):
                assert (piece.numbers == kept).all()


def test_a_second_backward_gives_the_same_numbers() -> None:
    inputs = problem(dtype=torch.float32)
    for additive in (True, False):
        output = run_head("chunk", inputs, HeadOptions(chunk_size=5), objective(additive, zero=(3, 4)))
        leaves = [inputs.hidden, inputs.weight, inputs.bias]
        first = torch.autograd.grad(output.loss, leaves, retain_graph=True)
        kept = [part.clone() for part in first]
        second = torch.autograd.grad(output.loss, leaves, torch.tensor(2.0), retain_graph=True)
        for one, copy, two in zip(first, kept, second, strict=True):
            assert one.equal(copy)
            assert two.equal(2.0 * one)


def test_words_that_stand_in_no_tile_are_zero() -> None:
    """What a rank with a slice of the vocabulary reads: its own words from their tile, 0 for those of other ranks."""
    ids = torch.tensor([[0, 1], [5, 3], [2, 4]])
    present = torch.tensor([[True, False], [True, True], [False, True]])
    chunk = torch.arange(1.0, 19.0).reshape(6, 3)
    places = WordPlaces(ids, tiles=2, width=3, present=present)
    found = places.gather([chunk[3 * tile : 3 * tile + 3].reshape(-1)[places.of(tile)] for tile in range(2)])
    assert found.tolist() == [float(chunk[0, 0]), 0.0, *chunk[[5, 3], 1].tolist(), 0.0, float(chunk[4, 2])]


@pytest.mark.parametrize("piece", [1, 50, 1 << 18])
def test_the_gradient_of_a_small_head_in_pieces_of_rows(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlloss.heads.products.SMALL_PIECE", piece)
    make = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(1, 90, 3, generator=make), torch.randn(7, 3, generator=make).requires_grad_()
    labels = torch.randint(0, 7, (1, 90), generator=make)
    config = CELossConfig(mode="chunk", chunk_size=40)
    (context,) = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels})])
    (found,) = torch.autograd.grad(context.forward(hidden, weight).loss, weight)
    exact = weight.detach().double().requires_grad_()
    loss = torch.nn.functional.cross_entropy((hidden.double() @ exact.T)[0], labels[0])
    torch.testing.assert_close(found.double(), *torch.autograd.grad(loss, exact), rtol=1e-5, atol=1e-8)
