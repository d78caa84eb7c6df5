"""Steps of the chunk's mathematics on their own: logits from products, which rows have a gradient, in which unit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlloss.heads.softmax import LARGEST_TOTAL, RowGradients, RowStats, Transform

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
