"""Public faults of kinds G, H and M: policy losses, KL, entropy, invariances. Names are the case ids."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlloss import (
    CELossConfig,
    GRPOLossConfig,
    LogProbConfig,
    RolloutImportanceSampling,
    compute_advantages,
    kl_penalty,
    policy_loss_names,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.compat.verl import agg_loss
from rlloss.errors import BatchError, ConfigError, UnknownNameError
from rlloss.functional.gae import gae
from rlloss.functional.masked import masked_mean, masked_whiten
from rlloss.functional.ppo_rewards import compute_rewards
from steps import HEADS, Step, assert_same, eager_and_chunk, every_mode, eye, labels, row, run_step, tok

Head = dict[str, Any]
PLAIN: dict[str, Any] = {"loss_type": "vanilla", "cliprange_low": 0.2, "cliprange_high": 0.2}


def grpo(head: Head, **fields: Any) -> GRPOLossConfig:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not depend on the reference")
        return GRPOLossConfig(**{"policy_loss_cfg": PLAIN} | fields | head)


def policy_batch(
    old: list[float], advantages: list[float], mask: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    counted = mask or [1] * len(old)
    return {"shifted_labels": labels(*counted), "old_logprobs": row(*old), "advantages": row(*advantages)} | more


@pytest.mark.parametrize("bound", [0.9, 1.0, 0.0, -3.0])
def test_g02_a_dual_clip_below_one_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match="clip_ratio_c"):
        GRPOLossConfig(policy_loss_cfg=PLAIN | {"clip_ratio_c": bound})


def test_g02_a_tight_dual_clip_warns() -> None:
    with pytest.warns(UserWarning, match="clip_ratio_c"):
        GRPOLossConfig(policy_loss_cfg=PLAIN | {"clip_ratio_c": 1.1})


@every_mode
def test_g03_only_binding_clips_are_counted(head: Head) -> None:
    ratios, advantages = [1.5, 0.5, 1.5, 0.5, 1.5, 0.5, 9.0], [1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 1.0]
    old = [-2.0 - math.log(r) for r in ratios]
    four = run_step(grpo(head), [policy_batch(old[:4], advantages[:4])], [tok(*[-2.0] * 4)])
    assert four.extra["clip_frac_low"] == pytest.approx(0.25)
    assert four.extra["clip_frac_high"] == pytest.approx(0.25)
    mask = [1, 1, 1, 1, 1, 1, 0]  # tokens of advantage 0 and masked ones are no clips
    more = run_step(grpo(head), [policy_batch(old, advantages, mask)], [tok(*[-2.0] * 7)])
    assert more.extra["clip_frac_low"] == pytest.approx(1 / 6)
    assert more.extra["clip_frac_high"] == pytest.approx(1 / 6)


@every_mode
def test_g09_cispo_keeps_its_gradient_where_it_clips(head: Head) -> None:
    """log-prob -1, ratio 1.5, upper bound 1.28, A 1; a clipped ratio would give -1.28 and no gradient."""
    config = grpo(head, policy_loss_cfg={"loss_type": "cispo", "cliprange_high": 0.28})
    step = run_step(config, [policy_batch([-1.0 - math.log(1.5)], [1.0])], [tok(-1.0)])
    assert step.loss == pytest.approx(1.28, abs=1e-6)
    slope = -1.28 * (1.0 - math.exp(-1.0))
    assert step.rows[0] == pytest.approx([slope, -slope], abs=1e-6)


@every_mode
@pytest.mark.parametrize("loss", [{"loss_type": "gspo"}, {"loss_type": "vanilla", "ratio": "sequence_product"}])
def test_g12_kl_metrics_are_those_of_tokens(head: Head, loss: dict[str, Any]) -> None:
    """Log-ratios .1, .2, .3: `mean(r - 1 - log r)` over tokens, at least 0, whatever ratio the loss takes."""
    config = grpo(head, policy_loss_cfg=loss, loss_reduction="sample")
    old = [-1.0 - d for d in (0.1, 0.2, 0.3)]
    extra = run_step(config, [policy_batch(old, [1.0] * 3) | {"num_tokens": [3]}], [tok(-1.0, -1.0, -1.0)]).extra
    k3 = math.fsum(math.exp(d) - 1.0 - d for d in (0.1, 0.2, 0.3)) / 3
    assert extra["approx_kl_k3"] == pytest.approx(k3, abs=1e-6)
    assert extra["approx_kl_k3"] > 0.0
    assert extra["approx_kl_k1"] == pytest.approx(-0.2, abs=1e-6)
    mixed = run_step(config, [policy_batch([-1.5, -0.6], [1.0, -1.0]) | {"num_tokens": [2]}], [tok(-1.0, -1.0)]).extra
    assert mixed["approx_kl_k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.4) - 0.6) / 2, abs=1e-6)


@every_mode
def test_g10_old_is_never_replaced_by_new(head: Head) -> None:
    step = run_step(grpo(head), [policy_batch([-1.1], [1.0])], [tok(-1.0)])
    assert step.extra["ratio_mean"] == pytest.approx(math.exp(0.1), abs=1e-6)
    batch = {"shifted_labels": labels(1, 1), "advantages": row(2.0, -0.5)}
    with pytest.raises(BatchError, match="old_logprobs"):
        run_step(grpo(head), [batch], [tok(-1.0, -2.0)])
    on_policy = run_step(grpo(head, on_policy=True), [batch], [tok(-1.0, -2.0)])
    assert on_policy.loss == pytest.approx(-0.75, abs=1e-6)
    equal = run_step(grpo(head), [batch | {"old_logprobs": row(-1.0, -2.0)}], [tok(-1.0, -2.0)])
    assert_same(on_policy, equal)


@every_mode
@pytest.mark.parametrize(
    ("kind", "value", "grad"),
    [
        ("k1", 1.0, 1.0),
        ("kl", 1.0, 1.0),
        ("k2", 0.5, 1.0),
        ("mse", 0.5, 1.0),
        ("k3", 0.3678794, 0.6321206),
        ("low_var_kl", 0.3678794, 0.6321206),
        ("abs", 1.0, 1.0),
        ("k1+", 1.0, 1.0),
        ("k3+", 0.3678794, 1.0),
        ("abs+", 1.0, 1.0),
    ],
)
def test_h01_kl_estimators(head: Head, kind: str, value: float, grad: float) -> None:
    """log_prob -1, reference -2; the gradient in the hidden row is grad * (1 - p, -(1 - p))."""
    batch = policy_batch([-1.0], [0.0], ref_logprobs=row(-2.0))
    step = run_step(grpo(head, use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind), [batch], [tok(-1.0)])
    assert step.loss == pytest.approx(value, abs=1e-6)
    rest = 1.0 - math.exp(-1.0)
    assert step.rows[0] == pytest.approx([grad * rest, -grad * rest], abs=1e-6)
    assert step.extra["kl"] == pytest.approx(value, abs=1e-6)
    twice = run_step(grpo(head, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type=kind), [batch], [tok(-1.0)])
    assert twice.loss == pytest.approx(2.0 * value, abs=1e-6)


@every_mode
@pytest.mark.parametrize("reduction", ["token", "sample", "square", "prompt", "sequence_sum"])
@pytest.mark.parametrize("kind", ["k1", "abs"])
def test_h04_kl_is_a_masked_mean(head: Head, reduction: str, kind: str) -> None:
    """KL 0.1 and, masked, 100 without a cap: 50.05 where the mean is over both."""
    batch = policy_batch([-1.0, -1.0], [0.0, 0.0], [1, 0], ref_logprobs=row(-1.1, -101.0))
    batch |= {"num_tokens": [2], "group_ids": torch.tensor([0]), "num_prompts": 1}
    fields = {"kl_loss_coef": 1.0, "kl_loss_type": kind, "kl_value_cap": None, "loss_reduction": reduction}
    step = run_step(grpo(head, use_kl_loss=True, **fields), [batch], [tok(-1.0, -1.0)])
    assert step.loss == pytest.approx(0.1, abs=1e-6)
    assert step.extra["kl"] == pytest.approx(0.1, abs=1e-6)
    counted = run_step(
        grpo(head, use_kl_loss=True, **fields), [batch | {"shifted_labels": labels(1, 1)}], [tok(-1, -1)]
    )
    assert counted.loss == pytest.approx(100.1 if reduction == "sequence_sum" else 50.05, abs=1e-5)


@eager_and_chunk
def test_h05_the_entropy_bonus_is_a_bonus(head: Head) -> None:
    uniform = torch.zeros(1, 1, 2, dtype=torch.float64)
    batch = policy_batch([math.log(0.5)], [0.0])
    config = grpo(head, entropy_coef=0.1)
    assert run_step(config, [batch], [uniform]).loss == pytest.approx(-0.0693147, abs=1e-6)
    step = run_step(config, [batch], [tok(-0.1)])
    lower = tok(-0.1) - 0.1 * step.hidden_grads[0]
    entropy = lambda h: torch.distributions.Categorical(logits=h).entropy().item()  # noqa: E731
    assert entropy(lower) > entropy(tok(-0.1))
    with pytest.raises(ConfigError, match="entropy_coef"):
        grpo(head, entropy_coef=-0.1)


@eager_and_chunk
@pytest.mark.parametrize("why", ["label", "rollout"])
def test_h06_a_truncated_row_leaves_policy_kl_and_entropy_alike(head: Head, why: str) -> None:
    """The second row is masked, by its labels or because the correction rejects it: the step is that of the first."""
    rule = RolloutImportanceSampling.veto(0.5, 2.0)
    config = grpo(head, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.2, rollout_is=rule)
    one = policy_batch([-1.1, -2.0], [1.0, -1.0], ref_logprobs=row(-1.0, -0.8), rollout_logprobs=row(-1.1, -2.0))
    two = {name: torch.cat([value, value]) for name, value in one.items()}
    if why == "label":
        two["shifted_labels"][1] = -100
    else:
        two["rollout_logprobs"][1, 0] = -9.0
    hidden = tok(-1.0, -0.7)
    alone = run_step(config, [one], [hidden])
    both = run_step(config, [two], [torch.cat([hidden, tok(-0.3, -2.5)])])
    assert both.loss == pytest.approx(alone.loss, rel=1e-12)
    assert both.rows[:2] == [pytest.approx(line, rel=1e-12) for line in alone.rows]
    assert both.rows[2:] == [[0.0, 0.0]] * 2
    for name in ("policy_loss", "kl_loss", "entropy_loss", "kl", "entropy", "tokens", "sequences"):
        assert both.extra[name] == pytest.approx(alone.extra[name], rel=1e-12), name


@given(log_prob=st.floats(-40.0, 0.0), ref=st.floats(-40.0, 0.0))
@settings(deadline=None, derandomize=True)
def test_h07_only_k1_is_negative(log_prob: float, ref: float) -> None:
    """`d = log_prob - ref`: k1 is d, and every other estimator is at least 0 and 0 at d = 0."""
    pair = [torch.tensor([x], dtype=torch.float64) for x in (log_prob, ref)]
    assert float(kl_penalty(*pair, "k1", None)) == log_prob - ref
    for kind in ("k2", "k3", "abs", "k2+", "k3+", "abs+"):
        for cap in (None, 10.0):
            value = float(kl_penalty(*pair, kind, cap))
            assert value >= 0.0
            assert (value == 0.0) <= (abs(log_prob - ref) < 1e-7)


@every_mode
def test_h07_the_coefficient_acts(head: Head) -> None:
    """k1 of -0.5 and 1.0 in one batch: a negative number of a token takes away from the sum."""
    batch = policy_batch([-1.0, -1.0], [0.0, 0.0], ref_logprobs=row(-0.5, -2.0))
    for coef in (0.0, 0.1, 1.0):
        config = grpo(head, use_kl_loss=True, kl_loss_coef=coef, kl_loss_type="k1")
        assert run_step(config, [batch], [tok(-1.0, -1.0)]).loss == pytest.approx(coef * 0.25, abs=1e-6)


@every_mode
@pytest.mark.parametrize(
    ("kind", "value"), [("k1", 1.0), ("k2", 0.5), ("k3", 0.3678794), ("abs", 1.0), ("k2+", 0.5), (None, 0.3678794)]
)
def test_h08_the_reported_kl_is_the_trained_one(head: Head, kind: str | None, value: float) -> None:
    batch = policy_batch([-1.0], [0.0], ref_logprobs=row(-2.0))
    extra = run_step(grpo(head, use_kl_loss=True, kl_loss_coef=0.25, kl_loss_type=kind), [batch], [tok(-1.0)]).extra
    assert extra["kl"] == pytest.approx(value, abs=1e-6)
    assert extra["kl_loss"] == pytest.approx(0.25 * value, abs=1e-6)


@every_mode
@pytest.mark.parametrize("fields", [{"use_kl_loss": False}, {"use_kl_loss": True, "kl_loss_coef": 0.0}], ids=str)
@pytest.mark.parametrize("ref", [None, math.nan])
def test_h09_a_reference_that_is_not_used_has_no_effect(head: Head, fields: Any, ref: float | None) -> None:
    plain = policy_batch([-1.1], [1.0])
    batch = plain if ref is None else plain | {"ref_logprobs": row(ref)}
    step = run_step(grpo(head, **fields), [batch], [tok(-1.0)])
    assert_same(step, run_step(grpo(head), [plain], [tok(-1.0)]), tolerance=0.0)
    assert all(math.isfinite(value) for value in step.extra.values())


def random_step(head: Head, parts: list[list[int]], pad: int = 0, **fields: Any) -> tuple[Step, list[int]]:
    """Twelve tokens of five sequences, the sequences dealt to micro-batches, with ignored garbage appended."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, weight, bias = draw(12, 4), draw(9, 4), draw(9)
    targets = torch.randint(0, 9, (12,), generator=generator)
    new = ((hidden @ weight.T + bias).log_softmax(-1)).gather(1, targets[:, None])[:, 0]
    columns = {
        "old_logprobs": new + 0.3 * draw(12),
        "ref_logprobs": new + 0.5 * draw(12),
        "advantages": draw(12),
    }
    spans = [range(1), range(1, 4), range(4, 6), range(6, 11), range(11, 12)]
    batches, states, order = [], [], []
    for part in parts:
        places = [t for s in part for t in spans[s]]
        order += places
        fill = lambda x, value: torch.cat([x, torch.full((pad, *x.shape[1:]), value, dtype=x.dtype)])  # noqa: E731
        batch = {key: fill(x[places], math.nan)[None] for key, x in columns.items()}
        batch["shifted_labels"] = fill(targets[places], -100)[None]
        batch["num_tokens"] = [len(spans[s]) for s in part]
        batches.append(batch)
        states.append(fill(hidden[places], math.inf)[None])
    config = grpo(head, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3", **fields)
    step = run_step(config, batches, states, weight, bias)
    step.hidden_grads = [grad[:, : grad.shape[1] - pad] for grad in step.hidden_grads]
    return step, order


def in_order(step: Step, order: list[int]) -> Step:
    rows = torch.cat([grad.flatten(0, -2) for grad in step.hidden_grads])
    step.hidden_grads = [rows[torch.tensor(order).argsort()][None]]
    return step


@every_mode
@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("pad", [1, 5])
def test_m01_padding_changes_nothing(head: Head, reduction: str, pad: int) -> None:
    step, _ = random_step(head, [[0, 1, 2], [3, 4]], pad, loss_reduction=reduction)
    clean, _ = random_step(head, [[0, 1, 2], [3, 4]], loss_reduction=reduction)
    assert_same(step, clean, tolerance=1e-6 if head["mode"] == "liger" else 1e-12)


@every_mode
@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[4, 0], [3], [2, 1]], [[3], [4], [2], [1], [0]]], ids=str)
def test_m02_the_order_and_the_split_change_nothing(head: Head, reduction: str, parts: list[list[int]]) -> None:
    whole, _ = random_step(HEADS["eager"], [[0, 1, 2, 3, 4]], loss_reduction=reduction)
    step = in_order(*random_step(head, parts, loss_reduction=reduction))
    assert_same(step, whole, tolerance=1e-6 if head["mode"] == "liger" else 1e-12)


@every_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_m03_activation_checkpointing(head: Head, reentrant: bool) -> None:
    config = grpo(head)
    context = config.loss_ctx_cls.build_batches([config.build(policy_batch([-1.3, -0.9], [1.0, -1.0]))])[0]
    grads = []
    for wrap in (False, True):
        hidden, weight = tok(-1.0, -1.2).requires_grad_(), eye().requires_grad_()
        forward = lambda h, w: context.forward(h, w).loss  # noqa: E731
        loss = checkpoint(forward, hidden, weight, use_reentrant=reentrant) if wrap else forward(hidden, weight)
        loss.backward()
        grads.append((hidden.grad, weight.grad))
    for plain, wrapped in zip(*grads, strict=True):
        assert plain is not None
        assert wrapped is not None
        assert torch.equal(plain, wrapped)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_m06_any_integer_labels(dtype: torch.dtype) -> None:
    ignored = 9 if dtype == torch.uint8 else -100
    targets = torch.tensor([[0, ignored, 1]], dtype=dtype)
    config = CELossConfig(ignore_idx=ignored)
    step = run_step(config, [{"shifted_labels": targets}], [tok(-1.0, -2.0, -3.0)])
    assert step.loss == pytest.approx((1.0 - math.log(-math.expm1(-3.0))) / 2)


def test_m06_shapes_of_advantages() -> None:
    targets = torch.zeros(2, 3, dtype=torch.int64)
    base = {"shifted_labels": targets, "old_logprobs": torch.full((2, 3), -1.1, dtype=torch.float64)}
    hidden = tok(-1.0, -1.0, -1.0).expand(2, -1, -1)
    per_sequence = torch.tensor([1.0, -2.0], dtype=torch.float64)
    expected = run_step(grpo(HEADS["eager"]), [base | {"advantages": per_sequence[:, None].expand(2, 3)}], [hidden])
    for advantages in (per_sequence, per_sequence[:, None]):
        assert_same(run_step(grpo(HEADS["eager"]), [base | {"advantages": advantages}], [hidden]), expected, 0.0)
    for shape in ((3,), (6,), (3, 2), (1, 3), (2, 1, 3), ()):
        with pytest.raises(BatchError, match="advantages"):
            run_step(grpo(HEADS["eager"]), [base | {"advantages": torch.zeros(shape)}], [hidden])


MASKS = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "uint8": torch.uint8}


@pytest.mark.parametrize("dtype", MASKS.values(), ids=MASKS)
def test_m06_masks_of_any_type(dtype: torch.dtype) -> None:
    """The functions on `[B, T]` take a mask of any type for the same numbers."""
    values, rewards = torch.tensor([[0.5, -1.0, 3.0]]), torch.tensor([[0.0, 1.0, 9.0]])
    exact, mask = torch.tensor([[True, True, False]]), torch.tensor([[1, 1, 0]]).to(dtype)
    calls: list[Callable[[Tensor], Any]] = [
        lambda m: masked_mean(values, m),
        lambda m: masked_whiten(values, m),
        lambda m: gae(rewards, values, m, 0.9, 0.8)[0],
        lambda m: compute_advantages("reinforce_plus_plus", rewards=rewards, mask=m),
        lambda m: agg_loss(values, m, "token-mean"),
        lambda m: compute_rewards(torch.tensor([1.0]), values, values - 0.1, m, 0.1).rewards,
    ]
    for call in calls:
        assert torch.equal(call(mask), call(exact))


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "rollout_is_weights"])
def test_m06_a_tensor_that_would_broadcast_is_refused(name: str) -> None:
    config = grpo(HEADS["eager"], use_kl_loss=True, kl_loss_type="k3")
    good = policy_batch([-1.0, -1.0], [1.0, 1.0], ref_logprobs=row(-1.0, -1.0))
    spread = {(1,), (1, 1)} if name == "rollout_is_weights" else set()  # one for each sequence
    for shape in {(1,), (2,), (1, 1), (2, 1), (1, 2, 1), (1, 3), ()} - spread:
        with pytest.raises(BatchError, match=name):
            config.build(good | {name: torch.zeros(shape)})


@every_mode
def test_m07_inputs_get_no_gradient(head: Head) -> None:
    config = grpo(head, use_kl_loss=True, kl_loss_type="k3")
    batch = policy_batch([-1.1, -0.9], [1.0, -1.0], ref_logprobs=row(-1.0, -1.2), rollout_is_weights=row(0.9, 1.1))
    leaves = {key: value.requires_grad_() for key, value in batch.items() if value.is_floating_point()}
    run_step(config, [batch], [tok(-1.0, -1.0)])
    assert all(leaf.grad is None for leaf in leaves.values())


@every_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_m08_the_loss_is_float32(head: Head, dtype: torch.dtype) -> None:
    config = CELossConfig(**head)
    context = config.loss_ctx_cls.build_batches([config.build({"shifted_labels": labels(1)})])[0]
    assert context.forward(tok(-1.0).to(dtype), eye().to(dtype)).loss.dtype == torch.float32
    log_probs = LogProbConfig(**head).build({"shifted_labels": labels(1)}).forward(tok(-1.0).to(dtype), eye().to(dtype))
    assert log_probs.loss.dtype == torch.float32


@pytest.fixture
def mine() -> Iterator[str]:
    """A registered loss, removed again afterwards."""

    @register_policy_loss("mine")
    def loss(log_prob: Tensor, advantages: Tensor) -> Tensor:
        return -advantages * log_prob

    yield "mine"
    unregister_policy_loss("mine")


def test_m10_names_of_policy_losses(mine: str) -> None:
    assert "mine" in policy_loss_names()
    with pytest.raises(ConfigError, match="registered already"):
        register_policy_loss("mine")(lambda log_prob: -log_prob)
    for name in ("vannila", "min", "nowhere.at_all"):
        with pytest.raises((UnknownNameError, ConfigError)) as error:
            GRPOLossConfig(policy_loss_cfg={"loss_type": name})
        assert name in str(error.value)
    with pytest.raises((UnknownNameError, ConfigError), match="vanilla"):
        GRPOLossConfig(policy_loss_cfg={"loss_type": "vannila"})
    with pytest.raises(ConfigError, match="advantage"):
        register_policy_loss("typo")(lambda log_prob, advantage: -log_prob * advantage)
    assert "typo" not in policy_loss_names()


@every_mode
def test_a_registered_loss_runs_in_every_mode(head: Head, mine: str) -> None:
    step = run_step(
        grpo(head, policy_loss_cfg={"loss_type": mine}), [policy_batch([-1.1, -3.0], [2.0, -1.0])], [tok(-1.0, -2.0)]
    )
    assert step.loss == pytest.approx((2.0 * 1.0 - 1.0 * 2.0) / 2, abs=1e-6)
    assert step.rows[0] == pytest.approx([-1.0 * 0.6321206, 1.0 * 0.6321206], abs=1e-6)


@every_mode
def test_a_nan_row_without_a_gradient_is_as_visible_as_in_eager_mode(head: Head, mine: str) -> None:
    """Advantage 0 and hidden states that are NaN: 0 * NaN is NaN, although the row's derivative is exactly 0."""
    hidden = tok(-1.0, -2.0)
    hidden[0, 1] = math.nan
    step = run_step(grpo(head, policy_loss_cfg={"loss_type": mine}), [policy_batch([-1.0, -2.0], [1.0, 0.0])], [hidden])
    assert math.isnan(step.loss)
    assert step.hidden_grads[0][0, 1].isnan().any()
    assert step.weight_grad.isnan().any()


@pytest.fixture
def plain_ratio() -> Iterator[str]:
    """A registered loss that leaves it to the context to give old log-probs without a graph."""

    @register_policy_loss("plain_ratio")
    def loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
        return -advantages * (log_prob - old_log_prob).exp()

    yield "plain_ratio"
    unregister_policy_loss("plain_ratio")


@every_mode
def test_g10_on_policy_has_the_gradient_of_old_equal_to_new(head: Head, plain_ratio: str) -> None:
    batch = {"shifted_labels": labels(1), "advantages": row(2.0)}
    step = run_step(grpo(head, policy_loss_cfg={"loss_type": plain_ratio}, on_policy=True), [batch], [tok(-1.0)])
    assert step.loss == pytest.approx(-2.0, abs=1e-6)
    assert step.rows[0] == pytest.approx([-2.0 * 0.6321206, 2.0 * 0.6321206], abs=1e-6)
