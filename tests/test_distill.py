"""Distillation: forward KL on a teacher's words against plain loops, estimators, and the reverse-KL advantage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import steps
from rlloss import DistillLossConfig, GRPOLossConfig
from rlloss.errors import BatchError, ConfigError
from rlloss.functional.distill import forward_kl_topk, reverse_kl_advantages
from steps import labels, row, tok

HIDDEN = [[0.4, -1.0, 0.3], [1.2, 0.1, -0.7], [0.0, 0.5, 0.2]]
IDS = [[2, 0], [1, 2], [0, 2]]
TEACHER = [[-0.5, -1.2], [-0.2, -3.0], [-1.0, -1.1]]


def oracle(clamp: bool = True) -> tuple[list[float], list[list[float]]]:
    """Distance of each token, and its gradient in the logits: `m p_j - sum_k [j = k] q_k`, 0 where it counts as 0."""
    distances, grads = [], []
    for logits, ids, teacher in zip(HIDDEN, IDS, TEACHER, strict=True):
        log_sum = math.log(math.fsum(math.exp(z) for z in logits))
        mass = [math.exp(q) for q in teacher]
        distance = math.fsum(m * (q - (logits[k] - log_sum)) for m, q, k in zip(mass, teacher, ids, strict=True))
        alive = distance > 0 or not clamp
        grad = [
            math.fsum(mass) * math.exp(z - log_sum) - math.fsum(m for m, k in zip(mass, ids, strict=True) if k == j)
            for j, z in enumerate(logits)
        ]
        distances.append(distance if alive else 0.0)
        grads.append(grad if alive else [0.0] * 3)
    return distances, grads


def batch() -> dict[str, Any]:
    return {
        "shifted_labels": labels(1, 1, 1),
        "num_tokens": [1, 2],
        "teacher_topk_ids": torch.tensor([IDS]),
        "teacher_topk_logprobs": torch.tensor([TEACHER], dtype=torch.float64),
    }


@steps.eager_and_chunk
@pytest.mark.parametrize("reduction", ["token", "sequence_sum"])
def test_forward_kl_is_that_of_plain_loops(head: dict[str, Any], reduction: Any) -> None:
    config = DistillLossConfig(loss_reduction=reduction, **head)
    hidden = torch.tensor([HIDDEN], dtype=torch.float64)
    step = steps.run_step(config, [batch()], [hidden], torch.eye(3, dtype=torch.float64))
    count = 3 if reduction == "token" else 2
    distances, grads = oracle()
    assert step.loss == pytest.approx(math.fsum(distances) / count, abs=1e-12)
    for found, expected in zip(step.rows, grads, strict=True):
        assert found == pytest.approx([g / count for g in expected], abs=1e-12)


def test_negative_distances_count_as_zero_unless_told_otherwise() -> None:
    little = torch.tensor([[-4.0]], dtype=torch.float64)
    sure = torch.tensor([[-0.01]], dtype=torch.float64)
    assert float(forward_kl_topk(sure, little)) < 0
    data = {"shifted_labels": labels(1), "num_tokens": [1], "teacher_topk_ids": torch.tensor([[[0]]])}
    data["teacher_topk_logprobs"] = little[None]
    kept = steps.run_step(DistillLossConfig(clamp_negative=False), [data], [tok(-0.01)])
    assert kept.loss < 0
    clamped = steps.run_step(DistillLossConfig(), [data], [tok(-0.01)])
    assert clamped.loss == 0.0
    assert not any(clamped.rows[0])
    assert clamped.extra["distance"] == 0.0


def test_a_word_that_the_teacher_excludes_adds_nothing() -> None:
    student = torch.tensor([[-0.5, -2.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-0.1, -math.inf]], dtype=torch.float64, requires_grad=True)
    distance = forward_kl_topk(student, teacher)
    distance.sum().backward()
    assert teacher.grad is None
    assert float(distance.detach()) == pytest.approx(math.exp(-0.1) * 0.4)
    assert student.grad is not None
    assert student.grad.tolist() == [[pytest.approx(-math.exp(-0.1)), 0.0]]


@pytest.mark.parametrize("kind", ["k2", "k3", "abs", "k1+"])
@steps.every_mode
def test_an_estimator_equals_a_kl_loss_to_the_teacher(kind: str, head: dict[str, Any]) -> None:
    data = {"shifted_labels": labels(1, 1), "num_tokens": [2], "teacher_logprobs": row(-0.4, -1.5)}
    found = steps.run_step(DistillLossConfig(kind=kind, **head), [data], [tok(-1.0, -1.2)])
    config = GRPOLossConfig(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, **head)
    data |= {"ref_logprobs": row(-0.4, -1.5), "advantages": row(0.0, 0.0), "old_logprobs": row(-1.0, -1.2)}
    expected = steps.run_step(config, [data], [tok(-1.0, -1.2)])
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    for mine, theirs in zip(found.rows, expected.rows, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def test_the_cap_bounds_value_and_gradient() -> None:
    data = {"shifted_labels": labels(1), "num_tokens": [1], "teacher_logprobs": row(-0.1)}
    step = steps.run_step(DistillLossConfig(kind="k2", distance_cap=0.01), [data], [tok(-1.0)])
    assert step.loss == pytest.approx(0.01)
    assert not any(step.rows[0])


def test_reverse_kl_advantages() -> None:
    old = torch.tensor([-1.0, -3.0, -0.5], requires_grad=True)
    found = reverse_kl_advantages(old, torch.tensor([-2.0, -0.5, -0.5]), coef=2.0, max_abs=1.5)
    assert found.tolist() == [-2.0, 3.0, 0.0]
    assert not found.requires_grad
    assert reverse_kl_advantages(old, torch.tensor([-2.0, -0.5, -0.5])).tolist() == [-1.0, 2.5, 0.0]


def test_missing_and_unfit_numbers_are_named() -> None:
    config = DistillLossConfig()
    build = config.loss_ctx_cls.build_batches
    with pytest.raises(BatchError, match="needs teacher_topk_ids, teacher_topk_logprobs"):
        build([config.build({"shifted_labels": labels(1)})])
    with pytest.raises(BatchError, match="expected an integer type"):
        config.build(batch() | {"teacher_topk_ids": torch.zeros(1, 3, 2)})
    with pytest.raises(BatchError, match="differ"):
        build([config.build(batch() | {"teacher_topk_logprobs": torch.zeros(1, 3, 4)})])
    with pytest.raises(BatchError, match=r"expected \(1, 3, 'K'\)"):
        config.build(batch() | {"teacher_topk_logprobs": torch.zeros(1, 3)})
    with pytest.raises(BatchError, match="use forward"):
        build([config.build(batch())])[0].forward_log_probs(row(-1.0, -1.0, -1.0))
    with pytest.raises(ConfigError, match="does not depend on the teacher"):
        DistillLossConfig(kind="k1")
    with pytest.raises(ValueError, match="Did you mean"):
        DistillLossConfig(kind="low_var_k")


def test_a_nan_keeps_its_gradient_under_a_lower_bound() -> None:
    """torch.clamp gives a NaN the gradient 0, which would hide it from whoever looks at gradients only."""
    log_prob = torch.tensor([[torch.nan, -1.0, -9.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64)
    loss = forward_kl_topk(log_prob, teacher, log_prob_min=-3.0).sum()
    loss.backward()
    assert loss.isnan()
    assert log_prob.grad is not None
    assert log_prob.grad[0].tolist() == pytest.approx([-math.exp(-1.0), -math.exp(-1.0), 0.0])
