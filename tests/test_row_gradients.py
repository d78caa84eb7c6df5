"""Steps of the chunk's mathematics on their own: logits from products, which rows have a gradient, in which unit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlloss.heads.softmax import LARGEST_TOTAL, RowGradients, RowStats, Transform, row_stats

LOG_PROB = torch.tensor([0.0, -2.0, 0.0, 0.0, math.nan])
ENTROPY = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
EXTRA = torch.tensor([[0.0, 0.0], [0.5, -3.5], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])


def stats(total: list[float]) -> RowStats:
    """Rows of which only the sum of exponentials matters."""
    zero = torch.zeros(len(total))
    return RowStats(zero, zero, zero, zero, torch.tensor(total), zero, None)


def test_a_row_with_any_derivative_is_kept() -> None:
    assert RowGradients(LOG_PROB, ENTROPY, EXTRA).nonzero().tolist() == [False, True, True, True, True]
    assert RowGradients(LOG_PROB, None, EXTRA).nonzero().tolist() == [False, True, False, True, True]
    assert RowGradients(LOG_PROB, ENTROPY).nonzero().tolist() == [False, True, True, False, True]
    assert RowGradients(LOG_PROB).nonzero().tolist() == [False, True, False, False, True]


def test_the_unit_of_a_row_is_its_largest_derivative_over_the_total() -> None:
    totals = stats([4.0, 8.0, 2.0, math.inf])
    log_prob, entropy = torch.tensor([0.0, -2.0, 0.5, -3.0]), torch.tensor([0.0, 3.0, -6.0, 0.0])
    extra = torch.tensor([[0.0, 0.0], [0.5, -3.5], [0.0, 5.0], [0.0, 0.0]])
    alone = RowGradients(log_prob).unit(totals)
    assert alone.tolist() == torch.tensor([0.25, 0.25, 0.25, 3.0 / LARGEST_TOTAL]).tolist()
    both = RowGradients(log_prob, entropy, extra).unit(totals)
    assert both.tolist() == torch.tensor([0.25, 0.5, 3.0, 3.0 / LARGEST_TOTAL]).tolist()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0, "per row"])
def test_logits_are_those_of_the_formula_whatever_is_skipped(
    softcap: float | None, scale: float, temperature: Any
) -> None:
    """Factors that are 1 are left out; no other number may be taken for one."""
    product = torch.tensor([[0.3, -1.2], [2.5, 0.7], [-0.4, 1.1]], dtype=torch.float64)
    given = torch.tensor([0.5, 2.0], dtype=torch.float64) if temperature == "per row" else temperature
    logits = scale * product
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / given
    found = Transform(None, scale, softcap).apply_(product.clone(), given)
    torch.testing.assert_close(found, logits, rtol=1e-14, atol=0)


def test_derivatives_over_a_number_for_each_row() -> None:
    extra = torch.tensor([[3.0, -1.0], [0.5, 4.0]])
    over = RowGradients(torch.tensor([1.0, -2.0]), torch.tensor([6.0, 5.0]), extra).over(torch.tensor([2.0, 4.0]))
    assert over.entropy is not None and over.extra is not None
    assert over.log_prob.tolist() == [0.5, -0.5]
    assert over.entropy.tolist() == [3.0, 1.25]
    assert over.extra.tolist() == [[1.5, -0.5], [0.125, 1.0]]
    alone = RowGradients(torch.tensor([1.0])).over(torch.tensor([4.0]))
    assert alone.entropy is None and alone.extra is None


@pytest.mark.parametrize("q", [0.0, 0.5, 3.0])
def test_a_nearly_certain_label_keeps_the_digits_of_total_and_entropy(q: float) -> None:
    """One other word of `E = 1e-20`: with x = E / exp(q), `H = log(1 + x) - x log x / (1 + x)`."""
    rest = torch.tensor([1e-20], dtype=torch.float64)
    found = row_stats(rest, rest * rest.log(), torch.zeros(1).double(), torch.tensor([q]).double(), None)
    x = 1e-20 / math.exp(q)
    assert found.entropy is not None
    assert float(found.entropy) == pytest.approx(math.log1p(x) - x * math.log(x) / (1 + x), rel=1e-12, abs=0.0)
    assert float(found.log_total) == pytest.approx(q + math.log1p(x), rel=1e-14, abs=0.0)
    assert float(found.log_prob) == pytest.approx(-math.log1p(x), rel=1e-14, abs=0.0)


def test_a_label_of_probability_zero_leaves_the_entropy_of_the_others() -> None:
    label = torch.tensor([-math.inf], dtype=torch.float64)
    found = row_stats(torch.tensor([2.0]).double(), torch.zeros(1).double(), torch.zeros(1).double(), label, None)
    assert found.entropy is not None
    assert float(found.entropy) == pytest.approx(math.log(2.0), rel=1e-14, abs=0.0)
    assert float(found.log_prob) == -1e4
