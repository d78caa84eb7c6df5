"""FSDP2: the loss runs inside the head's module, with the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest

from batches import distance
from ranks import fsdp
from ranks.pool import Failure, Ranks
from rlloss import GRPOLossConfig, OrealLossConfig

KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}


@pytest.mark.parametrize("mode", ["eager", "chunk", "liger"])
@pytest.mark.parametrize("count", [2, 4])
def test_gradients_are_those_of_one_process(mode: str, count: int, ranks: Ranks) -> None:
    for config in (GRPOLossConfig(mode=mode, chunk_size=5, **KL), OrealLossConfig(mode=mode, chunk_size=5)):
        expected = fsdp.one_process(config, count)
        for found, _ in ranks.run(fsdp.sharded, config, count, False, mode != "chunk"):
            for name, gradient in expected.items():
                assert distance(found[name], gradient) <= 1e-6, name


def test_mixed_precision(ranks: Ranks) -> None:
    config = GRPOLossConfig(mode="chunk", chunk_size=5)
    expected = fsdp.one_process(config, 4)
    for found, _ in ranks.run(fsdp.sharded, config, 4, True, False):
        assert all(distance(found[name], gradient) < 0.03 for name, gradient in expected.items())


def test_backward_gathers_no_head_and_reduces_once(ranks: Ranks) -> None:
    config = GRPOLossConfig(mode="chunk", chunk_size=5, reduce_loss=False)
    (_, again), _ = ranks.run(fsdp.sharded, config, 4, False, True)
    (_, once), _ = ranks.run(fsdp.sharded, config, 4, False, False)
    assert len([n for n in again if "gather" in n]) > len([n for n in once if "gather" in n])
    assert len([n for n in once if "reduce" in n]) == 2, (
        "one for the head, one for the rest, not one for each micro-batch"
    )


@pytest.mark.parametrize("config", [GRPOLossConfig(), GRPOLossConfig(mode="chunk")], ids=["eager", "chunk"])
def test_a_sharded_weight_outside_of_its_module_is_refused(config: Any, ranks: Ranks) -> None:
    for failure in ranks.outcomes(fsdp.outside, config, limit=20):
        assert isinstance(failure, Failure)
        assert failure.kind == "BatchError"
        assert "LMHead" in failure.message
