"""`forward(..., return_tokens=True)`: contributions that add up to the loss, and numbers that equal plain loops."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import rlloss
from batches import IGNORED, LAYOUTS, POLICY_LOSSES, random_step
from rlloss import (
    ActorCriticLossConfig,
    BaseLossContext,
    CELossConfig,
    DistillLossConfig,
    GRPOLossConfig,
    LogProbConfig,
    MixedLossConfig,
    OrealLossConfig,
    PPOLossConfig,
    RolloutImportanceSampling,
    TokenRecord,
    ValueLossConfig,
    register_policy_loss,
    unregister_policy_loss,
)
from rlloss.compat.xtuner import GRPOLossConfig as XTunerGRPOLossConfig
from rlloss.errors import BatchError, ConfigError
from rlloss.metrics import Metric, reduce

MODES = ["eager", "chunk", "liger"]
STEP = random_step(11, [6, 5, 9, 3])
KEYS = ("old_logprobs", "ref_logprobs", "advantages")


def data(layout: str = "padded", fill: float = float("nan")) -> tuple[dict[str, Any], Tensor]:
    """All keys that any of the losses below reads, `fill` at ignored positions."""
    batch, hidden = LAYOUTS[layout](STEP.sequences, KEYS)
    ignored = batch["shifted_labels"] == IGNORED
    generator = torch.Generator().manual_seed(3)
    shape = (*ignored.shape, 2)
    batch["rollout_logprobs"] = batch["old_logprobs"] + 0.05
    batch["values"] = torch.randn(ignored.shape, generator=generator, dtype=torch.float64)
    batch["returns"] = torch.randn(ignored.shape, generator=generator, dtype=torch.float64)
    batch["teacher_logprobs"] = batch["ref_logprobs"]
    batch["teacher_topk_ids"] = torch.randint(0, 13, shape, generator=generator)
    batch["teacher_topk_logprobs"] = torch.randn(shape, generator=generator, dtype=torch.float64) - 3.0
    for name, value in batch.items():
        if value.is_floating_point() and name != "teacher_topk_logprobs":
            batch[name] = value.masked_fill(ignored, fill)
    rows, columns = ignored.shape
    batch["part_ids"] = torch.arange(rows * columns).reshape(rows, columns) % 3 - 1
    return batch, hidden.masked_fill(ignored[..., None], fill)


SPARSE = ("vanilla", "cispo", "dppo_tv", "gspo", "gmpo", "vespo", "clip_cov")
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ce": (CELossConfig, {"loss_reduction": "sample"}),
    "kl": (GRPOLossConfig, {"use_kl_loss": True, "kl_loss_coef": 0.3}),
    "entropy": (GRPOLossConfig, {"entropy_coef": 0.2}),
    "kl importance": (GRPOLossConfig, {"use_kl_loss": True, "kl_importance": "sequence_mean", "kl_loss_coef": 0.3}),
    "weights": (GRPOLossConfig, {"rollout_is": RolloutImportanceSampling.mis(0.5, 2.0)}),
    "limit": (GRPOLossConfig, {"off_policy_limit": 0.1}),
    "ppo": (PPOLossConfig, {}),
    "oreal": (OrealLossConfig, {"pos_sft_loss_weight": 0.7, "use_kl_loss": True}),
    "distill": (DistillLossConfig, {"kind": "k3"}),
    "topk": (DistillLossConfig, {}),
    "mixed": (
        MixedLossConfig,
        {"parts": {"rl": GRPOLossConfig(use_kl_loss=True), "sft": CELossConfig()}, "coefs": {"sft": 0.25}},
    ),
    **{name: (GRPOLossConfig, {"policy_loss_cfg": POLICY_LOSSES[name], "loss_reduction": "sample"}) for name in SPARSE},
}
REFUSED_BY_LIGER = {"entropy", "topk"}


def run(config: Any, return_tokens: bool = True, layout: str = "padded", fill: float = float("nan")) -> Any:
    batch, hidden = data(layout, fill)
    context = config.build(batch)
    type(context).build_batches([context])
    leaves = [part.clone().requires_grad_() for part in (hidden, STEP.weight, STEP.bias)]
    output = context.forward(*leaves, return_tokens=return_tokens)
    output.loss.backward()
    return context, output, [leaf.grad for leaf in leaves]


def total(record: TokenRecord) -> float:
    assert record.loss is not None
    return float(record.loss.double().sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_contributions_add_up_and_nothing_changes(name: str, mode: str, layout: str) -> None:
    cls, fields = CONFIGS[name]
    if mode == "liger" and name in REFUSED_BY_LIGER:
        with pytest.raises(ConfigError):
            cls(**fields, mode=mode)
        return
    config = cls(**fields, mode=mode, chunk_size=4)
    _, output, grads = run(config, layout=layout)
    _, plain, plain_grads = run(config, return_tokens=False, layout=layout)
    assert torch.equal(output.loss, plain.loss)
    assert all(torch.equal(*pair) for pair in zip(grads, plain_grads, strict=True))
    extra = dict(output.extra)
    record = extra.pop("per_token")
    assert extra.keys() == plain.extra.keys()
    assert reduce(extra) == reduce(plain.extra)
    exact = mode != "liger" and name not in (
        "ce",
        "mixed",
    )  # float32: liger's log-probs, and weights of a batch without numbers
    tolerance = 1e-12 if exact else 2e-6
    assert total(record) == pytest.approx(output.loss.item(), rel=tolerance, abs=tolerance)
    assert float(sum(share.sum() for share in record.shares.values())) == pytest.approx(total(record), rel=1e-5)
    for tensor in (*record.tensors().values(), *record.shares.values()):
        assert tensor.shape == (record.mask.shape)
        assert not tensor.requires_grad
        assert bool((tensor[~record.mask] == 0).all())


def test_numbers_equal_plain_loops() -> None:
    """Every column of PPO's clip with KL and entropy, token by token from the formulas."""
    config = GRPOLossConfig(
        policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.28}, use_kl_loss=True, kl_loss_coef=0.3,
        entropy_coef=0.1, mode="chunk", chunk_size=3,
    )  # fmt: skip
    _, output, _ = run(config)
    record = output.per_token
    batch, hidden = data()
    counted = [(b, t) for b, row in enumerate(batch["shifted_labels"].tolist()) for t, y in enumerate(row) if y >= 0]
    clipped = 0
    for b, t in counted:
        logits = (STEP.weight @ hidden[b, t] + STEP.bias).tolist()
        norm = math.log(sum(math.exp(z) for z in logits))
        log_probs = [z - norm for z in logits]
        lp, old = log_probs[int(batch["shifted_labels"][b, t])], float(batch["old_logprobs"][b, t])
        ref, a = float(batch["ref_logprobs"][b, t]), float(batch["advantages"][b, t])
        r, d = math.exp(lp - old), ref - lp
        entropy = -sum(math.exp(x) * x for x in log_probs)
        kl = min(math.exp(d) - d - 1, 10.0)
        bounded = min(max(r, 0.8), 1.28)
        loss = max(-a * r, -a * bounded) if a > 0 else min(max(-a * r, -a * bounded), -a * 3.0)
        binds = (a > 0 and r > 1.28) or (a < 0 and (r < 0.8 or r > 3.0))
        clipped += binds
        w = 1 / len(counted)
        expected = {
            "log_prob": lp, "old_log_prob": old, "ref_log_prob": ref, "log_ratio": lp - old, "ratio": r,
            "advantage": a, "kl": kl, "entropy": entropy, "clipped": binds, "weight": w, "mask": True,
            "rollout_log_prob": old + 0.05, "loss": w * (loss + 0.3 * kl - 0.1 * entropy),
        }  # fmt: skip
        assert record.tensors().keys() == expected.keys()
        for name, value in expected.items():
            assert float(getattr(record, name)[b, t]) == pytest.approx(float(value), rel=1e-6, abs=1e-9), name
        shares = {"policy": w * loss, "kl": w * 0.3 * kl, "entropy": -w * 0.1 * entropy}
        for name, value in shares.items():
            assert float(record.shares[name][b, t]) == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert int(record.mask.sum()) == len(counted)
    metrics = reduce(output.extra)
    fractions = sum(metrics[f"clip_frac_{kind}"] for kind in ("low", "high", "dual"))
    assert clipped / len(counted) == pytest.approx(fractions)
    assert 0 < clipped < len(counted)


def test_a_sequence_level_loss_stands_at_its_tokens() -> None:
    """GSPO: each token of a sequence of n tokens holds `-A s / (S n)`, and a clipped sequence is clipped throughout."""
    cfg = {"loss_type": "gspo", "cliprange_low": 0.05, "cliprange_high": 0.05}
    _, output, _ = run(GRPOLossConfig(policy_loss_cfg=cfg, loss_reduction="sample", mode="chunk", chunk_size=3))
    record = output.per_token
    assert record.log_ratio is not None and record.advantage is not None
    assert record.loss is not None and record.clipped is not None
    seen = set()
    for mask, log_ratio, advantages, loss, clipped in zip(
        record.mask, record.log_ratio, record.advantage, record.loss, record.clipped, strict=True
    ):
        count = int(mask.sum())
        s, a = math.exp(float(log_ratio[mask].sum()) / count), float(advantages[mask][0])
        value = max(-a * s, -a * min(max(s, 0.95), 1.05))
        assert loss[mask].tolist() == pytest.approx([value / (len(record.mask) * count)] * count, rel=1e-9)
        binds = (a > 0 and s > 1.05) or (a < 0 and s < 0.95)
        assert clipped[mask].tolist() == [binds] * count
        seen.add(binds)
    assert seen == {True, False}


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["kl", "oreal", "gspo", "distill", "mixed"])
def test_garbage_at_ignored_positions_changes_no_bit(name: str, fill: float) -> None:
    cls, fields = CONFIGS[name]
    clean = run(cls(**fields, mode="chunk", chunk_size=4), fill=0.0)[1].per_token
    dirty = run(cls(**fields, mode="chunk", chunk_size=4), fill=fill)[1].per_token
    assert clean.tensors().keys() == dirty.tensors().keys()
    assert all(torch.equal(value, dirty.tensors()[key]) for key, value in clean.tensors().items())
    assert all(torch.equal(value, dirty.shares[key]) for key, value in clean.shares.items())


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_alone(mode: str) -> None:
    config = LogProbConfig(mode=mode, chunk_size=4, entropy_metric=mode != "liger")
    _, output, _ = run_log_probs(config)
    record = output.per_token
    assert torch.equal(record.log_prob, output.loss.detach())
    assert (record.loss, record.weight, record.ratio, record.shares) == (None, None, None, {})
    if mode != "liger":
        assert torch.equal(record.entropy, output.extra["entropy"])


def run_log_probs(config: LogProbConfig) -> Any:
    batch, hidden = data()
    context = config.build({"shifted_labels": batch["shifted_labels"]})
    return context, context.forward(hidden, STEP.weight, STEP.bias, return_tokens=True), None


def test_forward_log_probs_and_no_grad() -> None:
    config = GRPOLossConfig(use_kl_loss=True, mode="chunk", chunk_size=4)
    context, output, _ = run(config)
    expected = output.per_token
    again = context.forward_log_probs(expected.log_prob, return_tokens=True).per_token
    _, hidden = data()
    with torch.no_grad():
        silent = context.forward(hidden, STEP.weight, STEP.bias, return_tokens=True).per_token
    with torch.inference_mode():
        inferred = context.forward(hidden, STEP.weight, STEP.bias, return_tokens=True).per_token
    for record in (again, silent, inferred):
        for name, value in expected.tensors().items():
            torch.testing.assert_close(getattr(record, name), value, rtol=1e-12, atol=1e-12)


def test_values() -> None:
    config = ValueLossConfig(cliprange_value=0.2, loss_reduction="sample")
    batch, hidden = data()
    head = STEP.weight[:1]
    context = config.build(batch)
    type(context).build_batches([context])
    output = context.forward(hidden, head, return_tokens=True)
    record = output.per_token
    assert total(record) == pytest.approx(output.loss.item(), rel=1e-12)
    for b, t in record.mask.nonzero().tolist():
        v, old = float(hidden[b, t] @ head[0]), float(batch["values"][b, t])
        goal, n = float(batch["returns"][b, t]), int(record.mask[b].sum())
        near = min(max(v, old - 0.2), old + 0.2)
        expected = 0.5 * max((v - goal) ** 2, (near - goal) ** 2) / (len(record.mask) * n)
        assert float(record.value[b, t]) == pytest.approx(v)
        assert float(record.loss[b, t]) == pytest.approx(expected)
    values = torch.where(record.mask, record.value, float("nan"))
    assert torch.equal(context.forward_values(values, return_tokens=True).per_token.loss, record.loss)


@pytest.mark.parametrize("mode", MODES)
def test_actor_and_critic(mode: str) -> None:
    batch, hidden = data()
    context = ActorCriticLossConfig(mode=mode, chunk_size=4, vf_coef=0.4).build(batch)
    type(context).build_batches([context])
    output = context.forward(hidden, STEP.weight, STEP.bias, STEP.weight[:1], return_tokens=True)
    record = output.per_token
    assert total(record) == pytest.approx(output.loss.item(), rel=1e-5)
    metrics = reduce({name: part for name, part in output.extra.items() if isinstance(part, Metric)})
    for name in ("policy", "value"):
        assert float(record.shares[name].sum()) == pytest.approx(metrics[f"{name}_loss"], rel=1e-5)
    again = context.forward_log_probs(record.log_prob, values=record.value, return_tokens=True).per_token
    torch.testing.assert_close(again.loss, record.loss, rtol=1e-5, atol=1e-7)


def test_oreal_and_mixed_name_their_shares() -> None:
    _, output, _ = run(OrealLossConfig(pos_sft_loss_weight=0.7, use_kl_loss=True, mode="chunk"))
    metrics = reduce(output.extra)
    shares = {name: float(share.sum()) for name, share in output.per_token.shares.items()}
    policy = metrics["positive_policy_loss"] + metrics["negative_policy_loss"]
    expected = {"policy": policy, "sft": metrics["sft_loss"], "kl": metrics["kl_loss"]}
    assert shares == pytest.approx(expected)
    cls, fields = CONFIGS["mixed"]
    context, output, _ = run(cls(**fields, mode="chunk", chunk_size=4))
    record, metrics = output.per_token, reduce(output.extra)
    assert record.shares.keys() == {"rl/policy", "rl/kl", "sft/ce"}
    assert float(record.shares["sft/ce"].sum()) == pytest.approx(metrics["sft/loss"])
    assert torch.equal(record.mask, context.layout.put(torch.ones(context.layout.num_tokens)).bool())
    elsewhere = context.loss_kwargs.part_ids != 0
    assert bool((record.ratio[elsewhere] == 0).all())


def test_a_loss_that_returns_a_scalar() -> None:
    """XTuner's contract: the function weights its tokens itself; contributions come from its weights."""

    @register_policy_loss("scalar_of_tokens")
    def scalar(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, loss_weights: Tensor) -> Tensor:
        return (-(log_prob - old_log_prob).exp() * advantages * loss_weights).sum()

    try:
        _, output, _ = run(GRPOLossConfig(policy_loss_cfg={"loss_type": "scalar_of_tokens"}, mode="chunk"))
        record = output.per_token
        assert total(record) == pytest.approx(output.loss.item(), rel=1e-12)
        torch.testing.assert_close(record.loss, -record.ratio * record.advantage * record.weight)
        assert not record.clipped.any()
    finally:
        unregister_policy_loss("scalar_of_tokens")


def test_what_is_dropped_or_nan() -> None:
    batch, hidden = data()
    counted = (batch["shifted_labels"] >= 0).nonzero().tolist()
    (b, t), (c, u) = counted[0], counted[-1]
    batch["old_logprobs"][b, t] = -torch.inf
    batch["advantages"][c, u] = float("nan")
    context = GRPOLossConfig(mode="chunk").build(batch)
    type(context).build_batches([context])
    record = context.forward(hidden, STEP.weight, STEP.bias, return_tokens=True).per_token
    assert int(record.mask.sum()) == len(counted) - 1 and not record.mask[b, t]
    assert record.loss[b, t] == 0 and record.old_log_prob[b, t] == 0
    assert record.loss.isnan().nonzero().tolist() == [[c, u]]


def test_on_policy_without_old_log_probs() -> None:
    batch, hidden = data()
    del batch["old_logprobs"]
    context = GRPOLossConfig(on_policy=True, mode="chunk").build(batch)
    type(context).build_batches([context])
    record = context.forward(hidden, STEP.weight, STEP.bias, return_tokens=True).per_token
    assert record.old_log_prob is None
    assert bool((record.log_ratio == 0).all()) and torch.equal(record.ratio, record.mask.double())


def test_what_is_refused_and_what_is_missing() -> None:
    class OnLogits(rlloss.GRPOLossContext):
        def loss_fn(self, *args: Any) -> Any:
            return BaseLossContext.loss_fn(self, *args)

    batch, hidden = data()
    config = GRPOLossConfig(mode="chunk")
    context = config.build(batch)
    type(context).build_batches([context])
    own = OnLogits(config, context.loss_kwargs)
    with pytest.raises(ConfigError, match="OnLogits overrides loss_fn"):
        own.forward(hidden, STEP.weight, STEP.bias, return_tokens=True)
    with pytest.raises(BatchError, match="return_tokens=True"):
        _ = context.forward(hidden, STEP.weight, STEP.bias).per_token


def test_xtuners_context_and_pickle() -> None:
    batch, hidden = data()
    context = XTunerGRPOLossConfig(mode="chunk").build(batch)
    type(context).build_batches([context])
    loss, (_, extra) = context.forward(hidden, STEP.weight, STEP.bias, return_tokens=True)
    assert total(extra["per_token"]) == pytest.approx(loss.item(), rel=1e-12)
    twin = pickle.loads(pickle.dumps(extra["per_token"]))
    assert torch.equal(twin.loss, extra["per_token"].loss)


def test_one_kernel_that_gives_the_sum_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """liger_kernel's cross-entropy knows no tokens: they are computed beside it, and its loss stays."""
    config = CELossConfig(mode="liger")
    plain = run(config)[1].per_token

    def total_of(inputs: Any) -> Tensor:
        return -plain.log_prob.sum() + 0.0 * inputs.hidden[plain.mask].sum()

    monkeypatch.setattr("rlloss.losses.ce.fused_cross_entropy", total_of)
    _, output, _ = run(config)
    assert torch.equal(output.per_token.log_prob, plain.log_prob)
    assert total(output.per_token) == pytest.approx(output.loss.item(), rel=1e-5)


def test_a_token_that_nothing_pushes_is_not_clipped() -> None:
    batch, hidden = data()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    context = GRPOLossConfig(mode="chunk").build(batch)
    type(context).build_batches([context])
    record = context.forward(hidden, STEP.weight, STEP.bias, return_tokens=True).per_token
    assert not record.clipped.any() and bool((record.loss == 0).all())
