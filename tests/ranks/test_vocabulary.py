"""A vocabulary that is cut over ranks: DTensor heads, scoring, and what is refused by name on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batches import PER_TOKEN, distance, packed, run_step
from ranks import vocabulary
from ranks.pool import Failure, Ranks
from rlloss import GRPOLossConfig, LogProbConfig

KL = {"use_kl_loss": True, "kl_loss_coef": 0.2}
CONFIGS = [
    GRPOLossConfig(mode=mode, chunk_size=5, **fields)
    for mode in ("eager", "chunk")
    for fields in (
        KL,
        {"policy_loss_cfg": {"loss_type": "gspo"}, "loss_reduction": "sample", "entropy_coef": 0.05},
        {"logit_softcap": 3.0, "logit_scale": 0.5},
    )
]


@pytest.mark.parametrize(
    ("data_ranks", "world", "module"), [(1, 2, False), (2, 4, False), (1, 2, True), (2, 4, True)], ids=str
)
def test_a_dtensor_head(data_ranks: int, world: int, module: bool, ranks: Ranks) -> None:
    """Uneven shards where the tensor is given to forward; FSDP2 wants even ones."""
    step = vocabulary.step_of(16 if module else 13)
    parts = ranks.run(vocabulary.dtensor_steps, CONFIGS, step, data_ranks, module, world=world)
    for number, config in enumerate(CONFIGS):
        expected = run_step(config.model_copy(update={"mode": "eager"}), step, layout="packed")
        for rank, found in enumerate(part[number] for part in parts):
            assert distance(found["loss"], expected.loss) <= 1e-12
            assert distance(found["weight"], expected.grad_weight) <= 1e-12
            assert distance(found["bias"], expected.grad_bias) <= 1e-12
            own = expected.grad_hidden[rank // 2 :: data_ranks]
            assert distance(torch.cat(found["hidden"]), torch.cat(own)) <= 1e-12
            assert found["metrics"] == pytest.approx(expected.metrics, rel=1e-9)


MISPLACED = {
    "mesh not named": "LMHead",
    "replicated": r"head_weight is a DTensor with placements \(Replicate\(\),\).*expected Shard\(0\)",
    "columns": r"placements \(Shard\(dim=1\),\).*expected Shard\(0\)",
    "other mesh": r"expected Shard\(0\) on the vocabulary mesh of 2 ranks",
    "two dimensions": r"on a mesh of 4 ranks; expected Shard\(0\) on the vocabulary mesh of 2",
    "mesh of two dimensions": "a vocab_mesh with one dimension",
    "group and mesh": "and not both",
    "bias whole": r"head_bias is a DTensor with placements .*expected Shard\(0\)",
    "bias of all words": r"head_bias has shape \(13,\), expected",
    "no words left": r"hold \[1, 0\] words",
}


def refused(failures: list[Any], message: str) -> None:
    for failure in failures:
        assert isinstance(failure, Failure)
        assert failure.kind == "BatchError", failure.trace
        with pytest.raises(ValueError, match=message):
            raise ValueError(failure.message)


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize("how", MISPLACED)
def test_a_head_that_does_not_lie_on_the_vocabulary_ranks(how: str, mode: str, ranks: Ranks) -> None:
    refused(ranks.outcomes(vocabulary.misplaced, how, mode, world=4, limit=20), MISPLACED[how])


@pytest.mark.parametrize("mode", ["eager", "chunk"])
@pytest.mark.parametrize(
    ("how", "message"), [("number", "must see the same tokens, but count"), ("labels", "with other labels")]
)
def test_other_tokens_on_a_vocabulary_rank(how: str, message: str, mode: str, ranks: Ranks) -> None:
    refused(
        ranks.outcomes(vocabulary.other_tokens, how, mode, limit=20),
        message,
    )


def test_scoring_by_a_head_that_is_cut(ranks: Ranks) -> None:
    """The first ratio is exactly 1, as without ranks."""
    step, modes = vocabulary.step_of(), ("eager", "chunk")
    batch, states = packed(step.sequences, PER_TOKEN)
    for part in ranks.run(vocabulary.scored, modes):
        for log_prob, entropy, extra in part:
            expected = (
                LogProbConfig(mode="eager", entropy_metric=True).build(batch).forward(states, step.weight, step.bias)
            )
            torch.testing.assert_close(log_prob.double(), expected.loss, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(entropy.double(), expected.extra["entropy"], atol=1e-6, rtol=1e-6)
            assert extra["ratio_min"] == extra["ratio_max"] == 1.0
