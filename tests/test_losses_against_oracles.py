"""Whole steps against the loops of `oracles.py`: random data, every option at once, loss and all gradients, float64."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import oracles
import oracles_policy as policy
from oracles_policy import Tokens
from rlloss import CELossConfig, GRPOLossConfig
from steps import HEADS, Step, run_step

WIDTH, WORDS = 4, 9
Head = dict[str, Any]


@dataclass
class Sequence:
    """One sequence of valid and ignored tokens; all lists have its length, ignored labels are -100."""

    hidden: oracles.Matrix
    labels: list[int]
    old: list[float]
    ref: list[float]
    advantages: list[float]
    factors: list[float]
    temperature: list[float]

    @property
    def valid(self) -> list[int]:
        return [t for t, label in enumerate(self.labels) if label != -100]


def draw(seed: int, lengths: list[int], head: oracles.Head) -> list[Sequence]:
    """Random sequences whose ratios keep away from the clip bounds."""
    rng = random.Random(seed)
    sequences = []
    for n in lengths:
        hidden = [[rng.gauss(0.0, 1.0) for _ in range(WIDTH)] for _ in range(n)]
        labels = [rng.randrange(WORDS) for _ in range(n)]
        temperature = [rng.uniform(0.6, 1.7) for _ in range(n)]
        new, _ = oracles.head_forward(head, hidden, labels, temperature)
        ratios = [
            rng.choice([0.05, 0.7, 0.9, 1.05, 1.24, 1.4, 4.5]) * math.exp(rng.uniform(-0.01, 0.01)) for _ in range(n)
        ]
        masked = [rng.random() < 0.25 for _ in range(n)]
        sequences.append(
            Sequence(
                hidden,
                [-100 if m else y for m, y in zip(masked, labels, strict=True)],
                [lp - math.log(r) for lp, r in zip(new, ratios, strict=True)],
                [lp + rng.gauss(0.0, 0.5) for lp in new],
                [rng.gauss(0.3, 1.0) for _ in range(n)],
                [rng.uniform(0.2, 2.0) for _ in range(n)],
                temperature,
            )
        )
    return sequences


def random_head(seed: int, plain: bool) -> oracles.Head:
    rng = random.Random(seed)
    weight = [[rng.gauss(0.0, 0.8) for _ in range(WIDTH)] for _ in range(WORDS)]
    bias = [rng.gauss(0.0, 0.5) for _ in range(WORDS)]
    return oracles.Head(weight, bias) if plain else oracles.Head(weight, bias, scale=0.7, softcap=2.5)


def expected_step(sequences: list[Sequence], head: oracles.Head, options: dict[str, Any]) -> Step:
    """The step by loops: loss, hidden gradient of every token (0 where ignored), head and bias gradient."""
    weights = oracles.reduction_weights([len(s.valid) for s in sequences], options["reduction"])
    loss, rows = 0.0, []
    weight_grad = torch.zeros(WORDS, WIDTH, dtype=torch.float64)
    bias_grad = torch.zeros(WORDS, dtype=torch.float64)
    for sequence, weight in zip(sequences, weights, strict=True):
        pick = lambda values, places=sequence.valid: [values[t] for t in places]  # noqa: E731
        hidden, labels, temperature = pick(sequence.hidden), pick(sequence.labels), pick(sequence.temperature)
        new, spread = oracles.head_forward(head, hidden, labels, temperature)
        scale = [weight * f for f in pick(sequence.factors)]
        values, g = policy.vanilla(Tokens(new, pick(sequence.old), pick(sequence.advantages), scale), **options["clip"])
        kl = [oracles.kl(lp, ref, options["kl"]) for lp, ref in zip(new, pick(sequence.ref), strict=True)]
        loss += math.fsum(w * v for w, v in zip(scale, values, strict=True))
        loss += weight * math.fsum(
            options["kl_coef"] * k - options["entropy_coef"] * h for (k, _), h in zip(kl, spread, strict=True)
        )
        g = [a + weight * options["kl_coef"] * slope for a, (_, slope) in zip(g, kl, strict=True)]
        e = [-weight * options["entropy_coef"]] * len(new)
        grads = oracles.head_backward(head, hidden, labels, temperature, g, e)
        weight_grad += torch.tensor(grads.weight, dtype=torch.float64)
        bias_grad += torch.tensor(grads.bias, dtype=torch.float64)
        found = dict(zip(sequence.valid, grads.hidden, strict=True))
        rows += [found.get(t, [0.0] * WIDTH) for t in range(len(sequence.labels))]
    return Step([loss], [torch.tensor([rows], dtype=torch.float64)], weight_grad, bias_grad)


def typed(sequences: list[Sequence], per_token_temperature: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """The same sequences as one packed row."""
    joined = lambda name: [x for s in sequences for x in getattr(s, name)]  # noqa: E731
    number = lambda name: torch.tensor([joined(name)], dtype=torch.float64)  # noqa: E731
    batch: dict[str, Any] = {
        "shifted_labels": torch.tensor([joined("labels")]),
        "num_tokens": [len(s.labels) for s in sequences],
        "old_logprobs": number("old"),
        "ref_logprobs": number("ref"),
        "advantages": number("advantages"),
        "rollout_is_weights": number("factors"),
    }
    return batch | ({"temperature": number("temperature")} if per_token_temperature else {}), number("hidden")


def assert_step(step: Step, wanted: Step, tolerance: float) -> None:
    assert step.loss == pytest.approx(wanted.loss, rel=tolerance, abs=tolerance)
    assert step.bias_grad is not None
    assert wanted.bias_grad is not None
    pairs = [
        (torch.cat(step.hidden_grads, dim=1), torch.cat(wanted.hidden_grads, dim=1)),
        (step.weight_grad, wanted.weight_grad),
        (step.bias_grad, wanted.bias_grad),
    ]
    for got, right in pairs:
        assert (got - right).abs().max() <= tolerance * right.abs().max()


CLIPS = {
    "dapo": {"low": 0.2, "high": 0.28, "dual": 3.0},
    "no-dual": {"low": 0.1, "high": 0.3, "dual": None},
    "narrow": {"low": 0.2, "high": 0.2, "dual": 3.0, "log_ratio_bounds": (-1.0, 1.0)},
}


def config_of(head: Head, model: oracles.Head, options: dict[str, Any]) -> GRPOLossConfig:
    clip = options["clip"]
    bounds = clip.get("log_ratio_bounds", (-20.0, 20.0))
    rule = {"cliprange_low": clip["low"], "cliprange_high": clip["high"], "clip_ratio_c": clip["dual"]}
    rule |= {"log_prob_diff_min": bounds[0], "log_prob_diff_max": bounds[1]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not depend on the reference")
        return GRPOLossConfig(
            policy_loss_cfg=rule,
            use_kl_loss=True,
            kl_loss_coef=options["kl_coef"],
            kl_loss_type=options["kl"],
            entropy_coef=options["entropy_coef"],
            loss_reduction=options["reduction"],
            logit_scale=model.scale,
            logit_softcap=model.softcap,
            **head,
        )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k3+"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("head", [h for h in HEADS.values() if h["mode"] != "liger"], ids=[*HEADS][:-1])
@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_everything_at_once(seed: int, kind: str, clip: str, head: Head, reduction: str) -> None:
    options = {"clip": CLIPS[clip], "kl": kind, "kl_coef": 0.3, "entropy_coef": 0.2, "reduction": reduction}
    model = random_head(seed, plain=False)
    sequences = draw(seed, [3, 1, 6, 4], model)
    batch, hidden = typed(sequences, per_token_temperature=True)
    weight, bias = (torch.tensor(x, dtype=torch.float64) for x in (model.weight, model.bias))
    # two micro-batches: the first two sequences, and the rest
    parts = [typed(sequences[:2], True), typed(sequences[2:], True)]
    config = config_of(head, model, options)
    wanted = expected_step(sequences, model, options)
    assert_step(run_step(config, [batch], [hidden], weight, bias), wanted, 1e-10)
    assert_step(run_step(config, [b for b, _ in parts], [h for _, h in parts], weight, bias), wanted, 1e-10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_without_entropy_every_mode(seed: int, temperature: float, head: Head) -> None:
    options = {"clip": CLIPS["dapo"], "kl": "k3", "kl_coef": 0.3, "entropy_coef": 0.0, "reduction": "token"}
    model = random_head(seed, plain=True)
    sequences = draw(seed, [3, 1, 6, 4], model)
    for sequence in sequences:
        sequence.temperature = [temperature] * len(sequence.labels)
    batch, hidden = typed(sequences, per_token_temperature=False)
    weight, bias = (torch.tensor(x, dtype=torch.float64) for x in (model.weight, model.bias))
    config = config_of(head, model, options).model_copy(update={"temperature": temperature})
    step = run_step(config, [batch], [hidden], weight, bias)
    assert_step(step, expected_step(sequences, model, options), 2e-6 if head["mode"] == "liger" else 1e-10)


@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_cross_entropy(reduction: str, head: Head) -> None:
    model = random_head(5, plain=True)
    sequences = draw(5, [2, 5, 3], model)
    batch, hidden = typed(sequences, per_token_temperature=False)
    weight, bias = (torch.tensor(x, dtype=torch.float64) for x in (model.weight, model.bias))
    weights = oracles.reduction_weights([len(s.valid) for s in sequences], reduction)
    loss, bias_grad = 0.0, [0.0] * WORDS
    for sequence, share in zip(sequences, weights, strict=True):
        rows, labels = [sequence.hidden[t] for t in sequence.valid], [sequence.labels[t] for t in sequence.valid]
        ones = [1.0] * len(rows)
        loss -= share * math.fsum(oracles.head_forward(model, rows, labels, ones)[0])
        grads = oracles.head_backward(model, rows, labels, ones, [-share] * len(rows), [0.0] * len(rows))
        bias_grad = [a + b for a, b in zip(bias_grad, grads.bias, strict=True)]
    batch = {key: batch[key] for key in ("shifted_labels", "num_tokens")}
    step = run_step(CELossConfig(loss_reduction=reduction, **head), [batch], [hidden], weight, bias)
    # the token weights of a batch without float64 tensors are float32
    assert step.loss == pytest.approx(loss, rel=1e-6)
    assert step.bias_grad is not None
    assert step.bias_grad.tolist() == pytest.approx(bias_grad, rel=1e-5, abs=1e-6)
