"""Policy losses as loops over the tokens of one sequence, from their papers; nothing of rlloss is imported.

Each function takes a `Tokens` record of one sequence and returns the loss of every token and the gradient of
`sum_t weight_t * loss_t` in every log-prob (what stands under a stop-gradient in the paper has none). Clip bounds
`low` and `high` are offsets from 1. The two covariance losses look at a whole step: they take its tokens as one
sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Vector = list[float]
Result = tuple[Vector, Vector]


@dataclass
class Tokens:
    """Valid tokens of one sequence: current and old log-prob, advantage, and the weight of each in the total."""

    log_prob: Vector
    old: Vector
    advantage: Vector
    weight: Vector

    def __post_init__(self) -> None:
        assert len(self.log_prob) == len(self.old) == len(self.advantage) == len(self.weight)

    def __len__(self) -> int:
        return len(self.log_prob)

    @property
    def log_ratio(self) -> Vector:
        return [new - old for new, old in zip(self.log_prob, self.old, strict=True)]


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def bounded_ratio(log_ratio: float, low: float = -20.0, high: float = 20.0) -> tuple[float, float]:
    """`r = exp(clamp(d))` and `dr/dd`, which is 0 outside the bounds."""
    ratio = math.exp(clamp(log_ratio, low, high))
    return ratio, (ratio if low <= log_ratio <= high else 0.0)


def clipped_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """`max(-A r, -A clip(r))`, for A < 0 at most `-A dual`; and its derivative in r (arXiv:1707.06347 eq. 7)."""
    unclipped, clipped = -advantage * ratio, -advantage * clamp(ratio, 1.0 - low, 1.0 + high)
    loss, slope = (unclipped, -advantage) if unclipped >= clipped else (clipped, 0.0)
    if dual is not None and advantage < 0.0 and loss > -advantage * dual:
        loss, slope = -advantage * dual, 0.0
    return loss, slope


def vanilla(
    tokens: Tokens,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = 3.0,
    log_ratio_bounds: tuple[float, float] = (-20.0, 20.0),
) -> Result:
    """PPO clip, asymmetric (arXiv:2503.14476), with dual clip (arXiv:1912.09729 eq. 5) and a clamped log-ratio."""
    losses, grads = [], []
    for d, a, w in zip(tokens.log_ratio, tokens.advantage, tokens.weight, strict=True):
        ratio, slope = bounded_ratio(d, *log_ratio_bounds)
        loss, inner = clipped_loss(ratio, a, low, high, dual)
        losses.append(loss)
        grads.append(w * inner * slope)
    return losses, grads


def reinforce(tokens: Tokens) -> Result:
    """`-A log_prob`."""
    rows = list(zip(tokens.log_prob, tokens.advantage, tokens.weight, strict=True))
    return [-a * lp for lp, a, _ in rows], [-a * w for _, a, w in rows]


def importance(tokens: Tokens) -> Result:
    """`-A r`, never clipped."""
    losses, grads = [], []
    for d, a, w in zip(tokens.log_ratio, tokens.advantage, tokens.weight, strict=True):
        ratio, slope = bounded_ratio(d)
        losses.append(-a * ratio)
        grads.append(-a * slope * w)
    return losses, grads


def _weighted_reinforce(tokens: Tokens, factors: Vector) -> Result:
    """`-A sg(factor) log_prob`."""
    rows = list(zip(factors, tokens.log_prob, tokens.advantage, tokens.weight, strict=True))
    return [-f * a * lp for f, lp, a, _ in rows], [-f * a * w for f, _, a, w in rows]


def cispo(tokens: Tokens, lowest: float = 0.8, highest: float = 1.2) -> Result:
    """`-sg(clip(r, lowest, highest)) A log_prob`, bounds absolute (arXiv:2506.13585 eq. 4-5)."""
    return _weighted_reinforce(tokens, [clamp(bounded_ratio(d)[0], lowest, highest) for d in tokens.log_ratio])


def sapo(tokens: Tokens, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Result:
    """`-A sigmoid(tau (r - 1)) 4 / tau`, tau by the sign of A, `tau_neg` at 0 (arXiv:2511.20347)."""
    losses, grads = [], []
    for d, a, w in zip(tokens.log_ratio, tokens.advantage, tokens.weight, strict=True):
        ratio, slope = bounded_ratio(d)
        tau = tau_pos if a > 0.0 else tau_neg
        gate = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0)))
        losses.append(-a * gate * 4.0 / tau)
        grads.append(-a * 4.0 * gate * (1.0 - gate) * slope * w)
    return losses, grads


def dppo_tv(tokens: Tokens, low: float = 0.2, high: float = 0.2, cap: float = 20.0) -> Result:
    """`-A sg(min(r, cap) keep) log_prob`; keep while the probability moved at most high up or low down in
    the direction that the advantage pushes (binary total variation, arXiv:2602.04879)."""
    factors = []
    for lp, old, a in zip(tokens.log_prob, tokens.old, tokens.advantage, strict=True):
        move = math.exp(lp) - math.exp(old)
        keep = move <= high if a > 0.0 else move >= -low
        factors.append(min(bounded_ratio(lp - old)[0], cap) if keep else 0.0)
    return _weighted_reinforce(tokens, factors)


def dppo_kl(tokens: Tokens, low: float = 0.2, high: float = 0.2, cap: float = 20.0) -> Result:
    """The same with the binary KL `p0 (o - l) + (1 - p0) log((1 - p0 + 1e-8)/(1 - p + 1e-8))` as the measure."""
    factors = []
    for lp, old, a in zip(tokens.log_prob, tokens.old, tokens.advantage, strict=True):
        p, p0 = math.exp(lp), math.exp(old)
        divergence = p0 * (old - lp) + (1.0 - p0) * math.log((1.0 - p0 + 1e-8) / (1.0 - p + 1e-8))
        keep = (divergence <= high or p <= p0) if a > 0.0 else (divergence <= low or p >= p0)
        factors.append(min(bounded_ratio(lp - old)[0], cap) if keep else 0.0)
    return _weighted_reinforce(tokens, factors)


def quadratic(tokens: Tokens, coef: float) -> Result:
    """`-A log_prob + coef/2 (log_prob - old)^2` per token: DRO (beta), and Kimi k1.5's OPMD (tau, arXiv:2501.12599)."""
    losses, grads = [], []
    for lp, d, a, w in zip(tokens.log_prob, tokens.log_ratio, tokens.advantage, tokens.weight, strict=True):
        losses.append(-a * lp + 0.5 * coef * d * d)
        grads.append((-a + coef * d) * w)
    return losses, grads


def topr(tokens: Tokens, level: str = "sequence") -> Result:
    """`-A log_prob` for A >= 0, `-A sg(min(r, 1)) log_prob` below; r of the token or the product over the sequence
    (arXiv:2503.14286 eq. 8)."""
    total = math.fsum(tokens.log_ratio)
    factors = []
    for d, a in zip(tokens.log_ratio, tokens.advantage, strict=True):
        ratio = bounded_ratio(total if level == "sequence" else d)[0]
        factors.append(1.0 if a >= 0.0 else min(ratio, 1.0))
    return _weighted_reinforce(tokens, factors)


def gspo(tokens: Tokens, low: float = 3e-4, high: float = 4e-4, token_gradient: bool = True) -> Result:
    """PPO clip with `R = exp(min(mean_t d_t, 10))`, the same for all tokens of the sequence (arXiv:2507.18071).

    With `token_gradient` (GSPO-token, eq. 17) log R has gradient 1 in its own token, else 1/n in each token (eq. 7).
    """
    n = len(tokens)
    mean = math.fsum(tokens.log_ratio) / n
    ratio = math.exp(min(mean, 10.0))
    slope = ratio if mean <= 10.0 else 0.0
    pairs = [clipped_loss(ratio, a, low, high, None) for a in tokens.advantage]
    inner = [g * slope * w for (_, g), w in zip(pairs, tokens.weight, strict=True)]
    shared = math.fsum(inner) / n
    return [loss for loss, _ in pairs], inner if token_gradient else [shared] * n


def gmpo(tokens: Tokens, low: float = 0.4, high: float = 0.4) -> Result:
    """`-mean(A) exp(mean_t d'_t)`, d' clipped to `[-low, high]` against the advantage (arXiv:2507.20673)."""
    n = len(tokens)
    kept, passes = [], []
    for d, a in zip(tokens.log_ratio, tokens.advantage, strict=True):
        sign = (a > 0.0) - (a < 0.0)
        kept.append(sign * min(sign * d, sign * clamp(d, -low, high)))
        passes.append(bool(sign) and sign * d <= sign * clamp(d, -low, high))
    ratio = math.exp(math.fsum(kept) / n)
    advantage = math.fsum(tokens.advantage) / n
    loss = -advantage * ratio
    total = math.fsum(tokens.weight)
    return [loss] * n, [total * loss / n if passed else 0.0 for passed in passes]


def vespo(tokens: Tokens, pos: tuple[float, float] = (2.0, 3.0), neg: tuple[float, float] = (3.0, 2.0)) -> Result:
    """`-A sg(phi) log_prob`, `log phi = lambda + k s - lambda exp(s)`, s the log-ratio of the whole sequence, in
    `[log 1e-8, 20]`; (k, lambda) by the sign of A, `pos` at 0 (as in TRL 1.16 and Liger 0.8.5)."""
    s = clamp(math.fsum(clamp(d, -20.0, 20.0) for d in tokens.log_ratio), math.log(1e-8), 20.0)
    factors = []
    for a in tokens.advantage:
        k, lam = pos if a >= 0.0 else neg
        factors.append(math.exp(lam + k * s - lam * math.exp(s)))
    return _weighted_reinforce(tokens, factors)


def covariances(tokens: Tokens) -> Vector:
    """`(A - mean A)(log_prob - mean log_prob)` of each token of a step (arXiv:2505.22617 eq. 10)."""
    n = len(tokens)
    mean_a, mean_lp = math.fsum(tokens.advantage) / n, math.fsum(tokens.log_prob) / n
    return [(a - mean_a) * (lp - mean_lp) for a, lp in zip(tokens.advantage, tokens.log_prob, strict=True)]


def clip_cov(tokens: Tokens, dropped: set[int], low: float = 0.2, high: float = 0.2) -> Result:
    """PPO clip without dual clip, the chosen tokens left out (arXiv:2505.22617 eq. 12): a choice of the caller
    among `clip_cov_candidates`."""
    losses, grads = vanilla(tokens, low, high, None, (-math.inf, math.inf))
    for t in dropped:
        losses[t] = grads[t] = 0.0
    return losses, grads


def clip_cov_candidates(tokens: Tokens, bounds: tuple[float, float], low: float, high: float) -> set[int]:
    """Tokens that PPO's clip leaves alone and whose covariance lies strictly between the bounds."""
    candidates = set()
    for t, (d, a, c) in enumerate(zip(tokens.log_ratio, tokens.advantage, covariances(tokens), strict=True)):
        ratio = math.exp(d)
        clipped_away = -a * clamp(ratio, 1.0 - low, 1.0 + high) > -a * ratio
        if not clipped_away and bounds[0] < c < bounds[1]:
            candidates.add(t)
    return candidates


def kl_cov(tokens: Tokens, share: float, coef: float) -> Result:
    """`-A r`, plus `coef |d|` for the `max(1, int(share n))` tokens of largest covariance (arXiv:2505.22617 eq. 14)."""
    count = max(1, int(share * len(tokens)))
    cov = covariances(tokens)
    chosen = set(sorted(range(len(tokens)), key=lambda t: -cov[t])[:count])
    losses, grads = [], []
    for t, (d, a, w) in enumerate(zip(tokens.log_ratio, tokens.advantage, tokens.weight, strict=True)):
        extra = coef if t in chosen else 0.0
        losses.append(-a * math.exp(d) + extra * abs(d))
        grads.append((-a * math.exp(d) + extra * ((d > 0.0) - (d < 0.0))) * w)
    return losses, grads


def quadratic_sequence(tokens: Tokens, coef: float) -> Result:
    """`-A log_prob + coef/2 D^2 / n` per token with `D = sum_t d_t`: the square of the whole sequence, shared out."""
    n, total = len(tokens), math.fsum(tokens.log_ratio)
    shared = coef * total * math.fsum(tokens.weight) / n
    rows = list(zip(tokens.log_prob, tokens.advantage, tokens.weight, strict=True))
    return [-a * lp + 0.5 * coef * total * total / n for lp, a, _ in rows], [-a * w + shared for _, a, w in rows]


def vanilla_sequence(tokens: Tokens, kind: str, low: float, high: float) -> Result:
    """PPO clip on `exp(sum_t d_t)` (product) or `exp(mean_t d_t)` (mean), each log-prob sharing the gradient."""
    share = 1.0 if kind == "product" else 1.0 / len(tokens)
    ratio, slope = bounded_ratio(share * math.fsum(tokens.log_ratio))
    pairs = [clipped_loss(ratio, a, low, high, None) for a in tokens.advantage]
    grad = share * slope * math.fsum(g * w for (_, g), w in zip(pairs, tokens.weight, strict=True))
    return [loss for loss, _ in pairs], [grad] * len(tokens)
