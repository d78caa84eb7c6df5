"""What a rank does in the tests of a vocabulary that is cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from batches import PER_TOKEN, Step, packed, random_step
from rlloss import GRPOLossConfig, LMHead, LogProbConfig, metrics

Placed = tuple[dict[str, Any], Tensor]


def step_of(vocabulary: int = 13) -> Step:
    return random_step(11, [6, 9, 4], vocabulary=vocabulary)


def mesh_of(data_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data_ranks, dist.get_world_size() // data_ranks), mesh_dim_names=("dp", "tp"))


def parts_of(step: Step, mesh: DeviceMesh) -> list[dict[str, Tensor]]:
    """The sequences of this data rank."""
    return step.sequences[mesh["dp"].get_local_rank() :: mesh["dp"].size()]


def sharded(step: Step, mesh: DeviceMesh) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias as DTensors over the vocabulary ranks."""
    assert step.bias is not None
    return (
        nn.Parameter(distribute_tensor(step.weight.clone(), mesh["tp"], [Shard(0)])),
        nn.Parameter(distribute_tensor(step.bias.clone(), mesh["tp"], [Shard(0)])),
    )


def dtensor_steps(configs: Sequence[Any], step: Step, data_ranks: int, module: bool) -> list[dict[str, Any]]:
    """A step through a DTensor head, given to forward, or held by an LMHead that FSDP2 shards once more."""
    mesh = mesh_of(data_ranks)
    return [_dtensor_step(config, step, mesh, module) for config in configs]


def _dtensor_step(config: Any, step: Step, mesh: DeviceMesh, module: bool) -> dict[str, Any]:
    batch, states = packed(parts_of(step, mesh), PER_TOKEN)
    states = states.clone().requires_grad_()
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)], group=mesh["dp"].get_group())
    if module:
        vocabulary, width = step.weight.shape
        head = LMHead(width, vocabulary, bias=True, dtype=torch.float64, vocab_mesh=mesh["tp"])
        head.weight, head.bias = sharded(step, mesh)
        fully_shard(head, mesh=mesh["dp"])
        output = head(states, context)
        output.loss.backward()
        parameters = head.weight, head.bias  # not before: forward leaves the gathered ones in their place
    else:
        parameters = sharded(step, mesh)
        output = context.forward(states, *parameters, vocab_mesh=mesh["tp"])
        output.loss.backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in parameters)
    weight_grad, bias_grad = (parameter.grad.full_tensor() for parameter in parameters)
    if not module:
        for gradient in (weight_grad, bias_grad):
            dist.all_reduce(gradient, group=mesh["dp"].get_group())
            gradient /= mesh["dp"].size()
    lengths = [len(sequence["hidden"]) for sequence in parts_of(step, mesh)]
    return {
        "loss": output.loss.item(),
        "hidden": [part / mesh["dp"].size() for part in states.grad[0].split(lengths)],
        "weight": weight_grad,
        "bias": bias_grad,
        "metrics": metrics.reduce(output.extra, mesh["dp"].get_group()),
    }


def misplaced(how: str, mode: str) -> None:
    """A head that forward cannot take as it is given."""
    step, mesh = step_of(), mesh_of(dist.get_world_size() // 2)
    batch, states = packed(step.sequences, PER_TOKEN)
    config = GRPOLossConfig(mode=mode)
    group = mesh["dp"].get_group()
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)], group=group)
    given: dict[str, Any] = {"vocab_mesh": mesh["tp"]}
    weight: Any = distribute_tensor(step.weight, mesh["tp"], [Shard(0)])
    bias: Any = None
    if how == "mesh not named":
        given = {}
    elif how == "replicated":
        weight = distribute_tensor(step.weight, mesh["tp"], [Replicate()])
    elif how == "columns":
        weight = distribute_tensor(step.weight, mesh["tp"], [Shard(1)])
    elif how == "other mesh":
        weight = distribute_tensor(step.weight, mesh["dp"], [Shard(0)])
    elif how == "two dimensions":
        weight = distribute_tensor(step.weight, mesh, [Replicate(), Shard(0)])
    elif how == "mesh of two dimensions":
        given = {"vocab_mesh": mesh}
    elif how == "group and mesh":
        given["vocab_group"] = mesh["tp"].get_group()
    elif how == "bias whole":
        bias = distribute_tensor(step.bias, mesh["tp"], [Replicate()])
    elif how == "bias of all words":
        bias = step.bias
    elif how == "no words left":
        step = step_of(vocabulary=1)
        weight = distribute_tensor(step.weight, mesh["tp"], [Shard(0)])
    context.forward(states, weight, bias, **given)


def other_tokens(how: str, mode: str) -> None:
    """The ranks of one vocabulary hold different micro-batches."""
    step, mesh = step_of(), mesh_of(1)
    rank = mesh["tp"].get_local_rank()
    sequences = step.sequences[rank:] if how == "number" else step.sequences
    batch, states = packed(sequences, PER_TOKEN)
    if how == "labels" and rank == 1:
        labels = batch["shifted_labels"]
        batch["shifted_labels"] = torch.where(labels == -100, -100, (labels + 1) % 13)
    config = GRPOLossConfig(mode=mode, chunk_size=4)
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)], group=mesh["dp"].get_group())
    context.forward(states, step.weight.tensor_split(2)[rank], vocab_mesh=mesh["tp"])


def scored(modes: Sequence[str]) -> list[tuple[Tensor, Tensor, dict[str, float]]]:
    """Log-probs and entropies by a head that is cut, and a loss whose old log-probs these are."""
    step, mesh = step_of(), mesh_of(1)
    batch, states = packed(step.sequences, ("advantages", "temperature"))
    rank = mesh["tp"].get_local_rank()
    weight, bias = step.weight.float().tensor_split(2)[rank], step.bias.float().tensor_split(2)[rank]
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    found = []
    for mode in modes:
        scorer = LogProbConfig(mode=mode, chunk_size=4, entropy_metric=True)
        output = scorer.build(batch).forward(states.float(), weight, bias, vocab_mesh=mesh["tp"])
        config = GRPOLossConfig(mode=mode, chunk_size=4)
        context = config.build({**batch, "old_logprobs": output.loss})
        (context,) = config.loss_ctx_cls.build_batches([context], group=mesh["dp"].get_group())
        extra = context.forward(states.float(), weight, bias, vocab_mesh=mesh["tp"]).extra
        found.append((output.loss, output.extra["entropy"], metrics.reduce(extra, mesh["dp"].get_group())))
    return found
