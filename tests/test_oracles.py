"""The oracles themselves: gradients against central differences, and values that can be computed by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

import oracles
import oracles_policy as policy
from oracles_policy import Tokens

STEP = 1e-6


def difference(function: Callable[[float], float], at: float) -> float:
    """Central difference with error O(STEP^2)."""
    return (function(at + STEP) - function(at - STEP)) / (2.0 * STEP)


def random_tokens(n: int, seed: int, spread: float = 0.4) -> Tokens:
    rng = random.Random(seed)
    old = [-rng.uniform(0.3, 3.0) for _ in range(n)]
    log_prob = [min(o + rng.uniform(-spread, spread), -1e-3) for o in old]
    return Tokens(log_prob, old, [rng.gauss(0.0, 1.0) for _ in range(n)], [rng.uniform(0.1, 1.0) for _ in range(n)])


def moved(tokens: Tokens, t: int, value: float) -> Tokens:
    return Tokens([*tokens.log_prob[:t], value, *tokens.log_prob[t + 1 :]], tokens.old, tokens.advantage, tokens.weight)


# Losses without a stop-gradient: the gradient is that of the value.
PLAIN = {
    "vanilla": policy.vanilla,
    "vanilla-no-dual": lambda t: policy.vanilla(t, 0.1, 0.3, None),
    "vanilla-dual-1.1": lambda t: policy.vanilla(t, dual=1.1),
    "vanilla-narrow": lambda t: policy.vanilla(t, log_ratio_bounds=(-0.1, 0.1)),
    "reinforce": policy.reinforce,
    "importance": policy.importance,
    "sapo": policy.sapo,
    "quadratic": lambda t: policy.quadratic(t, 0.3),
    "gspo-sequence": lambda t: policy.gspo(t, 0.01, 0.02, token_gradient=False),
    "gmpo": lambda t: policy.gmpo(t, 0.2, 0.3),
    "clip_cov": lambda t: policy.clip_cov(t, {1, 3}),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PLAIN)
def test_gradient_is_that_of_the_value(name: str, seed: int) -> None:
    tokens = random_tokens(7, seed)

    def total(t: int, value: float) -> float:
        losses, _ = PLAIN[name](moved(tokens, t, value))
        return math.fsum(w * loss for w, loss in zip(tokens.weight, losses, strict=True))

    _, grads = PLAIN[name](tokens)
    for t, grad in enumerate(grads):
        assert grad == pytest.approx(difference(lambda x, t=t: total(t, x), tokens.log_prob[t]), abs=1e-7)


# Losses `-A sg(factor) log_prob`: value = -A factor log_prob, gradient = -A factor, so their quotient is log_prob.
STOPPED = {
    "cispo": policy.cispo,
    "dppo_tv": policy.dppo_tv,
    "dppo_kl": policy.dppo_kl,
    "topr-token": lambda t: policy.topr(t, "token"),
    "topr-sequence": policy.topr,
    "vespo": policy.vespo,
}


@pytest.mark.parametrize("name", STOPPED)
def test_stopped_factor(name: str) -> None:
    tokens = random_tokens(9, 3)
    losses, grads = STOPPED[name](tokens)
    assert any(grads)
    for loss, grad, lp, w in zip(losses, grads, tokens.log_prob, tokens.weight, strict=True):
        assert grad * lp == pytest.approx(loss * w, abs=1e-12)


def test_gspo_forms_agree_for_one_advantage_and_one_weight() -> None:
    tokens = random_tokens(5, 1, spread=1e-4)
    tokens.advantage, tokens.weight = [0.7] * 5, [0.2] * 5
    assert policy.gspo(tokens)[1] == pytest.approx(policy.gspo(tokens, token_gradient=False)[1], rel=1e-12)


def test_kl_cov_chooses_the_largest_covariance() -> None:
    tokens = Tokens([-1.0, -2.0, -3.0, -0.1], [-1.0, -2.0, -3.0, -0.2], [0.0, 0.0, 0.1, 3.0], [1.0] * 4)
    losses, grads = policy.kl_cov(tokens, 0.25, 0.5)
    plain, plain_grads = policy.importance(tokens)
    assert losses == pytest.approx([*plain[:3], plain[3] + 0.5 * 0.1])
    assert grads == pytest.approx([*plain_grads[:3], plain_grads[3] + 0.5])
    assert policy.clip_cov_candidates(tokens, (1.0, 100.0), 0.2, 0.2) == {3}


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "mse", "low_var_kl", "kl"])
def test_kl_gradient(kind: str) -> None:
    for d in (-3.0, -2.0, -0.3, 0.4, 2.0, 13.0, 25.0):
        _, grad = oracles.kl(d - 1.0, -1.0, kind)
        assert grad == pytest.approx(difference(lambda x: oracles.kl(x, -1.0, kind)[0], d - 1.0), abs=1e-7)
        assert oracles.kl(d - 1.0, -1.0, f"{kind}+")[1] == pytest.approx(d)


def test_reductions_by_hand() -> None:
    lengths = [1, 3, 0]
    expected = {
        "token": [1 / 4, 1 / 4, 0.0],
        "sample": [1 / 2, 1 / 6, 0.0],
        "square": [1 / (1 + 3**0.5), 3**-0.5 / (1 + 3**0.5), 0.0],
        "sequence_sum": [1 / 2, 1 / 2, 0.0],
        "constant": [1 / 8, 1 / 8, 0.0],
        "prompt": [1 / 4, 1 / 4, 0.0],
        "sum": [1.0, 1.0, 0.0],
    }
    for name, weights in expected.items():
        assert oracles.reduction_weights(lengths, name, [0, 0, 1], 4.0) == pytest.approx(weights), name
    assert oracles.reduction_weights(lengths, "prompt", [0, 1, 1]) == pytest.approx([1 / 2, 1 / 6, 0.0])


def test_head_gradients() -> None:
    rng = random.Random(0)
    matrix = lambda rows, columns: [[rng.gauss(0.0, 0.7) for _ in range(columns)] for _ in range(rows)]  # noqa: E731
    head = oracles.Head(matrix(5, 3), [rng.gauss(0.0, 0.3) for _ in range(5)], scale=0.8, softcap=1.5)
    hidden, labels, temperature = matrix(2, 3), [4, 1], [0.7, 1.3]
    g, e = [0.9, -0.4], [0.2, 0.5]

    def total() -> float:
        log_probs, spread = oracles.head_forward(head, hidden, labels, temperature)
        return oracles.dot(g, log_probs) + oracles.dot(e, spread)

    grads = oracles.head_backward(head, hidden, labels, temperature, g, e)
    assert head.bias is not None
    pairs = [
        *zip(hidden, grads.hidden, strict=True),
        *zip(head.weight, grads.weight, strict=True),
        (head.bias, grads.bias),
    ]
    for values, analytic in pairs:
        for k, grad in enumerate(analytic):

            def at(x: float, values: list[float] = values, k: int = k) -> float:
                before, values[k] = values[k], x
                result = total()
                values[k] = before
                return result

            assert grad == pytest.approx(difference(at, values[k]), abs=1e-8)
