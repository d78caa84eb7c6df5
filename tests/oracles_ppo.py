"""PPO's reference values as plain loops over Python floats, from the formulas; nothing of rlloss is imported."""

from __future__ import annotations

import math

Rows = list[list[float]]


def moments(values: list[float], unbiased: bool = True) -> tuple[float, float]:
    """Mean and variance; 0 for no number, variance 0 for one."""
    n = len(values)
    if n == 0:
        return 0.0, 0.0
    mean = math.fsum(values) / n
    spread = math.fsum((x - mean) ** 2 for x in values)
    return mean, 0.0 if n == 1 else spread / (n - 1 if unbiased else n)


def whiten(values: Rows, mask: Rows, shift_mean: bool = True) -> Rows:
    """`(x - mean) / sqrt(var + 1e-8)` of the numbers that count, 0 elsewhere."""
    counted = [x for row, ms in zip(values, mask, strict=True) for x, m in zip(row, ms, strict=True) if m]
    mean, variance = moments(counted)
    back = 0.0 if shift_mean else mean
    return [
        [(x - mean) / math.sqrt(variance + 1e-8) + back if m else 0.0 for x, m in zip(row, ms, strict=True)]
        for row, ms in zip(values, mask, strict=True)
    ]


def gae(rewards: Rows, values: Rows, mask: Rows, gamma: float, lam: float, holes: str) -> tuple[Rows, Rows]:
    """Advantages as the explicit sum `A_t = sum_k (gamma lam)^k delta_{t+k}` over the steps of each row."""
    advantages, returns = [], []
    for reward, value, counted in zip(rewards, values, mask, strict=True):
        steps = [t for t, m in enumerate(counted) if m or holes == "steps"]
        r = [reward[t] if counted[t] else 0.0 for t in steps]
        v = [value[t] if counted[t] else 0.0 for t in steps] + [0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(steps))]
        row = [0.0] * len(counted)
        for i, t in enumerate(steps):
            if counted[t]:
                row[t] = math.fsum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(steps)))
        advantages.append(row)
        returns.append([a + x if m else 0.0 for a, x, m in zip(row, value, counted, strict=True)])
    return advantages, returns


def kl(log_prob: float, ref: float, kind: str) -> float:
    d = log_prob - ref
    return {"kl": d, "abs": abs(d), "mse": 0.5 * d * d, "low_var_kl": math.exp(-d) + d - 1.0}[kind]


def rewards(scores: list[float], log_probs: Rows, refs: Rows, mask: Rows, coef: float, kind: str) -> Rows:
    """`-coef kl_t`, and the score on the last token that counts."""
    out = []
    for score, lps, rfs, ms in zip(scores, log_probs, refs, mask, strict=True):
        row = [-coef * kl(a, b, kind) if m else 0.0 for a, b, m in zip(lps, rfs, ms, strict=True)]
        last = max((t for t, m in enumerate(ms) if m), default=None)
        if last is not None:
            row[last] += score
        out.append(row)
    return out


def penalty(error: float, delta: float | None) -> tuple[float, float]:
    """Half the squared error, or Huber's loss, and its derivative."""
    if delta is None or abs(error) <= delta:
        return 0.5 * error * error, error
    return delta * (abs(error) - 0.5 * delta), math.copysign(delta, error)


def value_loss(
    value: float, target: float, old: float, clip: float | None, delta: float | None
) -> tuple[float, float, bool]:
    """Loss, derivative by the value, and whether the clip binds."""
    loss, slope = penalty(value - target, delta)
    if clip is None:
        return loss, slope, False
    held = min(max(value, old - clip), old + clip)
    clipped, clipped_slope = penalty(held - target, delta)
    if clipped > loss:
        return clipped, clipped_slope if held == value else 0.0, True
    return loss, slope, False


def explained_variance(values: list[float], targets: list[float]) -> float:
    """`1 - Var(R - V) / Var(R)`."""
    missed = moments([r - v for v, r in zip(values, targets, strict=True)])[1]
    return 1.0 - missed / moments(targets)[1]
