"""Public faults of kinds B, C and D: masked positions, empty batches, overflow, alignment. Names are the case ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import CELossConfig, GRPOLossConfig, RolloutImportanceSampling
from rlloss.errors import BatchError
from steps import HEADS, Step, assert_same, eager_and_chunk, every_mode, eye, labels, nll_step, row, run_step, tok

Head = dict[str, Any]
NAN, INF = math.nan, math.inf
PLAIN: dict[str, Any] = {"loss_type": "vanilla", "cliprange_low": 0.2, "cliprange_high": 0.2}


def grpo(head: Head, **fields: Any) -> GRPOLossConfig:
    return GRPOLossConfig(**{"policy_loss_cfg": PLAIN} | fields | head)


def batch_of(
    mask: tuple[int, ...], old: tuple[float, ...], advantages: tuple[float, ...], dtype: Any
) -> dict[str, Any]:
    return {
        "shifted_labels": labels(*mask),
        "old_logprobs": row(*old, dtype=dtype),
        "advantages": row(*advantages, dtype=dtype),
    }


def two_tokens(
    head: Head,
    old: tuple[float, ...],
    advantages: tuple[float, ...] = (1.0, 1.0),
    mask: tuple[int, ...] = (1, 0),
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Step:
    """B02's batch: TOK(-1), TOK(-1) with eps 0.2."""
    hidden = tok(*([-1.0] * len(mask))).to(dtype)
    return run_step(grpo(head, **fields), [batch_of(mask, old, advantages, dtype)], [hidden], eye().to(dtype))


def empty_like(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"shifted_labels": torch.full_like(batch["shifted_labels"], -100)}


def supervised(head: Head) -> tuple[Any, dict[str, Any]]:
    return CELossConfig(**head), {"shifted_labels": labels(1, 1)}


def reinforced(head: Head) -> tuple[Any, dict[str, Any]]:
    config = grpo(head, use_kl_loss=True, kl_loss_type="k3", kl_loss_coef=0.1)
    return config, batch_of((1, 1), (-1.1, -0.9), (1.0, -1.0), torch.float64) | {"ref_logprobs": row(-1.0, -1.2)}


@every_mode
@pytest.mark.parametrize("make", [supervised, reinforced])
@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_b01_an_empty_micro_batch_is_a_zero_with_a_graph(head: Head, make: Any, reduction: str) -> None:
    config, batch = make(head | {"loss_reduction": reduction})
    hidden = tok(-1.0, -2.0)
    alone = run_step(config, [batch], [hidden])
    both = run_step(config, [empty_like(batch), batch], [hidden, hidden])
    assert both.losses == [0.0, pytest.approx(alone.loss, abs=1e-12)]
    assert both.hidden_grads[0].eq(0).all()
    assert torch.equal(both.weight_grad, alone.weight_grad)
    assert torch.equal(both.hidden_grads[1], alone.hidden_grads[0])
    nothing = run_step(config, [empty_like(batch)], [hidden])
    assert nothing.loss == 0.0
    assert nothing.weight_grad.eq(0).all()
    assert nothing.hidden_grads[0].eq(0).all()
    assert nothing.extra["tokens"] == 0
    assert all(math.isfinite(value) for value in nothing.extra.values())


@every_mode
@pytest.mark.parametrize("old", [-201.0, -INF])
def test_b02_overflow_at_a_masked_position_has_no_gradient(head: Head, old: float) -> None:
    step = two_tokens(head, (-1.0, old))
    assert step.loss == pytest.approx(-1.0, abs=1e-6)
    assert step.rows[0] == pytest.approx([-0.6321206, 0.6321206], abs=1e-6)
    assert step.rows[1] == [0.0, 0.0]
    assert step.weight_grad.isfinite().all()


GARBAGE = {"nan": NAN, "inf": INF, "-inf": -INF}


@every_mode
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("key", ["old_logprobs", "ref_logprobs", "advantages", "rollout_is_weights", "hidden"])
def test_b03_garbage_at_a_masked_position_changes_no_bit(head: Head, garbage: float, reduction: str, key: str) -> None:
    config = grpo(head, use_kl_loss=True, kl_loss_type="k3", kl_loss_coef=0.1, loss_reduction=reduction)
    batch = batch_of((1, 0), (-1.1, -1.0), (1.0, 1.0), torch.float32)
    batch |= {"ref_logprobs": row(-1.2, -1.0, dtype=torch.float32)}
    batch |= {"rollout_is_weights": row(0.9, 1.0, dtype=torch.float32)}
    hidden = tok(-1.0, -1.0).float()
    clean = run_step(config, [batch | {"num_tokens": [2]}], [hidden], eye().float())
    soiled = dict(batch)
    if key == "hidden":
        hidden = hidden.clone()
        hidden[0, 1] = garbage
    else:
        soiled[key] = batch[key].clone()
        soiled[key][0, 1] = garbage
    step = run_step(config, [soiled | {"num_tokens": [2]}], [hidden], eye().float())
    assert step.losses == clean.losses
    assert torch.equal(step.weight_grad, clean.weight_grad)
    assert torch.equal(step.hidden_grads[0], clean.hidden_grads[0])
    assert step.extra == clean.extra


ALL_REDUCTIONS = ("token", "sample", "square", "sequence_sum", "constant", "prompt", "sum")


@every_mode
@pytest.mark.parametrize("reduction", ALL_REDUCTIONS)
@pytest.mark.parametrize("loss_type", ["vanilla", "gspo"])
def test_b03_garbage_changes_no_bit_under_any_reduction(head: Head, reduction: str, loss_type: str) -> None:
    """Everything at the masked position is NaN at once, the engine's log-probs too."""
    fields: dict[str, Any] = {"loss_length": 4.0} if reduction == "constant" else {}
    config = grpo(
        head,
        policy_loss_cfg={"loss_type": loss_type},
        use_kl_loss=True,
        loss_reduction=reduction,
        rollout_is=RolloutImportanceSampling.mis(0.1, 9.0, level="sequence"),
        **fields,
    )
    batch = batch_of((1, 0, 1), (-1.1, -1.0, -0.8), (1.0, 1.0, -2.0), torch.float32)
    batch |= dict.fromkeys(("ref_logprobs", "rollout_logprobs"), batch["old_logprobs"] - 0.1)
    batch |= {"group_ids": torch.tensor([0]), "num_prompts": 1, "num_tokens": [3]}
    hidden = tok(-1.0, -1.0, -0.9).float()
    clean = run_step(config, [batch], [hidden], eye().float())
    soiled = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages"):
        soiled[name][0, 1] = NAN
    step = run_step(config, [soiled], [torch.where(labels(1, 0, 1)[..., None] == 0, hidden, NAN)], eye().float())
    assert step.losses == clean.losses
    assert torch.equal(step.weight_grad, clean.weight_grad)
    assert torch.equal(step.hidden_grads[0], clean.hidden_grads[0])
    assert step.extra == clean.extra
    assert step.loss != 0.0


@every_mode
def test_b04_nan_at_a_valid_position_stays_visible(head: Head) -> None:
    step = two_tokens(head, (-1.0, NAN), mask=(1, 1))
    assert math.isnan(step.loss)
    assert step.hidden_grads[0][0, 1].isnan().any()
    with pytest.raises(BatchError, match="old_logprobs"):
        two_tokens(head, (-1.0, NAN), mask=(1, 1), check_finite=True)


@every_mode
def test_b06_minus_infinity_at_a_valid_position_drops_the_token(head: Head) -> None:
    step, first = two_tokens(head, (-1.0, -INF), mask=(1, 1)), two_tokens(head, (-1.0, -1.0), mask=(1, 0))
    assert step.loss == pytest.approx(-1.0, abs=1e-6)
    assert step.rows == first.rows
    assert step.extra["dropped_tokens"] == 1
    assert step.extra["tokens"] == 1


@eager_and_chunk
def test_b07_a_word_of_probability_zero_has_a_finite_entropy(head: Head) -> None:
    config = grpo(head, entropy_coef=1.0)
    bias = torch.tensor([1.0, -INF, 0.0], dtype=torch.float64)
    hidden, weight = torch.zeros(1, 1, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    batch = batch_of((1,), (-0.3132617,), (0.0,), torch.float64)
    step = run_step(config, [batch], [hidden], weight, bias)
    assert step.loss == pytest.approx(-0.5822031, abs=1e-6)
    assert step.bias_grad is not None
    assert step.bias_grad.tolist() == pytest.approx([0.1966119, 0.0, -0.1966119], abs=1e-6)


@every_mode
def test_b09_metrics_ignore_a_masked_row(head: Head) -> None:
    config = grpo(head, use_kl_loss=True, kl_loss_type="k3")
    one = batch_of((1, 1), (-1.1, -2.0), (1.0, -1.0), torch.float64) | {"ref_logprobs": row(-1.0, -0.8)}
    two = {key: torch.cat([value, value]) for key, value in one.items()}
    two["shifted_labels"][1] = -100
    hidden = tok(-1.0, -0.7)
    clean = run_step(config, [one], [hidden])
    step = run_step(config, [two], [torch.cat([hidden, hidden])])
    assert step.extra == clean.extra
    assert all(math.isfinite(value) for value in step.extra.values())


@every_mode
@pytest.mark.parametrize(
    ("advantage", "dual", "loss"), [(1.0, 3.0, -1.2), (-1.0, 3.0, 3.0), (-1.0, None, 4.85165e8), (0.0, 3.0, 0.0)]
)
def test_c01_a_stale_token_stays_finite(head: Head, advantage: float, dual: float | None, loss: float) -> None:
    rule = PLAIN | {"clip_ratio_c": dual}
    step = two_tokens(head, (-101.0,), (advantage,), (1,), policy_loss_cfg=rule)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert step.weight_grad.isfinite().all()
    assert step.hidden_grads[0].eq(0).all()


@every_mode
@pytest.mark.parametrize("gap", [-500.0, -88.0, -19.0, 19.0, 88.0, 500.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_c_extreme_ratios_are_finite_in_value_and_gradient(head: Head, gap: float, advantage: float) -> None:
    fields = {"use_kl_loss": True, "kl_loss_type": "k3", "policy_loss_cfg": PLAIN | {"clip_ratio_c": None}}
    batch = batch_of((1, 1), (-1.0 - gap, -1.0), (advantage, 1.0), torch.float32)
    batch |= {"ref_logprobs": row(-1.0 + gap, -1.0, dtype=torch.float32)}
    step = run_step(grpo(head, **fields), [batch], [tok(-1.0, -1.0).float()], eye().float())
    assert math.isfinite(step.loss)
    assert step.weight_grad.isfinite().all()
    assert step.hidden_grads[0].isfinite().all()


@every_mode
def test_d01_labels_are_aligned_with_predictions(head: Head) -> None:
    """ids [p1, p2, r1, r2, eos]: the predictions of positions 1 to 4 have NLL 10, 1, 2, 3; r1, r2, eos are trained."""
    batch = {"shifted_labels": labels(0, 1, 1, 1)}
    assert run_step(CELossConfig(**head), [batch], [tok(-10.0, -1.0, -2.0, -3.0)]).loss == pytest.approx(2.0, abs=1e-6)


@every_mode
def test_d04_only_the_ignored_label_decides(head: Head) -> None:
    hidden = torch.randn(1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = run_step(CELossConfig(**head), [{"shifted_labels": torch.tensor([[5, 0, -100]])}], [hidden], weight)
    assert step.extra["tokens"] == 2
    assert step.hidden_grads[0][0, 1].ne(0).any()
    assert step.hidden_grads[0][0, 2].eq(0).all()


@every_mode
@pytest.mark.parametrize("ignored", [-1, 0, 7])
def test_d05_any_ignored_label_works(head: Head, ignored: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, 3, dtype=torch.float64, generator=generator)
    weight = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    targets = torch.tensor([[1, 4, 2, 3]])
    usual, other = targets.clone(), targets.clone()
    usual[0, 1], other[0, 1] = -100, ignored
    expected = run_step(CELossConfig(**head), [{"shifted_labels": usual}], [hidden], weight)
    step = run_step(CELossConfig(ignore_idx=ignored, **head), [{"shifted_labels": other}], [hidden], weight)
    assert_same(step, expected, tolerance=0.0)
    with pytest.raises(BatchError, match="-100"):
        run_step(CELossConfig(ignore_idx=ignored, **head), [{"shifted_labels": usual}], [hidden], weight)


def test_nll_step_types_ignored_tokens() -> None:
    assert nll_step(CELossConfig(**HEADS["eager"]), [[2.0, None]]).loss == pytest.approx(2.0)
