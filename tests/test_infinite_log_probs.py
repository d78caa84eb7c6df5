"""An infinite log-prob at a token that counts: read by the loss, the token leaves the step; else nothing notices it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from batches import POLICY_LOSSES
from rlloss import (
    CELossConfig,
    DistillLossConfig,
    GRPOLossConfig,
    MixedLossConfig,
    OrealLossConfig,
    RolloutImportanceSampling,
    ValueLossConfig,
)
from rlloss.compat import xtuner
from steps import Step, labels, row, run_step, tok

LOG_PROBS = (-1.0, -1.2, -0.7, -0.9)
BATCH: dict[str, Any] = {
    "shifted_labels": labels(1, 1, 1, 1),
    "num_tokens": [2, 2],
    "advantages": row(1.0, 1.0, -1.0, -1.0),
    "old_logprobs": row(-1.1, -1.0, -0.9, -1.3),
    "ref_logprobs": row(-1.2, -1.1, -1.0, -0.8),
    "rollout_logprobs": row(-1.15, -1.05, -0.95, -1.25),
    "selection_logprobs": row(-1.1, -1.0, -0.9, -1.3),
    "selection_entropy": row(0.1, 0.2, 0.3, 0.4),
    "teacher_logprobs": row(-0.8, -1.4, -0.9, -1.0),
    "returns": row(0.5, 0.1, -0.2, 0.3),
    "values": row(0.4, 0.3, -0.1, 0.2),
    "part_ids": torch.tensor([0, 1]),
}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
CONFIGS: dict[str, Any] = {
    **{name: GRPOLossConfig(policy_loss_cfg=cfg, loss_reduction="sample", **KL) for name, cfg in POLICY_LOSSES.items()},
    "reinforce without KL": GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}),
    "reinforce, k1": GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, kl_loss_type="abs", **KL),
    "reinforce, off-policy limit": GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, off_policy_limit=0.1),
    "reinforce, top entropy": GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, top_entropy_quantile=0.5),
    "reinforce, corrected": GRPOLossConfig(
        policy_loss_cfg={"loss_type": "reinforce"}, rollout_is=RolloutImportanceSampling.mis(0.5, 2.0)
    ),
    "oreal": OrealLossConfig(policy_loss_cfg={"loss_type": "reinforce"}, **KL),
    "mixed": MixedLossConfig(
        parts={"rl": GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"}), "sft": CELossConfig()}
    ),
    "distill": DistillLossConfig(kind="k3"),
}
GIVEN = [key for key in BATCH if "logprobs" in key]


def step(config: Any, **changed: Any) -> Step:
    return run_step(config, [{**BATCH, **changed}], [tok(*LOG_PROBS)])


@pytest.mark.parametrize("infinite", [-math.inf, math.inf])
@pytest.mark.parametrize("key", GIVEN)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_a_step_is_finite(name: str, key: str, infinite: float) -> None:
    values = BATCH[key].clone()
    values[0, 1] = infinite
    found = step(CONFIGS[name], **{key: values})
    assert math.isfinite(found.loss)
    assert all(gradient.isfinite().all() for gradient in (*found.hidden_grads, found.weight_grad))
    assert len(found.extra) > 3
    assert {metric for metric, value in found.extra.items() if not math.isfinite(value)} == set()
    assert found.extra["tokens"] + found.extra["dropped_tokens"] == 4


def test_a_token_that_has_no_ratio_is_missing_from_the_metrics_of_the_ratio_alone() -> None:
    """The loss is that of four tokens; the metrics are those of the other three, from the formulas."""
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"})
    whole, found = step(config), step(config, old_logprobs=row(-1.1, -math.inf, -0.9, -1.3))
    assert found.loss == whole.loss == pytest.approx(-(-1.0 - 1.2 + 0.7 + 0.9) / 4)
    assert found.extra["tokens"] == 4
    assert (found.extra["ratio_missing"], whole.extra["ratio_missing"]) == (1.0, 0.0)
    d = [-1.0 + 1.1, -0.7 + 0.9, -0.9 + 1.3]
    ratios = [math.exp(x) for x in d]
    expected = {
        "ratio_mean": sum(ratios) / 3,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ess": sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)),
        "approx_kl_k1": -sum(d) / 3,
        "approx_kl_k2": sum(x * x for x in d) / 6,
        "approx_kl_k3": sum(r - 1 - x for r, x in zip(ratios, d, strict=True)) / 3,
    }
    assert {name: found.extra[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_a_nan_stays_visible_in_the_metrics_of_the_ratio() -> None:
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"})
    found = step(config, old_logprobs=row(-1.1, math.nan, -0.9, -1.3))
    assert math.isfinite(found.loss)
    assert all(math.isnan(found.extra[name]) for name in ("ratio_mean", "ratio_max", "approx_kl_k1", "ess"))


def test_numbers_under_xtuners_names_leave_out_what_has_no_ratio() -> None:
    config = xtuner.GRPOLossConfig(policy_loss_cfg={"loss_type": "reinforce"})
    context = config.build({**BATCH, "old_logprobs": row(-1.1, -math.inf, -0.9, -1.3)})
    (context,) = type(context).build_batches([context])
    extra = context.forward(tok(*LOG_PROBS), torch.eye(2).double()).extra
    found = xtuner.finalize_train_policy_metrics(extra)
    d = [-1.0 + 1.1, -0.7 + 0.9, -0.9 + 1.3]
    assert float(found["reduced_train_policy_kl1"]) == pytest.approx(-sum(d) / 3)
    deviation = sum(abs(math.exp(x) - 1) for x in d) / 3
    assert float(found["reduced_train_policy_ratio_abs_dev_mean"]) == pytest.approx(deviation)


def test_a_critic_reads_no_log_probs() -> None:
    context = ValueLossConfig().build({**BATCH, "old_logprobs": row(*[-math.inf] * 4)})
    (context,) = type(context).build_batches([context])
    assert math.isfinite(float(context.forward(tok(*LOG_PROBS), torch.ones(2).double()).loss))
