"""OREAL: equal to its formula, indifferent to the split, and defined when every token has one sign."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import steps
from rlloss import OrealLossConfig, Totals
from rlloss.errors import BatchError
from steps import labels, row, tok

FIELDS: dict[str, Any] = {
    "positive_loss_factor": 1.2,
    "pos_sft_loss_weight": 0.5,
    "pos_policy_loss_weight": 0.7,
    "negative_loss_factor": 0.9,
}


def run(config: OrealLossConfig, parts: list[list[tuple[float, float, float]]]) -> steps.Step:
    """One-token sequences given by (log-prob, old log-prob, advantage)."""
    batches = [
        {
            "shifted_labels": labels(*[1] * len(part)),
            "num_tokens": [1] * len(part),
            "old_logprobs": row(*(old for _, old, _ in part)),
            "advantages": row(*(advantage for _, _, advantage in part)),
        }
        for part in parts
    ]
    return steps.run_step(config, batches, [tok(*(lp for lp, _, _ in part)) for part in parts])


def oracle(tokens: list[tuple[float, float, float]], high: float = 0.2) -> float:
    """The formula, token by token; ratios stay inside of the dual clip."""
    sums = {True: 0.0, False: 0.0}
    counts = {True: 0, False: 0}
    for log_prob, old, advantage in tokens:
        ratio = math.exp(log_prob - old)
        clipped = min(max(ratio, 1 - 0.2), 1 + high)
        policy = max(-advantage * ratio, -advantage * clipped)
        positive = advantage > 0
        sums[positive] += 1.2 * (0.7 * policy - 0.5 * log_prob) if positive else 0.9 * policy
        counts[positive] += 1
    return sum(sums[sign] / counts[sign] for sign in sums if counts[sign])


TOKENS = [(-1.0, -1.1, 0.7), (-0.5, -0.9, -0.3), (-2.0, -1.8, 1.1), (-0.3, -0.31, 0.0)]


@pytest.mark.parametrize("count", [1, 2, 4])
@steps.every_mode
def test_the_formula(count: int, head: dict[str, Any]) -> None:
    step = run(OrealLossConfig(**FIELDS, **head), [TOKENS[i::count] for i in range(count)])
    assert step.loss == pytest.approx(oracle(TOKENS), abs=1e-6)
    parts = [step.extra[f"{name}_loss"] for name in ("positive_policy", "negative_policy", "sft")]
    assert math.fsum(parts) == pytest.approx(step.loss, abs=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_tokens_of_one_sign_only(sign: float) -> None:
    tokens = [(lp, old, sign * (abs(advantage) + 0.1)) for lp, old, advantage in TOKENS]
    step = run(OrealLossConfig(**FIELDS), [tokens])
    assert step.loss == pytest.approx(oracle(tokens), abs=1e-12)
    assert all(math.isfinite(x) for line in step.rows for x in line)


def test_a_policy_loss_that_weighs_for_itself_is_counted_once() -> None:
    import rlloss

    @rlloss.register_policy_loss("oreal_scalar")
    def scalar(log_prob: torch.Tensor, advantages: torch.Tensor, loss_weights: torch.Tensor) -> torch.Tensor:
        return -(log_prob * advantages * loss_weights).sum()

    try:
        found = run(OrealLossConfig(policy_loss_cfg={"loss_type": "oreal_scalar"}), [TOKENS])
    finally:
        rlloss.unregister_policy_loss("oreal_scalar")
    positive = [(lp, a) for lp, _, a in TOKENS if a > 0]
    negative = [(lp, a) for lp, _, a in TOKENS if a <= 0]
    expected = -sum(lp * a + lp for lp, a in positive) / 2 - sum(lp * a for lp, a in negative) / 2
    assert found.loss == pytest.approx(expected, abs=1e-12)


def test_the_two_policy_terms_share_xtuners_weight_field() -> None:
    config = OrealLossConfig(**FIELDS)
    batch = {"shifted_labels": labels(1, 1), "advantages": row(1.0, -1.0), "old_logprobs": row(-1.0, -1.0)}
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
    assert context.loss_kwargs.policy_loss_weight[0].tolist() == pytest.approx([1.2 * 0.7, 0.9])
    assert context.loss_kwargs.sft_loss_weight[0].tolist() == pytest.approx([1.2 * 0.5, 0.0])


@pytest.mark.parametrize(
    ("fields", "totals"),
    [({}, Totals(tokens=4)), ({"loss_reduction": "sample"}, Totals(sequences=4))],
    ids=["tokens", "sequences"],
)
def test_a_total_of_all_tokens_is_no_count_of_the_positive_ones(fields: dict[str, Any], totals: Totals) -> None:
    config = OrealLossConfig(**FIELDS, **fields)
    batch = {"shifted_labels": labels(1, 1), "advantages": row(1.0, -1.0), "old_logprobs": row(-1.0, -1.0)}
    with pytest.raises(BatchError, match="'positive_policy' is about some of its tokens only"):
        config.loss_ctx_cls.build_batches([config.build(batch)], totals=totals)
    other = Totals(sequences=7) if totals.tokens else Totals(tokens=7)
    config.loss_ctx_cls.build_batches([config.build(batch)], totals=other)


def test_all_tokens_are_reported_not_the_positive_ones() -> None:
    config = OrealLossConfig(**FIELDS)
    batch = {"shifted_labels": labels(1, 1, 0, 1), "advantages": row(1.0, -1.0, 1.0, -1.0)}
    batch["old_logprobs"] = row(-1.0, -1.0, -1.0, -1.0)
    contexts = config.loss_ctx_cls.build_batches([config.build(batch), config.build(batch)])
    assert [float(context.loss_kwargs.global_grad_tokens) for context in contexts] == [6.0, 6.0]


TOKEN = st.tuples(st.floats(-4.0, -0.01), st.floats(-4.0, -0.01), st.floats(-2.0, 2.0))


@settings(max_examples=25, deadline=None)
@given(st.lists(TOKEN, min_size=2, max_size=6), st.data())
def test_no_split_changes_it(tokens: list[tuple[float, float, float]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(tokens) - 1))
    config = OrealLossConfig(**FIELDS)
    steps.assert_same(run(config, [tokens[:cut], tokens[cut:]]), run(config, [tokens]), 1e-9)
