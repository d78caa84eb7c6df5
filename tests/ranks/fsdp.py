"""What a rank does in the tests with FSDP2 and with a plain average of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ranks.mesh_step import Collectives
from rlloss import BaseLossConfig, LMHead, LogProbConfig

WORDS, WIDTH = 40, 8


class Model(nn.Module):
    """An embedding under a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lm_head = LMHead(WIDTH, WORDS, bias=True)

    def forward(self, ids: Tensor, loss_ctx: Any = None) -> Any:
        return self.lm_head(torch.tanh(self.embedding(ids)), loss_ctx)


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def make_batches(count: int) -> list[dict[str, Tensor]]:
    """Rows of one sequence each, prompt and padding ignored; one token a column."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for index in range(count):
        length = 9 + 5 * (index % 3)
        ids = torch.randint(0, WORDS, (1, length), generator=generator)
        labels = ids.roll(-1, 1)
        labels[:, : 2 + index % 2], labels[:, -1] = -100, -100
        advantage = torch.full((1, length), 1.0 - 0.7 * (index % 3))
        batches.append({"ids": ids, "shifted_labels": labels, "advantages": advantage})
    return batches


def old_logprobs(config: BaseLossConfig, batch: dict[str, Tensor], model: Model) -> Tensor:
    """Log-probs of an older policy by the same head."""
    scorer = LogProbConfig(mode=config.mode, chunk_size=config.chunk_size)
    with torch.no_grad():
        return (
            scorer.build(batch)
            .forward(torch.tanh(model.embedding(batch["ids"])), model.lm_head.weight, model.lm_head.bias)
            .loss
        )


def one_process(config: BaseLossConfig, count: int) -> dict[str, Tensor]:
    """Gradients of the whole step in plain torch modules, one micro-batch after the other."""
    model, older, batches = make_model(), make_model(1), make_batches(count)
    contexts = [
        config.build({**batch, "old_logprobs": old_logprobs(config, batch, older), "ids": None}) for batch in batches
    ]
    for context in contexts:
        context.loss_kwargs.ref_logprobs = context.loss_kwargs.old_logprobs
    for context, batch in zip(config.loss_ctx_cls.build_batches(contexts), batches, strict=True):
        model(batch["ids"], context).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sharded(config: BaseLossConfig, count: int, half: bool, unshard: bool) -> tuple[dict[str, Tensor], list[str]]:
    """The same step with FSDP2 over all ranks; gradients are reduced with the last micro-batch only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, older = make_model(), make_model(1)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.lm_head.set_unshard_in_backward(unshard)
    batches = make_batches(count)[rank::world]
    contexts = [
        config.build({**batch, "old_logprobs": old_logprobs(config, batch, older), "ids": None}) for batch in batches
    ]
    for context in contexts:
        context.loss_kwargs.ref_logprobs = context.loss_kwargs.old_logprobs
    contexts = config.loss_ctx_cls.build_batches(contexts)
    with Collectives() as counter:
        for number, (context, batch) in enumerate(zip(contexts, batches, strict=True)):
            model.set_requires_gradient_sync(number == len(batches) - 1)
            model(batch["ids"], context).loss.backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}, counter.names


def outside(config: BaseLossConfig) -> None:
    """A sharded weight that is read outside of its module."""
    model, (batch,) = make_model(), make_batches(1)
    fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    batch["old_logprobs"] = torch.zeros(batch["shifted_labels"].shape)
    (context,) = config.loss_ctx_cls.build_batches([config.build({**batch, "ids": None})])
    context.forward(torch.tanh(model.embedding(batch["ids"])), model.lm_head.weight, model.lm_head.bias)
