"""What a rank does in the tests of calibration, errors and hangs."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks.mesh_step import Collectives
from rlloss import CELossConfig, GRPOLossConfig, GRPOLossContext, MixedLossConfig, Totals, metrics
from rlloss.compat import verl
from steps import eye, labels, row, tok

warnings.simplefilter("ignore")
Parts = Sequence[Sequence[float | None]]


def nll_batch(part: Sequence[float | None]) -> tuple[dict[str, Any], torch.Tensor]:
    """A batch of one-token sequences with these NLLs, None an ignored token, and its hidden states."""
    batch = {"shifted_labels": labels(*(nll is not None for nll in part)), "num_tokens": [1] * len(part)}
    return batch, tok(*(-1.0 if nll is None else -nll for nll in part)).requires_grad_()


def nll_step(by_rank: Sequence[Parts], fields: dict[str, Any], totals: dict[str, Any] | None = None) -> dict[str, Any]:
    """This rank's part of a cross-entropy step."""
    config = CELossConfig(**fields)
    made = [nll_batch(part) for part in by_rank[dist.get_rank()]]
    contexts = [config.build(batch) for batch, _ in made]
    with Collectives() as counter:
        contexts = config.loss_ctx_cls.build_batches(contexts, totals=None if totals is None else Totals(**totals))
    calibrating = list(counter.names)
    losses, extras, weight = [], [], eye().requires_grad_()
    with Collectives() as counter:
        for context, (_, hidden) in zip(contexts, made, strict=True):
            output = context.forward(hidden, weight)
            assert output.loss.grad_fn is not None
            losses.append(output.loss.item())
            extras.append(output.extra)
            output.loss.backward()
    return {
        "losses": losses,
        "weight_grad": weight.grad,
        "hidden_grads": [hidden.grad for _, hidden in made],
        "build_batches": calibrating,
        "forward": counter.names,
        "metrics": metrics.reduce(metrics.merge(extras)),
    }


def nll_over_shards(nlls: Sequence[float | None]) -> float:
    """The loss of one row that is cut over all ranks, without reduction."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    config = CELossConfig(reduce_loss=False)
    batch, hidden = nll_batch(nlls)
    context = config.build(batch, mesh["sp"])
    (context,) = config.loss_ctx_cls.build_batches([context])
    length = context.loss_kwargs.shifted_labels.shape[1]
    padded = torch.cat([hidden, hidden.new_ones(1, 2 * length - hidden.shape[1], 2)], dim=1)
    return float(context.forward(padded[:, dist.get_rank() * length :][:, :length], eye()).loss)


def rl_batch(**fields: Any) -> dict[str, Any]:
    batch = {"shifted_labels": labels(1, 1, 1), "advantages": row(1.0, 1.0, 1.0), "old_logprobs": row(-1.0, -1.0, -1.0)}
    return {**batch, **fields}


def broken(how: str) -> None:
    """Something is wrong on rank 1 alone; every rank must learn of it in `build_batches`."""
    bad = dist.get_rank() == 1
    sp = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))["sp"]
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"} if how.startswith("sp") else {})
    mesh, totals = sp if how.startswith("sp") else None, None
    if how == "no old_logprobs" and bad:
        contexts = [config.build(rl_batch(old_logprobs=None))]
    elif how == "no old_logprobs, totals":
        config, totals = GRPOLossConfig(loss_reduction="sample"), Totals(tokens=3)
        contexts = [config.build(rl_batch(old_logprobs=None) if bad else rl_batch())]
    elif how == "no context" and bad:
        contexts = []
    elif how == "no context, world":
        contexts, totals = [] if bad else [config.build(rl_batch())], Totals(world=2)
    elif how == "no context, selection":
        config = GRPOLossConfig(policy_loss_cfg={"loss_type": "clip_cov"})
        contexts = [] if bad else [config.build(rl_batch())]
    elif how == "wrong length" and bad:
        contexts = [config.build(rl_batch())]
        contexts[0].loss_kwargs.old_logprobs = row(-1.0, -1.0)
    elif how == "more micro-batches" and bad:
        contexts = [config.build(rl_batch()) for _ in range(2)]
    elif how == "not a batch error" and bad:
        contexts = [config.build(rl_batch())]
        contexts[0].check = lambda: int("nonsense")  # whatever a hook of the user's raises
    elif how == "sp, no old_logprobs":
        contexts = [config.build(rl_batch(old_logprobs=None) if bad else rl_batch(), mesh)]
    elif how == "sp, other sequences":
        contexts = [config.build(rl_batch(num_tokens=[1, 2] if bad else [3]), mesh)]
    elif how == "sp, one rank whole":
        contexts = [config.build(rl_batch(), None if bad else mesh)]
    elif how == "sp, more micro-batches":
        config = config.model_copy(update={"reduce_loss": False})
        contexts = [config.build(rl_batch(), mesh) for _ in range(2 if bad else 1)]
    elif how == "mixed, part_ids":
        config = MixedLossConfig(parts={"rl": GRPOLossConfig(), "sft": CELossConfig()})
        contexts = [config.build(rl_batch(part_ids=torch.tensor([[0, 1, 1]])))]
        contexts[0].loss_kwargs.part_ids = torch.tensor([[0, 1, 2 if bad else 1]])
    else:
        contexts = [config.build(rl_batch(), mesh)]
    config.loss_ctx_cls.build_batches(contexts, totals=totals)


def too_few_counted(kind: str) -> None:
    """The group that is counted over does not fit the mesh."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "inner"))
    config = GRPOLossConfig()
    if kind == "sequence":
        context = config.build(rl_batch(), mesh["inner"])
        GRPOLossContext.build_batches([context], group=mesh["dp"].get_group())
    else:
        (context,) = GRPOLossContext.build_batches([config.build(rl_batch())])
        context.forward(tok(-1.0, -1.0, -1.0), eye()[dist.get_rank() :][:1], vocab_group=mesh["inner"].get_group())


def pickled(again: bool) -> float:
    """A context that was split over ranks and pickled; `again`: calibrated where it was unpickled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))["sp"]
    config = GRPOLossConfig()
    context = pickle.loads(pickle.dumps(GRPOLossContext.build_batches([config.build(rl_batch(), mesh)])[0]))
    if again:
        GRPOLossContext.build_batches([context], sp_mesh=mesh)
    part = tok(-1.0, -1.0, -1.0, -1.0)[:, dist.get_rank() * 2 :][:, :2]
    return float(context.forward(part, eye()).loss)


def late_fields(length: int) -> list[float]:
    """Old log-probs set after build with a length: whole, this rank's part, or neither."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))["sp"]
    config = GRPOLossConfig()
    context = config.build(rl_batch(old_logprobs=None), mesh)
    whole = torch.tensor([[-1.0, -2.0, -3.0, 0.0]])
    start = 0 if length == 3 else 2 * dist.get_rank()
    context.loss_kwargs.old_logprobs = whole[:, start : start + length]
    GRPOLossContext.build_batches([context])
    return context.loss_kwargs.old_logprobs[0].tolist()


def waits_forever() -> None:
    """Rank 0 sleeps, the others wait for it."""
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.all_reduce(torch.zeros(1))


def verl_metrics() -> list[float]:
    """verl's loss of an actor whose counts are missing, on ranks that are a group each: log-prob -1, reference -2."""
    groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
    ids = [torch.ones(1, length, dtype=torch.int64) for length in (1, 2)]
    data = {"prompts": ids[0], "responses": ids[1], "attention_mask": torch.ones(1, 3), "response_mask": ids[1]}
    data |= {name: torch.full((1, 2), -1.0) for name in ("old_log_probs", "advantages")}
    data["ref_log_prob"] = torch.full((1, 2), -2.0)
    output = {"log_probs": torch.full((3,), -1.0), "entropy": torch.full((3,), 3.0)}
    config = {"use_kl_loss": True, "kl_loss_type": "kl"}
    _, found = verl.ppo_loss(config, output, data, dp_group=groups[dist.get_rank()])
    return [found[name].aggregate() for name in ("kl_loss", "actor/entropy_loss")]
