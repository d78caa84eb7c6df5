"""The only module that runs collectives.

Without an initialised process group every function is the identity, so single-process code pays nothing.
A collective never writes into the tensor it was given.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
NAMED_RANKS = 4
"""Ranks that a sentence lists; it counts the others."""


def is_initialized() -> bool:
    """Tells whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def world_size(group: Group = None) -> int:
    """Returns the number of ranks in the group, 1 without torch.distributed."""
    return dist.get_world_size(group) if is_initialized() else 1


def rank(group: Group = None) -> int:
    """Returns this rank's number in the group, 0 without torch.distributed."""
    return dist.get_rank(group) if is_initialized() else 0


def all_reduce_sum(values: Tensor, group: Group = None) -> Tensor:
    """Returns the sum over ranks, without a graph."""
    return _all_reduce(values, dist.ReduceOp.SUM, group)


def all_reduce_max(values: Tensor, group: Group = None) -> Tensor:
    """Returns the maximum over ranks, without a graph."""
    return _all_reduce(values, dist.ReduceOp.MAX, group)


def _all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    if world_size(group) == 1:
        return values.detach()
    reduced = values.detach().to(collective_device(values.device, group), copy=True)
    dist.all_reduce(reduced, op=operation, group=group)
    return reduced.to(values.device)


def all_gather_text(text: str, group: Group = None) -> list[str]:
    """Returns the sentence of each rank; slow, for errors."""
    sentences: list[Any] = [text] * world_size(group)
    if len(sentences) > 1:
        dist.all_gather_object(sentences, text, group=group)
    return sentences


def differences(facts: Mapping[str, object], group: Group = None) -> list[str]:
    """Returns a sentence for each fact that is not the same on all ranks; slow, for errors and for the start of a run.

    Args:
        facts: By name; compared as their `repr` says it. A rank may lack some.
        group: The ranks, which are called by their global numbers.
    """
    told = [json.loads(text) for text in all_gather_text(json.dumps({k: repr(v) for k, v in facts.items()}), group)]
    ranks = dist.get_process_group_ranks(group) if is_initialized() else [0]
    found = []
    for name in dict.fromkeys(name for one in told for name in one):
        holders: dict[str, list[int]] = {}
        for number, one in zip(ranks, told, strict=True):
            holders.setdefault(one.get(name, "nothing"), []).append(number)
        if len(holders) > 1:
            values = (f"{value} on {_ranks(numbers)}" for value, numbers in holders.items())
            found.append(f"{name} is {', '.join(values)}")
    return found


def _ranks(numbers: Sequence[int]) -> str:
    named = " and ".join(f"rank {number}" for number in numbers[:NAMED_RANKS])
    return named if len(numbers) <= NAMED_RANKS else f"{named} and {len(numbers) - NAMED_RANKS} more"


def collective_device(own: torch.device, group: Group = None) -> torch.device:
    """Returns where a tensor must lie for a collective: on its own device, unless the backend is nccl."""
    if own.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return own


def members(group: Group = None) -> frozenset[int]:
    """Returns the global numbers of the ranks of a group; that of a single process is 0."""
    return frozenset(dist.get_process_group_ranks(group)) if is_initialized() else frozenset({0})


def all_gather(values: Tensor, group: Group = None) -> Tensor:
    """Returns the tensors of all ranks one after the other along the first dimension; all have one shape."""
    ranks = world_size(group)
    if ranks == 1:
        return values.detach()
    sent = values.detach().to(collective_device(values.device, group)).contiguous()
    gathered = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(gathered, sent, group=group)
    return torch.cat(gathered).to(values.device)


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks whose gradient is the sum of the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce_sum(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grads[0], ctx.group), None


def differentiable_sum(values: Tensor, group: Group) -> Tensor:
    """Returns the sum over the ranks of `group`, with a graph; one collective each way.

    `group=None` means: no ranks to sum over (not: the default group).
    """
    if group is None or world_size(group) == 1:
        return values
    total: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return total


class _ReplicatedSum(torch.autograd.Function):
    """A sum over ranks that all of them use alike, so that its gradient, equal on all of them, counts once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        return all_reduce_sum(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SharedInput(torch.autograd.Function):
    """Numbers equal on all ranks, of which each rank computes another part: their gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grads[0], ctx.group), None


def replicated_sum(values: Tensor, group: Group) -> Tensor:
    """Returns the sum of parts over ranks, for a result that every rank then uses alike; backward is free."""
    total: Tensor = _ReplicatedSum.apply(values, group)  # type: ignore[no-untyped-call]
    return total


def shared_input(values: Tensor, group: Group) -> Tensor:
    """Returns numbers that are equal on all ranks, for parts that differ; backward sums their gradient over ranks."""
    shared: Tensor = _SharedInput.apply(values, group)  # type: ignore[no-untyped-call]
    return shared
