"""The loss of a critic, token by token."""

import torch
from torch import Tensor

from rlloss.functional.bounds import bound
from rlloss.metrics import Metric, explained_variance_of, mean_of, moments_of


def value_loss(
    predicted: Tensor,
    returns: Tensor,
    old_values: Tensor | None = None,
    cliprange: float | None = None,
    huber_delta: float | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Compares predicted values with returns, and holds them near the old ones.

    `max(L(V - R), L(clip(V, V_old - eps, V_old + eps) - R))` with `L(x) = x^2 / 2`, or Huber's
    `L(x) = x^2 / 2` up to delta and `delta (|x| - delta / 2)` beyond.

    Args:
        predicted: `[N]`, values of the critic, with a graph.
        returns: `[N]`.
        old_values: `[N]`, values that the returns were made with; needed with `cliprange`.
        cliprange: eps; None leaves the clip out.
        huber_delta: delta; None is the squared error.

    Returns:
        `[N]`, and the metrics: clip fraction (tokens where the clip changes the loss), mean squared error, mean value,
        mean and deviation of returns and old values, explained variance.

    Source:
        arXiv:2005.12729, section 3; TRL 0.11 and verl.
    """
    returns = returns.detach().to(predicted.dtype)
    error = predicted - returns
    loss = _penalty(error, huber_delta)
    metrics: dict[str, Metric] = {
        "value_error": mean_of(error.detach().square()),
        "value_mean": mean_of(predicted),
        "returns_mean": mean_of(returns),
        "returns_std": moments_of(returns),
        "explained_variance": explained_variance_of(predicted, returns),
    }
    if cliprange is None:
        return loss, metrics
    assert old_values is not None
    old_values = old_values.detach().to(predicted.dtype)
    held = bound(predicted, old_values - cliprange, old_values + cliprange)
    clipped = _penalty(held - returns, huber_delta)
    metrics["value_clip_frac"] = mean_of(clipped.detach() > loss.detach())
    metrics["old_values_mean"] = mean_of(old_values)
    metrics["old_values_std"] = moments_of(old_values)
    return torch.maximum(loss, clipped), metrics


def _penalty(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * error.square()
    size = error.abs()
    # The square is formed of what lies inside only: outside it could overflow and spoil the gradient.
    inside = torch.where(size > huber_delta, 0.0, error)
    return torch.where(size > huber_delta, huber_delta * (size - 0.5 * huber_delta), 0.5 * inside.square())
