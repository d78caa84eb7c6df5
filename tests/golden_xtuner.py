"""XTuner's numbers: packed rows through `build`, `build_batches`, `forward`; loss and gradients of every part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from golden_cases import Case, assert_close, family, tensor
from rlloss import CELossConfig, CELossContext, GRPOLossConfig, GRPOLossContext, OrealLossConfig, OrealLossContext

# XTuner's logits are float32; liger's log-probs are float32 here as well.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Head:
    """How the head is evaluated."""

    mode: str
    chunk_size: int = 1024

    def fields(self) -> dict[str, Any]:
        return {"mode": self.mode, "chunk_size": self.chunk_size}

    def __str__(self) -> str:
        return f"chunk{self.chunk_size}" if self.mode == "chunk" else self.mode


HEADS = (Head("eager"), Head("chunk", 1), Head("chunk", 4), Head("chunk", 1024), Head("liger"))


def batch_of(row: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The batch dict of one packed row `[1, T]`; `keys` are the per-token tensors that the loss reads."""
    batch: dict[str, Any] = {
        "shifted_labels": torch.tensor([row["shifted_labels"]]),
        "num_tokens": torch.tensor(row["seq_lens"]),
    }
    names = {"is_weights": "rollout_is_weights"}
    return batch | {names.get(key, key): tensor([row[key]]) for key in keys if row[key] is not None}


def check_step(case: Case, contexts: list[Any]) -> None:
    """Runs calibrated contexts over the case's micro-batches and compares losses and gradients."""
    outputs = case.data["outputs"]
    weight = tensor(case.data["head_weight"]).requires_grad_()
    hidden = [tensor([row["hidden"]]).requires_grad_() for row in case.data["micro_batches"]]
    losses: list[Tensor] = []
    for context, states in zip(contexts, hidden, strict=True):
        loss, _ = context.forward(states, weight)
        loss.backward()
        losses.append(loss.detach())
    assert_close(torch.stack(losses), outputs["losses"], TOLERANCE, "losses")
    assert_close(torch.stack(losses).sum(), outputs["total"], TOLERANCE, "total")
    assert weight.grad is not None
    assert_close(weight.grad, outputs["grad_head_weight"], TOLERANCE, "grad_head_weight")
    for i, (states, expected) in enumerate(zip(hidden, outputs["grad_hidden"], strict=True)):
        assert states.grad is not None
        assert_close(states.grad[0], expected, TOLERANCE, f"grad_hidden[{i}]")


@family("cases:GRPO", HEADS)
def grpo(case: Case, head: Head) -> None:
    """GRPO with or without KL loss and given importance weights."""
    config = GRPOLossConfig(**case.data["config"] | head.fields())
    keys = ("advantages", "old_logprobs", "ref_logprobs", "is_weights")
    contexts = [config.build(batch_of(row, keys)) for row in case.data["micro_batches"]]
    check_step(case, GRPOLossContext.build_batches(contexts))


@family("cases:CE", HEADS)
def cross_entropy(case: Case, head: Head) -> None:
    """Supervised cross-entropy."""
    config = CELossConfig(**case.data["config"] | head.fields())
    contexts = [config.build(batch_of(row, ())) for row in case.data["micro_batches"]]
    check_step(case, CELossContext.build_batches(contexts))


@family("cases:Oreal", HEADS)
def oreal(case: Case, head: Head) -> None:
    """OREAL: policy on positive and negative tokens, SFT on positive ones, KL."""
    config = OrealLossConfig(**case.data["config"] | head.fields())
    keys = ("advantages", "old_logprobs", "ref_logprobs", "is_weights")
    contexts = [config.build(batch_of(row, keys)) for row in case.data["micro_batches"]]
    check_step(case, OrealLossContext.build_batches(contexts))
