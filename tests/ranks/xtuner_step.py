"""Sequences and modules of the step in XTuner's loss tests, and what one of two ranks does with them."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ranks.mesh_step import local
from rlloss import gather_logprobs

WORDS, WIDTH = 40, 2


def sequences(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids, shifted labels and advantages `[1, T]` of prompts with responses, all of different lengths."""
    chance, generator = random.Random(42), torch.Generator().manual_seed(42)
    made = []
    for index in range(count):
        prompt, response = chance.randint(50, 100), chance.randint(200, 400)
        ids = torch.randint(0, WORDS, (1, prompt + response), generator=generator)
        labels = ids.roll(-1, 1)
        labels[:, : prompt - 1], labels[:, -1] = -100, -100
        sign = 1.0 if index % 2 == 0 else -1.0
        made.append((ids, labels, torch.full(ids.shape, sign * chance.uniform(0.3, 1.0))))
    return made


def modules() -> tuple[nn.Embedding, nn.Linear]:
    torch.manual_seed(42)
    return nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)


def older(embedding: nn.Embedding, head: nn.Linear) -> tuple[nn.Embedding, nn.Linear]:
    """The policy that the ratio is taken against."""
    torch.manual_seed(43)
    noise = torch.randn(embedding.weight.shape) * 0.05
    old_embedding, old_head = modules()
    old_embedding.weight.data = embedding.weight.data + noise
    old_head.weight.data = head.weight.data + noise
    return old_embedding, old_head


def step(config: Any, accumulation: int, sequence_ranks: int) -> dict[str, Tensor]:
    """One optimiser step: its loss, and the gradients averaged over ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // sequence_ranks, sequence_ranks), mesh_dim_names=("dp", "sp"))
    data_ranks, data_rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    place = mesh["sp"].get_local_rank()
    mine = sequences(data_ranks * accumulation)[data_rank::data_ranks]
    embedding, head = modules()
    old_embedding, old_head = older(embedding, head)
    parts = [local(ids, place, sequence_ranks, 0) for ids, _, _ in mine]
    contexts = [
        config.build({"shifted_labels": labels, "advantages": advantages}, sp_mesh=mesh["sp"])
        for _, labels, advantages in mine
    ]
    for context, ids in zip(contexts, parts, strict=True):
        with torch.no_grad():
            kwargs = context.loss_kwargs
            kwargs.old_logprobs = gather_logprobs(old_head(old_embedding(ids)), kwargs.shifted_labels)
            kwargs.ref_logprobs = kwargs.old_logprobs.clone() if config.use_kl_loss else None
    total = torch.zeros(())
    for context, ids in zip(config.loss_ctx_cls.build_batches(contexts), parts, strict=True):
        loss, _ = context.forward(embedding(ids), head.weight)
        loss.backward()
        total += loss.detach()
    for parameter in (embedding.weight, head.weight):
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    return {"embedding": embedding.weight.grad, "head": head.weight.grad, "loss": total}
