"""The step of XTuner's own GRPO and OREAL tests: micro-batches and sequence parallelism against one packed row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import xtuner_step
from ranks.pool import Ranks
from rlloss import GRPOLossConfig, OrealLossConfig

WAYS = [
    (accumulation, sequence_ranks, coef, mode)
    for accumulation in (1, 2)
    for sequence_ranks in (1, 2)
    for coef in (0.0, 1.0)
    for mode in ("eager", "chunk")
]


def expected(name: str, count: int, coef: float) -> dict[str, Tensor]:
    """One packed row through plain modules and the formula written out, in float64."""
    ids, labels, advantages = (torch.cat(column, 1) for column in zip(*xtuner_step.sequences(count), strict=True))
    embedding, head = xtuner_step.modules()
    modules = (embedding, head, *xtuner_step.older(embedding, head))
    embedding, head, old_embedding, old_head = (module.double() for module in modules)
    counted = labels != -100

    def log_probs(embed: Any, project: Any) -> Tensor:
        return project(embed(ids)).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)

    with torch.no_grad():
        old = log_probs(old_embedding, old_head)
    new = log_probs(embedding, head)
    ratio = (new - old).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    difference = old - new
    kl = (difference.exp() - difference - 1).clamp(-10, 10)
    total = counted.sum()
    if name == "grpo":
        loss = policy[counted].sum() / total
    else:
        up, down = counted & (advantages > 0), counted & (advantages <= 0)
        loss = (policy[up].sum() - new[up].sum()) / up.sum() + policy[down].sum() / down.sum().clamp(min=1)
    loss = loss + coef * kl[counted].sum() / total
    loss.backward()
    return {"embedding": embedding.weight.grad, "head": head.weight.grad, "loss": loss.detach()}


@pytest.mark.parametrize("name", ["grpo", "oreal"])
def test_loss_and_gradients(name: str, ranks: Ranks) -> None:
    make = {"grpo": GRPOLossConfig, "oreal": OrealLossConfig}[name]
    for accumulation, sequence_ranks, coef, mode in WAYS:
        config = make(
            policy_loss_cfg={"loss_type": "vanilla", "cliprange_high": 0.2, "cliprange_low": 0.2, "clip_ratio_c": None},
            mode=mode,
            chunk_size=100,
            use_kl_loss=coef > 0,
            kl_loss_coef=coef,
            kl_loss_type="low_var_kl",
        )
        reference = expected(name, accumulation * 2 // sequence_ranks, coef)
        for found in ranks.run(xtuner_step.step, config, accumulation, sequence_ranks):
            for key, right in reference.items():
                assert torch.allclose(found[key].double(), right, atol=1e-8, rtol=1e-5), (
                    accumulation,
                    sequence_ranks,
                    coef,
                    mode,
                )
