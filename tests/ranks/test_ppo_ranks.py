"""PPO over ranks: critic, actor and critic together, whitening and running moments equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from batches import padded, random_step
from ranks.pool import Ranks
from rlloss import ActorCriticLossConfig, ActorCriticLossContext, ValueLossConfig, ValueLossContext, metrics
from rlloss.functional.masked import masked_var, masked_whiten
from rlloss.functional.moments import RunningMoments

LENGTHS = [5, 9, 1, 7, 12, 3]
KEYS = ("old_logprobs", "advantages", "values", "returns")


def one_rank(fields: dict[str, Any], critic_alone: bool) -> tuple[float, torch.Tensor, dict[str, float]]:
    """This rank's share of the step: mean loss over ranks, value-head gradient averaged over ranks, metrics."""
    step = random_step(3, LENGTHS)
    generator = torch.Generator().manual_seed(3)
    for sequence in step.sequences:
        for name in ("values", "returns"):
            sequence[name] = torch.randn(len(sequence["hidden"]), generator=generator, dtype=torch.float64)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    batch, hidden = padded(step.sequences[rank::world], KEYS)
    head = torch.linspace(-1, 1, 6, dtype=torch.float64)[None].requires_grad_()
    if critic_alone:
        (context,) = ValueLossContext.build_batches([ValueLossConfig(**fields).build(batch)])
        loss, (_, extra) = context.forward(hidden, head)
    else:
        contexts = ActorCriticLossContext.build_batches([ActorCriticLossConfig(**fields).build(batch)])
        loss, (_, extra) = contexts[0].forward(hidden, step.weight, step.bias, value_weight=head)
    loss.backward()
    assert head.grad is not None
    if world > 1:
        dist.all_reduce(head.grad)
    return loss.item(), head.grad / world, metrics.reduce(metrics.merge([extra]))


def statistics() -> tuple[Any, ...]:
    """Whitening, variance and moments of this rank's rows."""
    values = torch.arange(12, dtype=torch.float64).reshape(4, 3).square()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]])
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    values, mask = values[rank::world], mask[rank::world]
    moments = RunningMoments()
    moments.update(values[:, 0])
    moments.update(values[:, 1])
    return masked_whiten(values, mask), masked_var(values, mask), moments.mean, moments.std


@pytest.mark.parametrize("fields", [{}, {"loss_reduction": "sample"}])
@pytest.mark.parametrize("critic_alone", [True, False])
def test_a_step_over_two_ranks(critic_alone: bool, fields: dict[str, Any], ranks: Ranks) -> None:
    expected = one_rank(fields, critic_alone)
    for found in ranks.run(one_rank, fields, critic_alone, world=2):
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        torch.testing.assert_close(found[1], expected[1])
        assert found[2] == pytest.approx(expected[2], rel=1e-9)


def test_statistics_over_two_ranks(ranks: Ranks) -> None:
    whitened, variance, mean, std = statistics()
    for rank, found in enumerate(ranks.run(statistics, world=2)):
        torch.testing.assert_close(found[0], whitened[rank::2])
        torch.testing.assert_close(found[1], variance)
        assert (found[2], found[3]) == (pytest.approx(mean), pytest.approx(std))
