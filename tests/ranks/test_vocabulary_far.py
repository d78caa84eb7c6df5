"""Logits more than 1e4 nats apart, words of probability 0 among them, on a vocabulary that is cut over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import far_logits
from ranks.pool import Ranks
from ranks.vocabulary import mesh_of


def steps_on_shards(mode: str) -> list[far_logits.Found]:
    """Every case and loss on this rank's words."""
    mesh, found = mesh_of(1), []
    rank, world = mesh["tp"].get_local_rank(), dist.get_world_size()
    for case in far_logits.BIASES:
        hidden, weight, bias = far_logits.tensors(case)
        own = weight.tensor_split(world)[rank], bias.tensor_split(world)[rank]
        for loss in far_logits.LOSSES:
            config = far_logits.config_of(loss, mode=mode, chunk_size=3)
            context = far_logits.context_of(config, group=mesh["dp"].get_group())
            found.append(far_logits.step(context, hidden, *own, vocab_mesh=mesh["tp"]))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", ["eager", "chunk"])
def test_values_and_gradients_are_those_of_one_rank(mode: str, world: int, ranks: Ranks) -> None:
    parts = iter(zip(*ranks.run(steps_on_shards, mode, world=world), strict=True))
    for case in far_logits.BIASES:
        for loss in far_logits.LOSSES:
            wanted, found = far_logits.expected(loss, case), next(parts)
            joined = [torch.cat([getattr(part, name) for part in found]) for name in ("grad_weight", "grad_bias")]
            for part in found:
                part.grad_weight, part.grad_bias = joined
                far_logits.assert_same(part, wanted, far_logits.tolerance(case, torch.float64))
