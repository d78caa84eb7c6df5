"""Public faults of kind A and K: normalisation over micro-batches and ranks, and metrics. Names are the case ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlloss import CELossConfig, GRPOLossConfig, LogProbConfig, RolloutImportanceSampling, Totals
from steps import HEADS, assert_same, every_mode, eye, labels, nll_step, row, run_step, tok

Head = dict[str, Any]
VANILLA = {"loss_type": "vanilla", "cliprange_low": 0.2, "cliprange_high": 0.2}


def grpo(head: Head, **fields: Any) -> GRPOLossConfig:
    return GRPOLossConfig(**{"policy_loss_cfg": VANILLA} | fields | head)


def policy_batch(
    old: list[float], advantages: list[float], mask: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    counted = mask or [1] * len(old)
    return {
        "shifted_labels": labels(*counted),
        "num_tokens": [1] * len(old),
        "old_logprobs": row(*old),
        "advantages": row(*advantages),
    } | more


@every_mode
def test_a01_split_does_not_change_the_token_mean(head: Head) -> None:
    step = nll_step(CELossConfig(**head), [[2.0], [1.0, 1.0, 1.0]])
    assert step.loss == pytest.approx(1.25, abs=1e-6)
    assert step.rows[0] == pytest.approx([-0.2161662, 0.2161662], abs=1e-6)
    for parts in ([[2.0, 1.0, 1.0, 1.0]], [[2.0], [1.0], [1.0], [1.0]], [[2.0, 1.0], [1.0, 1.0]]):
        assert_same(nll_step(CELossConfig(**head), parts), step)


@every_mode
def test_a02_ranks_with_few_tokens_do_not_weigh_more(head: Head) -> None:
    config, totals = CELossConfig(reduce_loss=False, **head), Totals(tokens=6, sequences=2, world=2)
    ranks = [nll_step(config, [part], totals=totals).loss for part in ([1.0] * 5, [4.0])]
    assert ranks == pytest.approx([5 * 2 / 6, 4 * 2 / 6], abs=1e-6)
    assert sum(ranks) / 2 == pytest.approx(1.5, abs=1e-6)


@every_mode
def test_a04_shards_of_one_sequence_average_to_the_mean(head: Head) -> None:
    config, totals = CELossConfig(reduce_loss=False, **head), Totals(tokens=4, sequences=1, world=2)
    ranks = [nll_step(config, [[1.0, 1.0]], totals=totals).loss for _ in range(2)]
    assert sum(ranks) / 2 == pytest.approx(1.0, abs=1e-6)


@every_mode
def test_a04_as_it_was_reported(head: Head) -> None:
    """8 ranks of one sequence, 100 tokens each; 0.125 where the sum over ranks is divided by 8 once more."""
    config, totals = CELossConfig(reduce_loss=False, **head), Totals(tokens=800, sequences=1, world=8)
    assert nll_step(config, [[1.0] * 100], totals=totals).loss == pytest.approx(1.0, abs=1e-6)


@every_mode
@pytest.mark.parametrize("reduction", ["token", "sample", "square", "prompt", "sequence_sum", "constant"])
def test_a05_a_masked_sample_is_not_counted(head: Head, reduction: str) -> None:
    """A mean stays 1.0, a sum over the sequence 4.0 (and that over L = 4 is 1.0), wherever the masked sample lies."""
    fields: dict[str, Any] = {"loss_length": 4.0} if reduction == "constant" else {}
    config = grpo(head, policy_loss_cfg={"loss_type": "reinforce"}, loss_reduction=reduction, **fields)
    counted = {"shifted_labels": labels(1, 1, 1, 1), "advantages": torch.ones(1), "group_ids": torch.tensor([1])}
    masked = counted | {"shifted_labels": labels(0, 0, 0, 0), "group_ids": torch.tensor([0])}
    both = {name: torch.cat([counted[name], masked[name]]) for name in counted}
    hidden = tok(-1.0, -1.0, -1.0, -1.0)
    expected = 4.0 if reduction == "sequence_sum" else 1.0
    for batches, states in (([both], [torch.cat([hidden, hidden])]), ([masked, counted], [hidden, hidden])):
        whole = {"num_prompts": 2} if len(batches) == 1 else {"num_prompts": 2, "num_tokens": [4]}
        step = run_step(config, [batch | whole for batch in batches], states)
        assert step.loss == pytest.approx(expected, abs=1e-6)


@every_mode
def test_a08_calibration_is_for_one_optimiser_step(head: Head) -> None:
    contexts = [CELossConfig(**head).build({"shifted_labels": labels(1)}) for _ in range(4)]
    for part in (contexts[:2], contexts[2:]):
        step = type(part[0]).build_batches(part)
        assert sum(float(c.forward(tok(-1.0), eye()).loss) for c in step) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]], ids=str)
@pytest.mark.parametrize("weights", [None, [0.5, 1.5, 1.0, 0.25]], ids=["plain", "rollout"])
def test_a09_modes_do_not_drift_apart(parts: list[list[int]], weights: list[float] | None) -> None:
    log_probs, old, advantages = [-2.0, -1.0, -1.0, -1.0], [-2.1, -1.3, -0.95, -1.0], [1.0, 0.5, -1.0, 2.0]

    def step(head: Head, split: list[list[int]]) -> Any:
        batches = [policy_batch([old[t] for t in p], [advantages[t] for t in p]) for p in split]
        if weights:
            for batch, p in zip(batches, split, strict=True):
                batch["rollout_is_weights"] = row(*(weights[t] for t in p))
        return run_step(grpo(head), batches, [tok(*(log_probs[t] for t in p)) for p in split])

    whole = step(HEADS["eager"], [[0, 1, 2, 3]])
    for head in HEADS.values():
        assert_same(step(head, parts), whole)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a10_chunks_are_not_added_up_twice(size: int) -> None:
    head = {"mode": "chunk", "chunk_size": size}
    assert nll_step(CELossConfig(**head), [[2.0, 1.0, 1.0, 1.0]]).loss == pytest.approx(1.25, abs=1e-6)
    context = LogProbConfig(**head).build({"shifted_labels": labels(1, 1, 1, 1)})
    log_probs, _ = context.forward(tok(-2.0, -1.0, -1.0, -1.0), eye())
    assert log_probs.shape == (1, 4)
    assert log_probs[0].tolist() == pytest.approx([-2.0, -1.0, -1.0, -1.0], abs=1e-6)


@every_mode
def test_a11_extra_terms_are_normalised_over_the_step(head: Head) -> None:
    config = grpo(head, use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k1")
    batch = policy_batch([-1.0], [0.0], ref_logprobs=row(-1.1))
    assert run_step(config, [batch, batch], [tok(-1.0)] * 2).loss == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("head", [h for h in HEADS.values() if h["mode"] != "liger"], ids=[*HEADS][:-1])
def test_a11_entropy_is_normalised_over_the_step(head: Head) -> None:
    config = grpo(head, entropy_coef=0.1)
    hidden = torch.zeros(1, 1, 2, dtype=torch.float64)
    batch = policy_batch([-0.6931471805599453], [0.0])
    assert run_step(config, [batch, batch], [hidden] * 2).loss == pytest.approx(-0.0693147, abs=1e-6)


@every_mode
@pytest.mark.parametrize(("reduction", "expected"), [("token", 1.25), ("sample", 1.5)])
def test_a12_the_reduction_takes_effect(head: Head, reduction: str, expected: float) -> None:
    config = CELossConfig(loss_reduction=reduction, **head)
    packed = {"shifted_labels": labels(1, 1, 1, 1), "num_tokens": torch.tensor([1, 3])}
    assert run_step(config, [packed], [tok(-2.0, -1.0, -1.0, -1.0)]).loss == pytest.approx(expected, abs=1e-6)
    padded = {"shifted_labels": torch.cat([labels(1, 0, 0), labels(1, 1, 1)])}
    hidden = torch.cat([tok(-2.0, -5.0, -5.0), tok(-1.0, -1.0, -1.0)])
    assert run_step(config, [padded], [hidden]).loss == pytest.approx(expected, abs=1e-6)
    apart = [{"shifted_labels": labels(1), "num_tokens": [1]}, {"shifted_labels": labels(1, 1, 1), "num_tokens": [3]}]
    assert run_step(config, apart, [tok(-2.0), tok(-1.0, -1.0, -1.0)]).loss == pytest.approx(expected, abs=1e-6)


A12 = {"token": 1.25, "sample": 1.5, "sequence_sum": 2.5, "constant": 0.625, "sum": 5.0}


@every_mode
@pytest.mark.parametrize("reduction", A12)
@pytest.mark.parametrize("apart", [False, True])
def test_a12_every_reduction_of_a_policy_loss(head: Head, reduction: str, apart: bool) -> None:
    """The constant reduction divides by L = 4 and by the number of sequences (without them it would be 1.25)."""
    fields: dict[str, Any] = {"loss_length": 4.0} if reduction == "constant" else {}
    config = grpo(head, policy_loss_cfg={"loss_type": "reinforce"}, loss_reduction=reduction, **fields)
    batches = [policy_batch([-2.0], [1.0]), policy_batch([-1.0] * 3, [1.0] * 3) | {"num_tokens": [3]}]
    hidden = [tok(-2.0), tok(-1.0, -1.0, -1.0)]
    if not apart:
        batches = [policy_batch([-1.0] * 4, [1.0] * 4) | {"num_tokens": [1, 3]}]
        hidden = [torch.cat(hidden, dim=1)]
    assert run_step(config, batches, hidden).loss == pytest.approx(A12[reduction], abs=1e-6)


@every_mode
def test_a14_masked_tokens_add_nothing_in_any_mode(head: Head) -> None:
    """Each of the two tokens has weight 0.5, and the slope of its row is 0.5 (1 - p)."""
    batch = {
        "shifted_labels": torch.tensor([[0, -100], [0, -100]]),
        "old_logprobs": torch.full((2, 2), -1.0, dtype=torch.float64),
        "advantages": torch.tensor([[-1.0, -100.0], [-1.0, 50.0]], dtype=torch.float64),
    }
    step = run_step(grpo(head), [batch], [tok(-1.0, -1.0).expand(2, -1, -1)])
    assert step.loss == pytest.approx(1.0, abs=1e-6)
    slope = 0.5 * 0.6321206
    assert step.rows[0] == pytest.approx([slope, -slope], abs=1e-6)
    assert step.rows[2] == pytest.approx([slope, -slope], abs=1e-6)
    assert step.rows[1] == step.rows[3] == [0.0, 0.0]


def test_a14_masked_tokens_add_nothing() -> None:
    log_probs = torch.full((2, 2), -1.0, dtype=torch.float64, requires_grad=True)
    batch = {
        "shifted_labels": torch.tensor([[0, -100], [0, -100]]),
        "old_logprobs": torch.full((2, 2), -1.0, dtype=torch.float64),
        "advantages": torch.tensor([[-1.0, -100.0], [-1.0, 50.0]], dtype=torch.float64),
    }
    config = grpo({"mode": "eager"})
    context = config.loss_ctx_cls.build_batches([config.build(batch)])[0]
    loss, _ = context.forward_log_probs(log_probs)
    loss.backward()
    assert float(loss) == pytest.approx(1.0)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


@every_mode
def test_a15_a_short_window_is_a_full_step(head: Head) -> None:
    assert nll_step(CELossConfig(**head), [[1.0], [1.0]]).loss == pytest.approx(1.0, abs=1e-6)


@every_mode
def test_a16_accumulated_gradients_equal_the_full_batch(head: Head) -> None:
    parts = [[1.0, 0.5]] * 4
    split, whole = nll_step(CELossConfig(**head), parts), nll_step(CELossConfig(**head), [[1.0, 0.5] * 4])
    assert float(split.weight_grad.norm() / whole.weight_grad.norm()) == pytest.approx(1.0, abs=1e-6)


@every_mode
def test_k03_the_logged_loss_is_that_of_the_step(head: Head) -> None:
    for parts in ([[2.0, 1.0, 1.0, 1.0]], [[2.0], [1.0, 1.0, 1.0]], [[2.0], [1.0], [1.0], [1.0]]):
        step = nll_step(CELossConfig(**head), parts)
        assert step.extra["loss"] == pytest.approx(1.25, abs=1e-6)
        assert step.extra["tokens"] == 4


@every_mode
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [1, 0], [2]]], ids=str)
def test_k03_tokens_are_divided_by_tokens_and_sequences_by_sequences(head: Head, parts: list[list[int]]) -> None:
    """Sequences of 1, 2, 3 and 4 tokens; a veto hits the first, and one token of the last is clipped."""
    lengths = [1, 2, 3, 4]
    rule = RolloutImportanceSampling.veto(0.5, 2.0)
    batches, hidden = [], []
    for part in parts:
        n = sum(lengths[s] for s in part)
        old = [-3.0 if s == 3 and t == 0 else -1.0 for s in part for t in range(lengths[s])]
        rollout = [old[i] if s else -9.0 for i, s in enumerate(s for s in part for _ in range(lengths[s]))]
        lay = {"rollout_logprobs": row(*rollout), "num_tokens": [lengths[s] for s in part]}
        batches.append(policy_batch(old, [1.0] * n) | lay)
        hidden.append(tok(*[-1.0] * n))
    extra = run_step(grpo(head, rollout_is=rule), batches, hidden).extra
    assert extra["rollout_rejected_tokens"] == pytest.approx(1 / 10)
    assert extra["rollout_rejected_sequences"] == pytest.approx(1 / 4)
    assert extra["rollout_vetoed_sequences"] == pytest.approx(1 / 4)
    assert extra["clip_frac_high"] == pytest.approx(1 / 9)
    assert (extra["tokens"], extra["sequences"]) == (9, 3)


@every_mode
def test_k03_the_logged_loss_does_not_depend_on_the_ranks(head: Head) -> None:
    """The number of a rank is its share: the same whatever the factor of a wrapper that averages."""
    for world in (1, 2, 4):
        config, totals = CELossConfig(reduce_loss=False, **head), Totals(tokens=4, sequences=4, world=world)
        shares = [nll_step(config, [part], totals=totals).extra["loss"] for part in ([2.0], [1.0, 1.0, 1.0])]
        assert math.fsum(shares) == pytest.approx(1.25, abs=1e-6)


@every_mode
@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]]], ids=str)
def test_k04_chunks_and_micro_batches_are_averaged(head: Head, parts: list[list[int]]) -> None:
    old, advantages = [-2.0, -1.0], [1.0, 1.0]  # ratios e and 1: the first is clipped, the second is not
    batches = [policy_batch([old[t] for t in p], [advantages[t] for t in p]) for p in parts]
    step = run_step(grpo(head), batches, [tok(*([-1.0] * len(p))) for p in parts])
    assert step.extra["clip_frac_high"] == pytest.approx(0.5)


@every_mode
def test_k05_metrics_hold_no_graph(head: Head) -> None:
    config = grpo(head, use_kl_loss=True, kl_loss_type="k3")
    context = config.build(policy_batch([-1.2, -0.9], [1.0, -1.0], ref_logprobs=row(-1.0, -1.0)))
    config.loss_ctx_cls.build_batches([context])
    _, (_, extra) = context.forward(tok(-1.0, -1.0).requires_grad_(), eye().requires_grad_())
    assert extra
    for name, metric in extra.items():
        for part in metric.parts().values():
            assert not part.requires_grad, name
            assert part.grad_fn is None, name
