"""Actor, critic and both together keep the four promises: split, mode, masked garbage, extreme values."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

import oracles_ppo as oracle
from batches import LAYOUTS, assert_same, padded, random_step, run_step, split
from rlloss import (
    ActorCriticLossConfig,
    ActorCriticLossContext,
    GRPOLossConfig,
    PPOLossConfig,
    ValueLossConfig,
    ValueLossContext,
    metrics,
)
from rlloss.errors import BatchError, ConfigError, NotCalibratedError

LENGTHS = [5, 9, 1, 7, 12, 3]
KEYS = ("old_logprobs", "advantages", "values", "returns")
MODES = ("eager", "chunk", "liger")


def step_of(seed: int = 3):
    """Random sequences with old values and returns, whose errors keep a distance from the clip."""
    step = random_step(seed, LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    for sequence in step.sequences:
        length = len(sequence["hidden"])
        sequence["values"] = torch.randn(length, generator=generator, dtype=torch.float64)
        sequence["returns"] = torch.randn(length, generator=generator, dtype=torch.float64)
    return step


STEP = step_of()
VALUE_HEAD = torch.randn(1, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
VALUE_BIAS = torch.tensor([0.3], dtype=torch.float64)


def critic_step():
    """The same sequences with the value head as their head."""
    step = step_of()
    step.weight, step.bias = VALUE_HEAD, VALUE_BIAS
    return step


def run_both(config, parts: int = 1, layout: str = "padded", step=STEP):
    """One step of actor and critic: loss, gradients of every part, metrics."""
    weight, bias = step.weight.clone().requires_grad_(), step.bias.clone().requires_grad_()
    value_weight = VALUE_HEAD.to(step.weight.dtype, copy=True).requires_grad_()
    value_bias = VALUE_BIAS.to(step.weight.dtype, copy=True).requires_grad_()
    groups = split(step.sequences, parts)
    laid = [LAYOUTS[layout](group, KEYS) for group in groups]
    contexts = ActorCriticLossContext.build_batches([config.build(batch) for batch, _ in laid])
    total, extras, hidden_grads = 0.0, [], []
    for context, (_, states), group in zip(contexts, laid, groups, strict=True):
        states = states.clone().requires_grad_()
        loss, (_, extra) = context.forward(states, weight, bias, value_weight=value_weight, value_bias=value_bias)
        loss.backward()
        total += loss.item()
        extras.append(extra)
        lengths = [len(sequence["hidden"]) for sequence in group]
        rows = states.grad[0].split(lengths) if layout == "packed" else states.grad
        hidden_grads += [row[:length] for row, length in zip(rows, lengths, strict=True)]
    parts_of = (weight.grad, bias.grad, value_weight.grad, value_bias.grad, torch.cat(hidden_grads))
    return total, parts_of, metrics.reduce(metrics.merge(extras))


def assert_equal(found, expected, tolerance: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)
    assert found[2].keys() == expected[2].keys()
    for name, value in found[2].items():
        assert value == pytest.approx(expected[2][name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_both_any_split_and_mode(reduction: str, mode: str, layout: str) -> None:
    fields = {"loss_reduction": reduction, "vf_coef": 0.5}
    expected = run_both(ActorCriticLossConfig(**fields))
    for parts in (1, 3):
        tolerance = 3e-6 if mode == "liger" else 1e-12
        found = run_both(ActorCriticLossConfig(mode=mode, chunk_size=4, **fields), parts, layout)
        assert_equal(found, expected, tolerance)


def test_both_is_the_sum_of_actor_and_critic() -> None:
    total, grads, found = run_both(ActorCriticLossConfig(vf_coef=0.5))
    actor = run_step(PPOLossConfig(), STEP, keys=("old_logprobs", "advantages"))
    critic = run_step(ValueLossConfig(), critic_step(), keys=("values", "returns"))
    assert total == pytest.approx(actor.loss + 0.5 * critic.loss, rel=1e-12)
    torch.testing.assert_close(grads[0], actor.grad_weight)
    torch.testing.assert_close(grads[2], 0.5 * critic.grad_weight)
    torch.testing.assert_close(grads[4], torch.cat(actor.grad_hidden) + 0.5 * torch.cat(critic.grad_hidden))
    assert found["value_loss"] == pytest.approx(0.5 * critic.metrics["value_loss"])
    assert found["explained_variance"] == pytest.approx(critic.metrics["explained_variance"])


@pytest.mark.filterwarnings("ignore:a row .1, T. without cu_seq_lens")
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "fields", [{}, {"loss_reduction": "sample"}, {"cliprange_value": None, "huber_delta": 0.5}, {"mode": "liger"}]
)
def test_critic_any_split(fields: dict, parts: int, layout: str) -> None:
    expected = run_step(ValueLossConfig(**fields), critic_step(), keys=("values", "returns"))
    found = run_step(ValueLossConfig(**fields), critic_step(), parts, layout, ("values", "returns"))
    assert_same(found, expected, 1e-12, 1e-12)


def test_critic_against_plain_loops() -> None:
    step = critic_step()
    found = run_step(ValueLossConfig(cliprange_value=0.3), step, 2, keys=("values", "returns"))
    rows = [
        (float(h @ VALUE_HEAD[0] + VALUE_BIAS), float(r), float(v))
        for s in step.sequences
        for h, y, r, v in zip(s["hidden"], s["shifted_labels"], s["returns"], s["values"], strict=True)
        if y != -100
    ]
    expected = [oracle.value_loss(*row, 0.3, None) for row in rows]
    assert found.loss == pytest.approx(math.fsum(row[0] for row in expected) / len(rows), rel=1e-12)
    assert found.metrics["value_clip_frac"] == pytest.approx(sum(row[2] for row in expected) / len(rows))
    assert found.metrics["explained_variance"] == pytest.approx(
        oracle.explained_variance([row[0] for row in rows], [row[1] for row in rows]), rel=1e-9
    )
    slopes = [row[1] / len(rows) for row in expected]
    assert found.grad_bias.item() == pytest.approx(math.fsum(slopes), rel=1e-9)


def one_row(mask: list[int], **fields: Tensor) -> dict:
    labels = torch.tensor([[0 if m else -100 for m in mask]])
    return {"shifted_labels": labels, "num_tokens": torch.tensor([len(mask)]), **fields}


@pytest.mark.parametrize("mode", MODES)
def test_garbage_at_ignored_positions_changes_nothing(mode: str) -> None:
    def run(garbage: float):
        mixed = torch.tensor([[0.5, garbage, -0.4]])
        batch = one_row([1, 0, 1], advantages=mixed, old_logprobs=mixed - 1, values=mixed, returns=mixed + 0.3)
        hidden = torch.tensor([[[0.1, 0.2], [garbage, garbage], [0.3, -0.1]]], requires_grad=True)
        weight, head = torch.eye(2, requires_grad=True), torch.tensor([[0.4, -0.2]], requires_grad=True)
        (context,) = ActorCriticLossContext.build_batches([ActorCriticLossConfig(mode=mode).build(batch)])
        loss, (_, extra) = context.forward(hidden, weight, value_weight=head)
        loss.backward()
        return loss, hidden.grad, weight.grad, head.grad, metrics.reduce(extra)

    clean = run(0.0)
    for garbage in (math.nan, math.inf, -math.inf):
        dirty = run(garbage)
        assert all(torch.equal(a, b) for a, b in zip(clean[:4], dirty[:4], strict=True))
        assert clean[4] == dirty[4]


@pytest.mark.parametrize("mode", MODES)
def test_extreme_values_stay_finite_and_nan_stays_visible(mode: str) -> None:
    big = torch.tensor([[1e6, -1e6, 3.0]])
    batch = one_row([1, 1, 1], advantages=big, old_logprobs=torch.tensor([[-300.0, -1.0, -1.0]]), values=big)
    hidden = torch.tensor([[[0.0, 300.0], [0.3, 0.1], [0.2, 0.1]]], requires_grad=True)
    for spoiled in (0.0, math.nan):
        batch["returns"] = torch.tensor([[-1e6, 1e6, spoiled]])
        (context,) = ActorCriticLossContext.build_batches([ActorCriticLossConfig(mode=mode).build(batch)])
        loss, _ = context.forward(hidden, torch.eye(2), value_weight=torch.tensor([[1e3, -1e3]]))
        hidden.grad = None
        loss.backward()
        assert loss.isfinite() == (spoiled == 0.0)
        assert hidden.grad[0, :2].isfinite().all()


def test_j03_any_split_of_the_squared_errors() -> None:
    cfg = ValueLossConfig(cliprange_value=None)
    cuts = ([[2.0], [1.0, 1.0, 1.0]], [[2.0, 1.0, 1.0, 1.0]], [[2.0], [1.0], [1.0], [1.0]])
    for cut in cuts:
        contexts = [cfg.build(one_row([1] * len(part), returns=torch.zeros(1, len(part)))) for part in cut]
        ValueLossContext.build_batches(contexts)
        losses = [
            context.forward(torch.tensor(part)[None, :, None], torch.ones(1, 1)).loss
            for context, part in zip(contexts, cut, strict=True)
        ]
        assert sum(losses) == pytest.approx(0.875)
    (context,) = ValueLossContext.build_batches([cfg.build(one_row([0, 0], returns=torch.full((1, 2), math.nan)))])
    hidden = torch.ones(1, 2, 1, requires_grad=True)
    loss, (_, extra) = context.forward(hidden, torch.ones(1, 1))
    loss.backward()
    assert (loss.item(), float(extra["explained_variance"]), hidden.grad.abs().sum().item()) == (0.0, 0.0, 0.0)


def test_engines_that_have_numbers_already() -> None:
    batch, hidden = padded(STEP.sequences, KEYS)
    cfg = ActorCriticLossConfig(entropy_coef=0.01)
    (context,) = ActorCriticLossContext.build_batches([cfg.build(batch)])
    expected = context.forward(hidden, STEP.weight, STEP.bias, value_weight=VALUE_HEAD)
    spread = (hidden @ STEP.weight.T + STEP.bias).log_softmax(-1)
    log_probs = spread.gather(-1, batch["shifted_labels"].clamp(min=0)[..., None]).squeeze(-1)
    found = context.forward_log_probs(log_probs, -(spread.exp() * spread).sum(-1), values=hidden @ VALUE_HEAD[0])
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    (critic,) = ValueLossContext.build_batches([ValueLossConfig().build(batch)])
    by_values = critic.forward_values(hidden @ VALUE_HEAD[0]).loss
    assert by_values.item() == pytest.approx(critic.forward(hidden, VALUE_HEAD[0]).loss.item(), rel=1e-12)


def test_configs() -> None:
    assert PPOLossConfig().policy_loss_cfg.clip_ratio_c is None
    assert PPOLossConfig(policy_loss_cfg={"clip_ratio_c": 3.0}).policy_loss_cfg.clip_ratio_c == 3.0
    assert GRPOLossConfig().policy_loss_cfg.clip_ratio_c == 3.0
    for config in (PPOLossConfig(), ActorCriticLossConfig(vf_coef=0.3), ValueLossConfig(huber_delta=1.0)):
        assert type(config)(**config.model_dump()) == config
        assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError, match="logit_softcap"):
        ValueLossConfig(logit_softcap=30.0)
    with pytest.raises(ConfigError, match="loss_length"):
        ValueLossConfig(loss_reduction="constant")


def test_mistakes_are_named() -> None:
    batch = one_row([1, 1], returns=torch.zeros(1, 2))
    hidden = torch.zeros(1, 2, 3)
    with pytest.raises(BatchError, match=r"values.*cliprange_value=None"):
        ValueLossContext.build_batches([ValueLossConfig().build(batch)])
    with pytest.raises(BatchError, match="needs returns, values"):
        ValueLossContext.build_batches([ValueLossConfig().build(one_row([1, 1]))])
    cfg = ValueLossConfig(cliprange_value=None)
    with pytest.raises(NotCalibratedError):
        cfg.build(batch).forward(hidden, torch.zeros(1, 3))
    (context,) = ValueLossContext.build_batches([cfg.build(batch)])
    with pytest.raises(BatchError, match=r"value_weight.*\(2, 3\)"):
        context.forward(hidden, torch.zeros(2, 3))
    with pytest.raises(BatchError, match="hidden_states"):
        context.forward(hidden[:, :1], torch.zeros(1, 3))
    with pytest.raises(BatchError, match="values has shape"):
        context.forward_values(torch.zeros(1, 3))
    nan = {**batch, "returns": torch.tensor([[math.nan, 0.0]])}
    with pytest.raises(BatchError, match="returns is NaN at 1"):
        ValueLossContext.build_batches([ValueLossConfig(cliprange_value=None, check_finite=True).build(nan)])
    both = {**batch, "advantages": torch.zeros(1, 2), "old_logprobs": torch.zeros(1, 2), "values": torch.zeros(1, 2)}
    (context,) = ActorCriticLossContext.build_batches([ActorCriticLossConfig().build(both)])
    with pytest.raises(BatchError, match="value_weight"):
        context.forward(hidden, torch.zeros(4, 3))
    with pytest.raises(BatchError, match="values"):
        context.forward_log_probs(torch.zeros(1, 2))
