"""Estimators of KL(policy || reference) from log-probs of sampled tokens."""

import torch
from torch import Tensor

from rlloss.errors import UnknownNameError, nearest
from rlloss.functional.bounds import bound

KL_KINDS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
"""Every accepted name of an estimator, and the estimator it names; a "+" may follow."""


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str, value_cap: float | None = 10.0) -> Tensor:
    """Estimates the KL divergence from the reference policy, token by token.

    With `d = log_prob - ref_log_prob`: k1 is `d`, abs is `|d|`, k2 is `d^2 / 2`, k3 is `exp(-d) + d - 1` with `d`
    clamped to +-20. A trailing "+" keeps the estimator's value and takes the gradient of k2, which is an unbiased
    gradient of the KL on policy (straight-through).

    Args:
        log_prob: `[N]`, current policy, nats.
        ref_log_prob: `[N]`, reference policy, nats; no gradient flows into it.
        kind: A key of `KL_KINDS`, with or without "+".
        value_cap: Bound of k3 on both sides; beyond it the gradient is 0. `None` removes it.

    Returns:
        `[N]`, nats.

    Raises:
        UnknownNameError: `kind` is no estimator.

    Source:
        J. Schulman, "Approximating KL divergence" (2020); the bounds are verl's and XTuner's.
    """
    base = resolve_kl_kind(kind)
    difference = log_prob - ref_log_prob.detach()
    value = _estimate(difference, base, value_cap)
    if not kind.endswith("+"):
        return value
    surrogate = 0.5 * difference.square()
    return surrogate - surrogate.detach() + value.detach()


def resolve_kl_kind(kind: str) -> str:
    """Returns the estimator (k1, abs, k2, k3) that a name stands for, without its "+"."""
    base = str(kind).removesuffix("+")
    if base not in KL_KINDS:
        raise UnknownNameError(
            f"unknown KL kind {kind!r}.{nearest(base, KL_KINDS)} Known: {', '.join(KL_KINDS)}, each also with '+'."
        )
    return KL_KINDS[base]


def ignores_reference(kind: str) -> bool:
    """Whether the gradient of an estimator, as a loss, does not depend on the reference policy: that of plain k1."""
    return resolve_kl_kind(kind) == "k1" and not kind.endswith("+")


def _estimate(difference: Tensor, kind: str, value_cap: float | None) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    negated = bound(-difference, -20.0, 20.0)
    # expm1 keeps the digits that exp(x) - 1 - x loses for a policy close to its reference.
    value = torch.expm1(negated) - negated
    return value if value_cap is None else bound(value, -value_cap, value_cap)
