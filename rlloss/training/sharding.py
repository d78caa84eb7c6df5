"""FSDP2: the weights of a policy shared out over the ranks, and gathered where they are read."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from rlloss.distributed import world_size
from rlloss.losses.lm_head import LMHead
from rlloss.training.model import Policy


class ShardedPolicy(Policy):
    """A policy of which every rank holds a part of each weight, and of the optimiser's moments.

    Decoder layers and the head are gathered one at a time while they work. Generation, which would gather the whole
    model for every token, runs on a replica that is filled anew each time it is asked for, so that it is never stale.

    Args:
        model: A model of transformers with a head, with the same weights on every rank.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._replica = Policy(copy.deepcopy(model).requires_grad_(False), tokenizer)
        super().__init__(model, tokenizer)
        head = self.network.head
        tied = head.weight is model.get_input_embeddings().weight
        shard(self.network, blocks_of(model) + ([] if tied else [head]))

    @contextmanager
    def whole(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[Policy]:
        """Fills the replica, by a collective for each tensor; every rank must come here."""
        source = self.model.state_dict() if weights is None else weights
        with torch.no_grad():
            for name, value in self._replica.model.state_dict().items():
                value.copy_(_full(source[name]))
        yield self._replica


def distributed_policy(policy: Policy) -> Policy:
    """Returns the policy, sharded where there are several ranks."""
    return policy if world_size() == 1 else ShardedPolicy(policy.model, policy.tokenizer)


def shard(network: nn.Module, units: list[nn.Module]) -> None:
    """Shards a network over all ranks, in units that are gathered one at a time; does nothing on one rank.

    Args:
        network: The root, which holds what no unit holds.
        units: Modules of it.
    """
    if world_size() == 1:
        return
    device = next(network.parameters()).device.type
    mesh = init_device_mesh(device, (world_size(),))
    for module in [*units, network]:
        fully_shard(module, mesh=mesh)


def blocks_of(model: Any) -> list[nn.Module]:
    """Returns the decoder layers of a model of transformers."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def prepare_backward(network: nn.Module, mode: str, last: bool) -> None:
    """Says what the next backward of a sharded network gathers and reduces; does nothing on one rank.

    Args:
        network: The root.
        mode: Of the loss; in chunk mode the head's gradients exist after forward, and its weight is not gathered again.
        last: Whether this is the last micro-batch, after which gradients are averaged over the ranks.
    """
    if not isinstance(network, FSDPModule):
        return
    network.set_requires_gradient_sync(last)
    head = getattr(network, "head", None)
    if isinstance(head, LMHead) and isinstance(head, FSDPModule):
        head.set_unshard_in_backward(mode != "chunk")


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
