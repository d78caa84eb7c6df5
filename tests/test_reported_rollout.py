"""Reported defects of the losses on a policy: steps calibrated again, log-probs that were not looked at."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloss import GRPOLossConfig, GRPOLossContext, OrealLossConfig, RolloutImportanceSampling
from rlloss.errors import BatchError, ConfigError
from steps import eye, labels, row, run_step, tok

MASKED = RolloutImportanceSampling.mis(0.5, 2.0)
"""Keeps ratios in [0.5, 2] and weighs by them."""


def batch_of(*log_ratios: float, **more: Any) -> tuple[dict[str, Any], Tensor]:
    """Tokens of log-prob -1 on policy, with A = -1 (loss 1 each), whose old/rollout log-ratios are given."""
    ones = [1.0] * len(log_ratios)
    old = -row(*ones)
    batch = {"shifted_labels": labels(*map(int, ones)), "old_logprobs": old, "advantages": -row(*ones)}
    return batch | {"rollout_logprobs": old - row(*log_ratios), **more}, tok(*[-1.0] * len(log_ratios))


def calibrated(cfg: GRPOLossConfig, batch: dict[str, Any]) -> GRPOLossContext:
    return GRPOLossContext.build_batches([cfg.build(batch)])[0]  # type: ignore[list-item]


def again(context: GRPOLossContext, hidden: Tensor) -> float:
    GRPOLossContext.build_batches([context])
    return float(context.forward(hidden, eye()).loss)


@pytest.mark.parametrize("mode", ["eager", "chunk"])
def test_the_off_policy_limit_of_oreal_looks_at_whole_sequences(mode: Any) -> None:
    """The sequence fell by 0.02 a token, its first token by 0.1: chunks of one token would drop that one alone."""
    batch, hidden = batch_of(0.0, 0.0)
    batch["rollout_logprobs"] = row(-0.9, -1.06)
    size = 1 if mode == "chunk" else None
    cfg = OrealLossConfig(mode=mode, chunk_size=size, off_policy_limit=0.05)
    assert run_step(cfg, [batch], [hidden]).loss == pytest.approx(1.0)
    assert cfg.level() == "sequence"


def _clone(context: GRPOLossContext) -> GRPOLossContext:
    kwargs = context.loss_kwargs
    context.loss_kwargs = kwargs.with_tensors({name: value.clone() for name, value in kwargs.tensors().items()})
    return context


@pytest.mark.parametrize(
    "copied", [_clone, lambda c: GRPOLossContext.cat([c]), lambda c: pickle.loads(pickle.dumps(c))]
)
def test_computed_weights_are_not_mistaken_for_given_ones(copied: Any) -> None:
    batch, hidden = batch_of(0.1, 3.0, -3.0, num_tokens=[3])
    context = copied(calibrated(GRPOLossConfig(rollout_is=MASKED), batch))
    assert again(context, hidden) == pytest.approx(math.exp(0.1))
    assert context.loss_kwargs.given("is_weights") is None


def test_weights_that_are_set_after_calibration_are_given() -> None:
    batch, hidden = batch_of(0.1, 3.0)
    context = calibrated(GRPOLossConfig(rollout_is=MASKED), batch)
    context.loss_kwargs.is_weights = row(2.0, 4.0)
    for _ in range(2):
        assert again(context, hidden) == pytest.approx(3.0)


def test_given_and_computed_weights_do_not_join() -> None:
    cfg = GRPOLossConfig(rollout_is=MASKED)
    given = {"rollout_is_weights": row(1.0, 1.0)}
    chunks = [calibrated(cfg, batch_of(0.1, 3.0, num_tokens=[2], **more)[0]) for more in ({}, given)]
    with pytest.raises(BatchError, match="computed by build_batches in the"):
        GRPOLossContext.cat(chunks)


def test_the_current_policy_must_be_given() -> None:
    cfg = GRPOLossConfig(rollout_is=RolloutImportanceSampling(policy="current", rollout_is_threshold=(0.5, 2.0)))
    batch, _ = batch_of(0.1, 3.0)
    without = {name: value for name, value in batch.items() if name != "old_logprobs"}
    for incomplete in (batch, without):
        with pytest.raises(BatchError, match="with selection_logprobs, which are missing"):
            calibrated(cfg, incomplete)
        with pytest.raises(BatchError, match="with selection_logprobs, which are missing"):
            cfg.build(incomplete).compute_rollout_is()


def test_what_stands_in_for_old_log_probs_is_not_stored() -> None:
    """New rollout log-probs are the new old ones; an infinite one leaves the step like an old one would."""
    cfg = GRPOLossConfig(
        rollout_is=RolloutImportanceSampling(policy="current"), policy_loss_cfg={"loss_type": "importance"}
    )
    batch, hidden = batch_of(0.0, 0.0)
    del batch["old_logprobs"]
    context = calibrated(cfg, batch)
    assert context.loss_kwargs.old_logprobs is None
    context.loss_kwargs.rollout_logprobs = row(-1.0 - math.log(1.5), -1.0)
    assert again(context, hidden) == pytest.approx((1.5 + 1.0) / 2)
    context.loss_kwargs.rollout_logprobs = row(-1.0 - math.log(1.5), -math.inf)
    assert again(context, hidden) == pytest.approx(1.5)


def test_other_rules_are_applied_by_the_next_build_batches() -> None:
    batch, hidden = batch_of(math.log(3.0))
    context = calibrated(GRPOLossConfig(rollout_is=RolloutImportanceSampling.tis(2.0)), batch)
    for high in (1.5, 2.5):
        context.loss_cfg.rollout_is = RolloutImportanceSampling.tis(high)
        assert again(context, hidden) == pytest.approx(high)
    context.loss_cfg.rollout_is = RolloutImportanceSampling()
    assert again(context, hidden) == pytest.approx(1.0)
    assert context.loss_kwargs.is_weights is None


@pytest.mark.parametrize("on_policy", [False, True])
def test_old_log_probs_are_checked_wherever_they_are_used(on_policy: bool) -> None:
    cfg = GRPOLossConfig(on_policy=on_policy, policy_loss_cfg={"loss_type": "importance"})
    batch, hidden = batch_of(0.0, 0.0)
    step = run_step(cfg, [batch | {"old_logprobs": row(-1.0, -math.inf)}], [hidden])
    assert (step.loss, step.extra["dropped_tokens"]) == (pytest.approx(1.0), 1.0)
    context = cfg.build(batch)
    context.loss_kwargs.old_logprobs = row(-1.0, -1.0, -1.0)
    with pytest.raises(BatchError, match="old_logprobs has shape"):
        GRPOLossContext.build_batches([context])


def test_old_log_probs_of_the_kl_factor_are_checked_on_policy() -> None:
    policy: Any = {"loss_type": "reinforce"}
    cfg = GRPOLossConfig(
        on_policy=True, policy_loss_cfg=policy, loss_reduction="token", use_kl_loss=True, kl_importance="token"
    )
    batch, hidden = batch_of(0.0, 0.0, ref_logprobs=row(-1.5, -1.5))
    batch["old_logprobs"] = torch.tensor([[-1.0, -math.inf]], dtype=torch.float64)
    assert run_step(cfg, [batch], [hidden]).extra["dropped_tokens"] == 1.0


@pytest.mark.parametrize("threshold", [0.0, "0_2", "1_2_3", "3_2", "-1_2", "low", True])
def test_a_threshold_of_verl_that_is_none_is_refused(threshold: Any) -> None:
    with pytest.raises(ConfigError, match="rollout_is_threshold"):
        RolloutImportanceSampling.verl(rollout_is="token", rollout_is_threshold=threshold)


def test_thresholds_of_verl_as_rules() -> None:
    def bounds(*given: Any) -> list[Any]:
        return [(rule.low, rule.high) for rule in RolloutImportanceSampling.verl(*given).compiled()]

    assert bounds("token", "2_2")[1] == (2.0, 2.0)
    assert bounds(None, 2.0, "token_k2,seq_max_k3", "0.5,0.1") == [(None, 0.5), (None, 0.1)]
    assert bounds(None, 2.0, ["token_k2", "seq_max_k3"], 0.5) == [(None, 0.5), (None, 0.5)]
    for one in ("4", "0.25"):
        assert bounds(None, 2.0, "seq_sum_k1", one) == [(-math.log(4.0), math.log(4.0))]
    with pytest.raises(ConfigError, match="2 options and rollout_rs_threshold 3"):
        bounds(None, 2.0, "token_k2,seq_max_k3", "1,2,3")
    with pytest.raises(ConfigError, match="one upper bound"):
        bounds(None, 2.0, "token_k2", "0.5_1")


@pytest.mark.parametrize(("log_ratio", "right"), [(math.log(0.5), 1.0), (-19.0, math.exp(-19.0))])
def test_the_mean_of_weights_divides_them_unless_it_is_nearly_zero(log_ratio: float, right: float) -> None:
    """One token below 1; a mean of 1e-8 or less would blow up noise, and is left as it is, as in verl."""
    rule = RolloutImportanceSampling.verl("token", 10.0, rollout_is_batch_normalize=True)
    batch, _ = batch_of(log_ratio)
    weights = calibrated(GRPOLossConfig(rollout_is=rule), batch).loss_kwargs.is_weights
    assert weights is not None
    assert float(weights[0, 0]) == pytest.approx(right)


def test_the_weight_of_a_token_that_does_not_count_is_one() -> None:
    batch, _ = batch_of(math.log(1.5), math.log(1.5))
    batch["shifted_labels"] = labels(1, 0)
    weights = calibrated(GRPOLossConfig(rollout_is=MASKED), batch).loss_kwargs.is_weights
    assert weights is not None
    assert weights.tolist() == [[pytest.approx(1.5), 1.0]]
