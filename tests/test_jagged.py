"""Jagged batches give what the same sequences give when they are packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batches import packed, random_step
from rlloss import CELossConfig, GRPOLossConfig, LogProbConfig, OrealLossConfig, RolloutImportanceSampling
from rlloss.errors import BatchError

KEYS = ("old_logprobs", "ref_logprobs", "advantages", "temperature")
STEP = random_step(3, [4, 6, 2])
CONFIGS: dict[str, Any] = {
    "grpo": GRPOLossConfig(use_kl_loss=True, loss_reduction="sample"),
    "gspo": GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample", mode="chunk", chunk_size=3),
    "oreal": OrealLossConfig(mode="chunk"),
    "ce": CELossConfig(loss_reduction="square"),
    "rollout": GRPOLossConfig(
        rollout_is=RolloutImportanceSampling.tis(1.01, level="sequence"), loss_reduction="sample"
    ),
}


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def jagged_batch() -> dict[str, Any]:
    batch: dict[str, Any] = {name: jagged([s[name] for s in STEP.sequences]) for name in ("shifted_labels", *KEYS)}
    batch["rollout_logprobs"] = jagged([s["old_logprobs"] * 1.1 for s in STEP.sequences])
    return batch


def packed_batch() -> tuple[dict[str, Any], Tensor]:
    batch, hidden = packed(STEP.sequences, KEYS)
    return batch | {"rollout_logprobs": batch["old_logprobs"] * 1.1}, hidden


def forward(config: Any, batch: dict[str, Any], hidden: Tensor) -> tuple[Tensor, Tensor]:
    weight = STEP.weight.clone().requires_grad_()
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
    loss = context.forward(hidden, weight, STEP.bias).loss
    loss.backward()
    assert weight.grad is not None
    return loss.detach(), weight.grad


@pytest.mark.parametrize("name", CONFIGS)
def test_a_jagged_batch_equals_a_packed_one(name: str) -> None:
    config = CONFIGS[name]
    batch, hidden = packed_batch()
    rows = [s["hidden"].clone().requires_grad_() for s in STEP.sequences]
    leaf = hidden.clone().requires_grad_()
    for mine, theirs in zip(forward(config, jagged_batch(), jagged(rows)), forward(config, batch, leaf), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert leaf.grad is not None
    found = torch.cat([row.grad for row in rows if row.grad is not None])
    torch.testing.assert_close(found, leaf.grad[0], rtol=0, atol=0)


def test_log_probs_may_be_jagged_and_be_set_later() -> None:
    config = GRPOLossConfig(loss_reduction="sample")
    batch = jagged_batch()
    late = {name: batch.pop(name) for name in ("old_logprobs", "ref_logprobs")}
    context = config.build(batch)
    context.loss_kwargs.old_logprobs = late["old_logprobs"]
    config.loss_ctx_cls.build_batches([context])
    new = jagged([s["old_logprobs"] + 0.1 for s in STEP.sequences])
    whole, _ = packed_batch()
    (expected,) = config.loss_ctx_cls.build_batches([config.build(whole)])
    found = context.forward_log_probs(new).loss
    torch.testing.assert_close(found, expected.forward_log_probs(whole["old_logprobs"] + 0.1).loss)


def test_log_prob_config_takes_jagged_rows() -> None:
    batch, hidden = packed_batch()
    config = LogProbConfig(mode="chunk")
    expected = config.build({k: batch[k] for k in ("shifted_labels", "num_tokens")}).forward(hidden, STEP.weight).loss
    rows = jagged([s["hidden"] for s in STEP.sequences])
    found = config.build({"shifted_labels": jagged_batch()["shifted_labels"]}).forward(rows, STEP.weight).loss
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rows_that_do_not_fit_are_named() -> None:
    batch = jagged_batch()
    with pytest.raises(BatchError, match=r"old_logprobs has rows of lengths \[6, 4, 2\]"):
        CONFIGS["grpo"].build(batch | {"old_logprobs": jagged([STEP.sequences[i]["old_logprobs"] for i in (1, 0, 2)])})
    with pytest.raises(BatchError, match="shifted_labels is not"):
        CONFIGS["grpo"].build(batch | {"shifted_labels": packed_batch()[0]["shifted_labels"]})
    strided = torch.nested.nested_tensor([torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(BatchError, match=r"torch\.jagged"):
        CELossConfig().build({"shifted_labels": strided})
