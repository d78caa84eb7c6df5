"""Every policy loss against its oracle: value and gradient of random packed sequences, float64."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oracles
import oracles_policy as policy
from batches import built_in_policy_losses
from golden_steps import WAYS, run_log_probs
from oracles_policy import Tokens
from rlloss import GRPOLossConfig, kl_penalty
from rlloss.errors import BatchError, ConfigError, UnknownNameError
from rlloss.functional.kl import KL_KINDS, ignores_reference
from rlloss.functional.opd import iw_opd_weights
from rlloss.functional.policy import bounded_ratio, clipped_surrogate, geometric_surrogate, log_ratio_of
from rlloss.functional.policy_quadratic import quadratic_loss
from rlloss.functional.policy_score import gamma_factor, on_policy_sequences, within_divergence, within_variation
from rlloss.layout import Segments

CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.28}
CASES: dict[str, tuple[dict[str, Any], Callable[[Tokens], policy.Result]]] = {
    "vanilla": (CLIP, lambda t: policy.vanilla(t, 0.2, 0.28, 3.0)),
    "vanilla-product": (
        CLIP | {"ratio": "sequence_product"},
        lambda t: policy.vanilla_sequence(t, "product", 0.2, 0.28),
    ),
    "vanilla-mean": (CLIP | {"ratio": "sequence_mean"}, lambda t: policy.vanilla_sequence(t, "mean", 0.2, 0.28)),
    "importance": ({}, policy.importance),
    "reinforce": ({}, policy.reinforce),
    "cispo": (CLIP, lambda t: policy.cispo(t, 0.8, 1.28)),
    "cispo-default": ({}, lambda t: policy.cispo(t, 0.0, 1.2)),
    "cispo-verl": ({"cliprange_low": 10.0}, lambda t: policy.cispo(t, -9.0, 1.2)),  # as its own example has it
    "cispo-cap": ({"ratio_cap": 0.9}, lambda t: policy.cispo(t, 0.0, 0.9)),
    "sapo": ({}, policy.sapo),
    "dppo_tv": ({"divergence_high": 0.1, "divergence_low": 0.05}, lambda t: policy.dppo_tv(t, 0.05, 0.1)),
    "dppo_kl": ({"divergence_high": 0.1, "divergence_low": 0.05}, lambda t: policy.dppo_kl(t, 0.05, 0.1)),
    "dro": ({"beta": 0.3}, lambda t: policy.quadratic(t, 0.3)),
    "dro-sequence": ({"beta": 0.3, "level": "sequence"}, lambda t: policy.quadratic_sequence(t, 0.3)),
    "opmd": ({}, lambda t: policy.quadratic_sequence(t, 0.1)),
    "opmd-token": ({"level": "token"}, lambda t: policy.quadratic(t, 0.1)),
    "topr": ({}, lambda t: policy.topr(t, "sequence")),
    "topr-token": ({"level": "token"}, lambda t: policy.topr(t, "token")),
    "gspo": (CLIP, lambda t: policy.gspo(t, 0.2, 0.28)),
    "gspo-mean": (CLIP | {"ratio": "sequence_mean"}, lambda t: policy.gspo(t, 0.2, 0.28, token_gradient=False)),
    "gmpo": ({}, policy.gmpo),
    "vespo": ({}, policy.vespo),
    "vespo-odd": (
        {"k_pos": 1.1, "lambda_pos": 1.3, "k_neg": 0.7, "lambda_neg": 2.3},
        lambda t: policy.vespo(t, (1.1, 1.3), (0.7, 2.3)),
    ),
}
LENGTHS = [4, 1, 6, 3]


def draw(seed: int) -> list[Tokens]:
    rng = random.Random(seed)
    shares = oracles.reduction_weights(LENGTHS, "square")
    sequences = []
    for n, share in zip(LENGTHS, shares, strict=True):
        log_prob = [rng.uniform(-3.0, -0.2) for _ in range(n)]
        old = [lp - rng.choice([-1.5, -0.3, -0.1, 0.0, 0.15, 0.4, 1.3]) - rng.uniform(-0.02, 0.02) for lp in log_prob]
        advantage = [rng.choice([-2.0, -0.5, 0.0, 0.7, 1.5]) for _ in range(n)]
        sequences.append(Tokens(log_prob, old, advantage, [share] * n))
    return sequences


def packed(sequences: list[Tokens]) -> tuple[dict[str, Any], torch.Tensor]:
    def row(name: str) -> torch.Tensor:
        return torch.tensor(
            [list(itertools.chain.from_iterable(getattr(s, name) for s in sequences))], dtype=torch.float64
        )

    batch = {
        "shifted_labels": torch.zeros(1, sum(LENGTHS), dtype=torch.long),
        "num_tokens": LENGTHS,
        "old_logprobs": row("old"),
        "advantages": row("advantage"),
    }
    return batch, row("log_prob")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name: str, way: str) -> None:
    fields, oracle = CASES[name]
    sequences = draw(len(name))
    batch, log_probs = packed(sequences)
    config = {"policy_loss_cfg": {"loss_type": name.partition("-")[0], **fields}, "loss_reduction": "square"}
    if name.partition("-")[0] == "vanilla" and "ratio" in fields:
        config["policy_loss_cfg"]["clip_ratio_c"] = None
    found = run_log_probs(config, batch, log_probs, way=way)
    total, grads = 0.0, []
    for tokens in sequences:
        losses, slopes = oracle(tokens)
        total += sum(w * loss for w, loss in zip(tokens.weight, losses, strict=True))
        grads += slopes
    assert float(found.loss) == pytest.approx(total, rel=1e-10, abs=1e-12)
    assert found.grad[0].tolist() == pytest.approx(grads, rel=1e-9, abs=1e-11)


def test_every_loss_has_an_oracle() -> None:
    # Those two choose tokens of the whole step, and have a test of their own.
    covered = {name.partition("-")[0] for name in CASES} | {"clip_cov", "kl_cov"}
    assert set(built_in_policy_losses()) == covered


@pytest.mark.parametrize("ratio", ["token", "sequence_mean", "sequence_product"])
def test_kl_with_a_ratio(ratio: str) -> None:
    sequences = draw(7)
    batch, log_probs = packed(sequences)
    batch["ref_logprobs"] = log_probs - 0.3 * torch.sin(torch.arange(14.0, dtype=torch.float64))
    config = {
        "policy_loss_cfg": {"loss_type": "reinforce"},
        "loss_reduction": "sum",
        "use_kl_loss": True,
        "kl_loss_coef": 1.0,
        "kl_importance": ratio,
    }
    batch["advantages"] = torch.zeros_like(log_probs)
    found = run_log_probs(config, batch, log_probs)
    leaf = log_probs.clone().requires_grad_()
    parts = []
    spans = zip(
        (leaf - batch["old_logprobs"])[0].split(LENGTHS),
        kl_penalty(leaf, batch["ref_logprobs"], "k3")[0].split(LENGTHS),
        strict=True,
    )
    for difference, kl in spans:
        exponent = {"token": difference, "sequence_mean": difference.mean(), "sequence_product": difference.sum()}[
            ratio
        ]
        parts.append((exponent.exp() * kl).sum())
    total = torch.stack(parts).sum()
    total.backward()
    torch.testing.assert_close(found.loss, total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.grad, leaf.grad, rtol=1e-12, atol=1e-12)


def test_the_paper_of_a_sequence_loss_is_named() -> None:
    with pytest.warns(UserWarning, match="'sample'"):
        GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_type": "gsp"}, "gspo"),
        ({"loss_type": "cispo", "cliprange_hi": 0.2}, "cliprange_high"),
        ({"loss_type": "dro"}, "beta"),
        ({"loss_type": "sapo", "tau_pos": 0.0}, "tau_pos"),
        ({"loss_type": "clip_cov", "clip_cov_lb": 5.0, "clip_cov_ub": 1.0}, "clip_cov_lb"),
        ({"loss_type": "clip_cov", "clip_cov_lb": 1.0, "clip_cov_ub": 1.0}, "clip_cov_lb"),
        ({"loss_type": "vanilla", "log_prob_diff_min": 0.0, "log_prob_diff_max": 0.0}, "log_prob_diff_min"),
        ({"loss_type": "gspo", "ratio": "token"}, "ratio"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        GRPOLossConfig(policy_loss_cfg=fields, loss_reduction="token")


def test_a_selection_needs_log_probs() -> None:
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "kl_cov"}, on_policy=True)
    batch = {"shifted_labels": torch.zeros(2, 2, dtype=torch.long), "advantages": torch.ones(2)}
    with pytest.raises(BatchError, match="selection_logprobs"):
        config.loss_ctx_cls.build_batches([config.build(batch)])


def test_iw_opd_weights_look_at_counted_tokens_only() -> None:
    gap = torch.tensor([[1.0, -3.0, 4.0, float("nan")]])
    weights = iw_opd_weights(gap, torch.tensor([[1, 1, 1, 0]]), gamma=0.5)
    assert weights[0].tolist() == pytest.approx([1.5, 1.5 - 0.5 / 8, 1.5 - 0.5 * 4 / 8, 0.0])


def test_kl_limits_and_who_gets_a_gradient() -> None:
    log_probs = torch.tensor([-30.0, -20.5, -19.5, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.0, 0.0, -22.0, -30.0], dtype=torch.float64, requires_grad=True)
    for cap in (None, 5.0):
        value = kl_penalty(log_probs, reference, "k3", cap)
        pairs = [oracles.kl(a, b, "k3", cap) for a, b in zip(log_probs.tolist(), reference.tolist(), strict=True)]
        assert value.tolist() == pytest.approx([v for v, _ in pairs], rel=1e-12)
        (grad,) = torch.autograd.grad(value.sum(), log_probs)
        assert grad.tolist() == pytest.approx([g for _, g in pairs], rel=1e-12)
    kl_penalty(log_probs, reference, "k2").sum().backward()
    assert reference.grad is None


def test_a_bound_itself_lies_inside() -> None:
    log_ratio = torch.tensor([-20.0, 20.0, -20.5, 20.5], dtype=torch.float64, requires_grad=True)
    ratio = bounded_ratio(log_ratio)
    ratio.sum().backward()
    assert log_ratio.grad is not None
    pairs = [policy.bounded_ratio(d) for d in log_ratio.tolist()]
    assert ratio.tolist() == pytest.approx([r for r, _ in pairs], rel=1e-12)
    assert log_ratio.grad.tolist() == pytest.approx([slope for _, slope in pairs], rel=1e-12)


def test_iw_opd_defaults_and_gradients() -> None:
    gap = torch.tensor([[1.0, -3.0], [0.0, 0.0]], requires_grad=True)
    weights = iw_opd_weights(gap, torch.ones(2, 2))
    assert weights.tolist() == [[1.5, 1.375], [1.5, 1.5]]  # without any disagreement every token is early
    assert not weights.requires_grad
    small = iw_opd_weights(torch.full((1, 2), 1e-6), torch.ones(1, 2))
    assert small[0].tolist() == pytest.approx([1.5, 1.25])


@pytest.mark.parametrize("kind", ["token", "sequence_mean", "sequence_product", "sequence_token"])
def test_the_old_policy_gets_no_gradient(kind: Any) -> None:
    old = torch.zeros(3, requires_grad=True)
    new = torch.zeros(3, requires_grad=True)
    log_ratio_of(new, old, Segments(torch.tensor([0, 0, 1]), 2), kind).sum().backward()
    quadratic_loss(new, old, torch.ones(3), 0.5).sum().backward()
    assert old.grad is None
    assert new.grad is not None


def test_trust_region_ends() -> None:
    sure = torch.zeros(2, dtype=torch.float64)  # probability 1, where log(1 - p) would be infinite
    half = torch.full((2,), math.log(0.5), dtype=torch.float64)
    up, down = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0])
    assert within_variation(sure, half, up, 0.0, 0.5).all()
    assert within_variation(half, sure, down, 0.5, 0.0).all()
    distance = 0.5 * math.log(0.5) + 0.5 * math.log((0.5 + 1e-8) / 1e-8)
    assert within_divergence(sure, half, up, 0.0, distance + 1e-6).all()
    assert not within_divergence(sure, half, up, 0.0, distance - 1e-6).any()
    assert within_divergence(half, sure, down, 0.7, 0.0).all()
    assert not within_divergence(half, sure, down, 0.69, 0.0).any()
    above = torch.full((2,), 1e-6, dtype=torch.float64)  # a log-prob that rounding lifted above 0
    assert within_divergence(above, half, up, 0.0, 100.0).all()
    assert within_divergence(half, above, down, 100.0, 0.0).all()


def test_clip_fractions_count_where_the_clip_binds() -> None:
    ratios = torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 1.0, 0.5, 2.0]).log()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 1.0, 0.0, 0.0])
    segments = Segments(torch.arange(10), 10)
    found = [
        clipped_surrogate(ratios.exp(), advantages, 0.2, 0.2, dual_clip=1.9)[1],
        geometric_surrogate(ratios, advantages, segments, (0.2, 0.2), (-20.0, 20.0))[1],
    ]
    for metrics in found:
        assert float(metrics["clip_frac_low"]) == pytest.approx(2 / 10)
        assert float(metrics["clip_frac_high"]) == pytest.approx(3 / 10)
    assert float(found[0]["clip_frac_dual"]) == pytest.approx(1 / 10)
    at_the_ends, ends = Segments(torch.arange(2), 2), torch.tensor([0.25, -0.25])
    _, metrics = geometric_surrogate(ends, ends.sign(), at_the_ends, (0.25, 0.25), (-20.0, 20.0))
    assert float(metrics["clip_frac_low"]) == float(metrics["clip_frac_high"]) == 0.0
    at_the_ceiling = clipped_surrogate(torch.tensor([3.0]), torch.tensor([-1.0]), 0.2, 0.2, dual_clip=3.0)[1]
    assert float(at_the_ceiling["clip_frac_dual"]) == 0.0


def test_factors_have_no_gradient() -> None:
    log_ratio = torch.zeros(2, requires_grad=True)
    segments = Segments(torch.tensor([0, 0]), 1)
    assert not gamma_factor(log_ratio, torch.ones(2), segments, (2.0, 3.0), (3.0, 2.0)).requires_grad
    none = gamma_factor(log_ratio, torch.ones(2), segments, (2.0, 3.0), (3.0, 2.0), torch.tensor([0.0, 1.0]))
    assert float(none[0]) == pytest.approx(math.exp(3.0) * 1e-16, rel=1e-4)


def test_the_off_policy_limit_itself_is_near() -> None:
    sampled, now = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -2.0, -2.0])
    segments = Segments(torch.arange(3), 3)
    keep = on_policy_sequences(now, sampled, torch.tensor([-1.0, -1.0, 0.0]), segments, 0.5)
    assert keep.tolist() == [True, False, True]


def test_an_advantage_of_zero_takes_the_factor_of_the_positive_ones() -> None:
    log_ratio = torch.tensor([math.log(2.0)], dtype=torch.float64)
    factor = gamma_factor(log_ratio, torch.zeros(1), Segments(torch.tensor([0]), 1), (2.0, 3.0), (1.0, 5.0))
    assert float(factor) == pytest.approx(4.0 * math.exp(-3.0), rel=1e-14)


def test_the_gradient_of_plain_k1_alone_ignores_the_reference() -> None:
    """Of `d = log_prob - ref` it is 1 whatever d is; straight-through k1 has that of k2, which is d."""
    kinds = [name + plus for name in KL_KINDS for plus in ("", "+")]
    assert {kind for kind in kinds if ignores_reference(kind)} == {"k1", "kl"}
    for kind in kinds:
        slopes = []
        for ref in (-1.5, -2.25):
            log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
            kl_penalty(log_prob, torch.tensor([ref]), kind).backward()
            slopes.append(log_prob.grad)
        # |d| has one slope on one side of 0, and another on the other.
        assert torch.equal(*slopes) == (ignores_reference(kind) or kind == "abs"), kind
