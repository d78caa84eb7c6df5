"""What a rank does where another one fails, stays away, or does something else than it: nobody may wait for ever."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranks.rank_cases import rl_batch
from rlloss import (
    CELossConfig,
    GRPOLossConfig,
    MixedLossConfig,
    OrealLossConfig,
    RolloutImportanceSampling,
    Totals,
    metrics,
)
from rlloss.errors import BatchError
from steps import eye, tok


def _is_odd() -> bool:
    return dist.get_rank() == 1


def _inner_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "inner"))


def _calibrated(config: Any, **build_batches: Any) -> Any:
    return config.loss_ctx_cls.build_batches([config.build(rl_batch())], **build_batches)[0]


def rank_fails(where: str) -> None:
    """Rank 1 raises where nothing of it travels to the others, which wait in a collective and learn of its end."""
    mode = "chunk" if where.endswith("chunk") else "eager"
    hidden, broken = tok(-1.0, -1.0, -1.0), tok(-1.0)
    if where == "build":
        config = GRPOLossConfig()
        batch = rl_batch(shifted_labels=None) if _is_odd() else rl_batch()
        config.loss_ctx_cls.build_batches([config.build(batch)])
    elif where == "value":
        _calibrated(GRPOLossConfig()).forward(broken if _is_odd() else hidden, eye())
    elif where.startswith("sequence"):
        config = GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample", mode=mode)
        context = config.build(rl_batch(), _inner_mesh()["inner"])
        config.loss_ctx_cls.build_batches([context])
        context.forward(broken if _is_odd() else hidden[:, :2], eye())
    elif where.startswith("vocabulary"):
        mesh = _inner_mesh()
        context = _calibrated(GRPOLossConfig(mode=mode), group=mesh["dp"].get_group())
        rows = eye()[dist.get_rank() :][:1]
        context.forward(broken if _is_odd() else hidden, rows, vocab_mesh=mesh["inner"])
    elif where == "metrics":
        extra = _calibrated(GRPOLossConfig()).forward(hidden, eye()).extra
        if _is_odd():
            raise OSError("the log file is gone")
        metrics.reduce(extra)


def pipeline(named: bool) -> float:
    """Rank 1 is the last stage and has the loss; rank 0 waits for the gradient of what it sent."""
    last = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("stage", "data"))["data"].get_group()
    states = tok(-1.0, -1.0, -1.0)
    if not _is_odd():
        dist.send(states, 1)
        gradient = torch.empty_like(states)
        dist.recv(gradient, 1)
        return float(gradient.abs().sum())
    received = torch.empty_like(states)
    dist.recv(received, 0)
    received.requires_grad_()
    _calibrated(GRPOLossConfig(), group=last if named else None).forward(received, eye()).loss.backward()
    assert received.grad is not None
    dist.send(received.grad, 0)
    return float(received.grad.abs().sum())


def odd_metrics(how: str) -> None:
    """Rank 1 reduces other metrics than rank 0."""
    extra = _calibrated(GRPOLossConfig()).forward(tok(-1.0, -1.0, -1.0), eye()).extra
    found: dict[str, Any] = metrics.merge([extra])
    if _is_odd() and how == "none":
        found = {}
    elif _is_odd() and how == "more":
        found["mine"] = metrics.Sum(torch.ones(()))
    elif _is_odd() and how == "another kind":
        found["tokens"] = metrics.Max(torch.ones(()))
    metrics.reduce(found)


def nan_metrics() -> dict[str, float]:
    """One rank has NaN in a maximum, a minimum and a sum."""
    number = torch.tensor(float("nan") if _is_odd() else 1.0)
    kinds = {"high": metrics.Max, "low": metrics.Min, "sum": metrics.Sum}
    return metrics.reduce({name: kind(number) for name, kind in kinds.items()} | {"one": metrics.Max(torch.ones(()))})


OTHER_CONFIGS: dict[str, tuple[Any, Any]] = {
    "reduce_loss": (GRPOLossConfig(), GRPOLossConfig(reduce_loss=False)),
    "grad_reduction": (GRPOLossConfig(), GRPOLossConfig(grad_reduction="sum")),
    "loss_reduction": (GRPOLossConfig(), GRPOLossConfig(loss_reduction="sample")),
    "coefficient": (GRPOLossConfig(entropy_coef=0.01), GRPOLossConfig(entropy_coef=0.02)),
    "terms": (GRPOLossConfig(), GRPOLossConfig(entropy_coef=0.01)),
    "class": (GRPOLossConfig(), OrealLossConfig()),
    "selection": (GRPOLossConfig(), GRPOLossConfig(policy_loss_cfg={"loss_type": "clip_cov"}, entropy_coef=0.01)),
}


def other_configs(what: str) -> None:
    """The loss of rank 1 is another one."""
    _calibrated(OTHER_CONFIGS[what][dist.get_rank()])


OTHER_TOTALS: dict[str, tuple[Totals | None, Totals | None]] = {
    "tokens": (Totals(tokens=3), Totals(tokens=6)),
    "world": (Totals(world=2), Totals(world=4)),
    "none": (None, Totals(tokens=6)),
    "prompts": (Totals(prompts=1), Totals(prompts=2)),
}


def other_totals(what: str) -> None:
    """Rank 1 was given other counts."""
    _calibrated(GRPOLossConfig(), totals=OTHER_TOTALS[what][dist.get_rank()])


def own_totals(reduce_loss: bool) -> float:
    """Tokens are chosen over all ranks, and each rank divides by its own, as TRL's bnpo does."""
    config = GRPOLossConfig(reduce_loss=reduce_loss, top_entropy_quantile=0.5)
    batch = rl_batch(selection_entropy=torch.arange(3.0)[None] + dist.get_rank())
    totals = Totals(tokens=3.0 * (1 + dist.get_rank()), world=dist.get_world_size())
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)], totals=totals)
    return float(context.loss_kwargs.policy_loss_weight.sum())


def silent_totals(seconds: float, patience: float) -> None:
    """Rank 1 needs no count and no sum in forward, and goes on; rank 0 counts over a group with little patience."""
    group = dist.new_group(timeout=timedelta(seconds=patience))
    config = GRPOLossConfig(reduce_loss=False)
    context = _calibrated(config, group=group, totals=Totals(tokens=6) if _is_odd() else None)
    context.forward(tok(-1.0, -1.0, -1.0), eye())
    time.sleep(seconds)


def nothing_and_totals(reduce_loss: bool) -> None:
    """Rank 1 has an empty list, and every count is given: it cannot know whether the others sum something."""
    config = GRPOLossConfig(reduce_loss=reduce_loss)
    contexts = [] if _is_odd() else [config.build(rl_batch())]
    for context in config.loss_ctx_cls.build_batches(contexts, totals=Totals(tokens=6)):
        context.forward(tok(-1.0, -1.0, -1.0), eye())


def build_in_vain(deferred: bool) -> None:
    """Rank 1 cannot build its batch; `deferred`: it says so in `build_batches`, as docs/ranks.md tells."""
    config, problem = GRPOLossConfig(), None
    try:
        contexts = [config.build(rl_batch(shifted_labels=None) if _is_odd() else rl_batch())]
    except BatchError as error:
        if not deferred:
            raise
        contexts, problem = [], error
    try:
        config.loss_ctx_cls.build_batches(contexts)
    except BatchError as error:
        raise (problem or error) from error


def left_out(how: str) -> None:
    """Rank 1 has nothing, or too little, where several exchanges come one after the other."""
    totals: Any = None
    if how.startswith("mixed"):
        config: Any = MixedLossConfig(parts={"rl": GRPOLossConfig(), "sft": CELossConfig()})
        batch = rl_batch(part_ids=torch.tensor([0]), old_logprobs=None if _is_odd() else rl_batch()["old_logprobs"])
    elif how.startswith("rollout"):
        config = GRPOLossConfig(
            rollout_is=RolloutImportanceSampling(
                rollout_is_mode="truncate", rollout_is_threshold=(0.5, 2.0), normalize_weights=True
            )
        )
        batch = rl_batch(rollout_logprobs=rl_batch()["old_logprobs"], advantages=rl_batch()["advantages"])
        batch["old_logprobs"] = None if _is_odd() else batch["old_logprobs"]
    else:
        config = GRPOLossConfig(policy_loss_cfg={"loss_type": "kl_cov"})
        batch = rl_batch(old_logprobs=None if _is_odd() else rl_batch()["old_logprobs"])
    if how.endswith("totals"):  # nothing to count, and nothing to sum in forward
        config, totals = config.model_copy(update={"reduce_loss": False}), Totals(tokens=6)
    contexts = [] if _is_odd() and how.endswith("empty list") else [config.build(batch)]
    config.loss_ctx_cls.build_batches(contexts, totals=totals)


def more_micro_batches(loss_reduction: str, totals: dict[str, Any] | None, reduce_loss: bool) -> float:
    """Rank 1 has two micro-batches, rank 0 has one, and nothing has to be counted."""
    config = GRPOLossConfig(loss_reduction=loss_reduction, reduce_loss=reduce_loss)  # type: ignore[arg-type]
    contexts = [config.build(rl_batch()) for _ in range(1 + _is_odd())]
    given = None if totals is None else Totals(**totals)
    contexts = config.loss_ctx_cls.build_batches(contexts, totals=given)
    return float(sum(context.forward(tok(-1.0, -1.0, -1.0), eye()).loss for context in contexts))


def backward_on_one_rank(mode: str) -> float:
    """Only rank 0 goes backward; the ratio of a sequence lies on both."""
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample", mode=mode)
    context = config.build(rl_batch(), _inner_mesh()["inner"])
    config.loss_ctx_cls.build_batches([context])
    hidden = tok(-1.0, -1.0).requires_grad_()
    loss = context.forward(hidden, eye()).loss
    if _is_odd():
        return 0.0
    loss.backward()
    assert hidden.grad is not None
    return float(hidden.grad.abs().sum())
