"""What a rank does in the public cases of kind A, K and L: small rows with exact log-probs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ranks.mesh_step import Collectives, local
from rlloss import metrics
from steps import eye, labels, row, tok

Part = Mapping[str, Sequence[Any]]
"""A micro-batch: log-probs by the head `log_probs`, `mask`, `num_tokens`, and rows of other keys."""


def nlls(*values: float | None) -> Part:
    """A micro-batch of one-token sequences with these NLLs; None is an ignored token."""
    return {
        "log_probs": [-1.0 if value is None else -value for value in values],
        "mask": [value is not None for value in values],
        "num_tokens": [1] * len(values),
    }


def tensors_of(part: Part) -> tuple[dict[str, Any], Tensor]:
    count = len(part["log_probs"])
    batch: dict[str, Any] = {name: row(*part[name]) for name in part.keys() - {"log_probs", "mask", "num_tokens"}}
    batch["shifted_labels"] = labels(*part.get("mask", [1] * count))
    return {**batch, "num_tokens": torch.tensor(part.get("num_tokens", [count]))}, tok(*part["log_probs"])


def step(config: Any, by_rank: Sequence[Sequence[Part]], sequence_ranks: int = 1) -> dict[str, Any]:
    """This rank's part of a step; under sequence parallelism `by_rank` is about data ranks.

    A rank without micro-batches takes the first one of the first rank with all labels ignored.
    """
    started, world = time.monotonic(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // sequence_ranks, sequence_ranks), mesh_dim_names=("dp", "sp"))
    place, mine = mesh["sp"].get_local_rank(), by_rank[mesh["dp"].get_local_rank()]
    made = [tensors_of(part) for part in mine or by_rank[0][:1]]
    build = config.build if mine else config.empty
    contexts = [build(batch, mesh["sp"]) for batch, _ in made]
    states = [local(hidden, place, sequence_ranks, 1.0).clone().requires_grad_() for _, hidden in made]
    weight, losses, extras = eye().requires_grad_(), [], []
    with Collectives() as counter:
        contexts = config.loss_ctx_cls.build_batches(contexts, sp_mesh=mesh["sp"])
        for context, hidden in zip(contexts, states, strict=True):
            output = context.forward(hidden, weight)
            assert output.loss.grad_fn is not None
            output.loss.backward()
            losses.append(output.loss.item())
            extras.append(output.extra)
        reduced = metrics.reduce(metrics.merge(extras))
    parts = [part for extra in extras for metric in extra.values() for part in metric.parts().values()]
    return {
        "losses": losses,
        "loss": sum(losses),
        "weight_grad": weight.grad,
        "hidden_grads": [hidden.grad for hidden in states],
        "metrics": reduced,
        "collectives": counter.names,
        "tokens": contexts[0].loss_kwargs.global_grad_tokens,
        "graph_free": all(not part.requires_grad and part.grad_fn is None for part in parts),
        "seconds": time.monotonic() - started,
    }


def steps(configs: Sequence[Any], by_rank: Sequence[Sequence[Part]], sequence_ranks: int = 1) -> list[dict[str, Any]]:
    """The same step for several configs."""
    return [step(config, by_rank, sequence_ranks) for config in configs]
