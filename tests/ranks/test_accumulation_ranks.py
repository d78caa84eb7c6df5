"""Case M09: A12, A14, A15 and A16 with accumulation on two ranks at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks import accumulation
from ranks.accumulation import policy_step
from ranks.pool import Ranks
from rlloss import GRPOLossConfig
from steps import HEADS

REDUCTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "token": ({"loss_reduction": "token"}, 1.25),
    "sample": ({"loss_reduction": "sample"}, 1.5),
    "sequence_sum": ({"loss_reduction": "sequence_sum"}, 2.5),
    "constant": ({"loss_reduction": "constant", "loss_length": 4.0}, 0.625),
}
# Two micro-batches on each rank: sequences of NLL [2] and [1, 1, 1] twice, cut in two ways, and with masked tokens.
CUTS: dict[str, list[list[list[list[float | None]]]]] = {
    "one each": [[[[2.0]], [[1.0, 1.0, 1.0]]], [[[1.0, 1.0, 1.0]], [[2.0]]]],
    "one empty": [[[[2.0], [2.0]], [[1.0, 1.0, 1.0]]], [[[1.0, 1.0, 1.0]], [[None]]]],
    "masked": [[[[2.0, None]], [[None, 1.0, 1.0, None, 1.0]]], [[[1.0, 1.0, 1.0], [None, None]], [[None, 2.0]]]],
}


def make(given: dict[str, Any]) -> GRPOLossConfig:
    return GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, **given)


def average(ranks: list[dict[Any, Any]], key: Any) -> torch.Tensor:
    return sum(part[key][1] for part in ranks) / len(ranks)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", CUTS)
def test_m09_every_reduction_with_masked_tokens_between(cut: str, ranks: Ranks) -> None:
    fields = {name: given for name, (given, _) in REDUCTIONS.items()}
    found = ranks.run(accumulation.accumulated, CUTS[cut], fields)
    for name, (given, right) in REDUCTIONS.items():
        one = policy_step(make(given), [[[2.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.0]]])
        assert one.loss == pytest.approx(right)
        for head in HEADS:
            for part in found:
                losses, _, extra = part[head, name]
                assert sum(losses) == pytest.approx(right, abs=1e-6), (head, name)
                assert extra["loss"] == pytest.approx(right, abs=1e-6)
                assert (extra["tokens"], extra["sequences"]) == (8, 4)
            torch.testing.assert_close(average(found, (head, name)), one.weight_grad, rtol=1e-5, atol=1e-7)


def test_m09_a_short_window_has_the_gradient_of_a_full_batch(ranks: Ranks) -> None:
    """Two micro-batches of one token of NLL 1 on each rank give 1.0, with the gradient of one of them."""
    found = ranks.run(accumulation.accumulated, [[[[1.0]], [[1.0]]]] * 2, {"token": {}})
    one = policy_step(make({}), [[[1.0]]])
    for head in HEADS:
        for part in found:
            assert sum(part[head, "token"][0]) == pytest.approx(1.0, abs=1e-6)
        mine = average(found, (head, "token"))
        assert float(mine.norm() / one.weight_grad.norm()) == pytest.approx(1.0, abs=1e-6)
