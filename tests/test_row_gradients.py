"""Numbers of a chunk's rows that decide what the backward pass computes: which rows, and in which unit."""

from __future__ import annotations

import math

import torch

from rlloss.heads.softmax import LARGEST_TOTAL, RowGradients, RowStats

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
    log_prob, entropy = torch.tensor([0.0, -2.0, 1.0, -3.0]), torch.tensor([0.0, 3.0, -6.0, 0.0])
    extra = torch.tensor([[0.0, 0.0], [0.5, -3.5], [0.0, 5.0], [0.0, 0.0]])
    torch.testing.assert_close(
        RowGradients(log_prob).unit(totals), torch.tensor([0.25, 0.25, 0.5, 3.0 / LARGEST_TOTAL])
    )
    both = RowGradients(log_prob, entropy, extra).unit(totals)
    torch.testing.assert_close(both, torch.tensor([0.25, 0.5, 3.0, 3.0 / LARGEST_TOTAL]))
