"""Rewards from the tokens of a response, and several rewards made one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlloss.errors import BatchError, ConfigError


def soft_overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Penalty of a long response: 0 up to `max_length - cache`, falling to -1 at `max_length`, -1 beyond.

    Args:
        lengths: `[N]`, tokens of each response.
        max_length: Longest response.
        cache: Width of the slope.

    Source:
        arXiv:2503.14476 (DAPO), equation 13.
    """
    if not 0 < cache <= max_length:
        raise ConfigError(f"cache={cache} must lie above 0 and not above max_length={max_length}.")
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


def repetition_penalty(
    token_ids: Sequence[Sequence[int] | Tensor] | Tensor, ngram: int = 3, max_penalty: float = -1.0
) -> Tensor:
    """Penalty of repeated n-grams: `(1 - different / all) * max_penalty`; 0 for a response shorter than n.

    Args:
        token_ids: The tokens of each response, as lists or tensors.
        ngram: n.
        max_penalty: Where every n-gram is the same, nearly; not above 0.

    Returns:
        `[N]` float32.

    Source:
        arXiv:2502.03373, appendix.
    """
    if ngram < 1 or max_penalty > 0:
        raise ConfigError(f"ngram={ngram} must be at least 1, and max_penalty={max_penalty} not above 0.")
    found = []
    for given in token_ids:
        # Numbers of a tensor are objects of their own, never equal in a set.
        ids = given.tolist() if isinstance(given, Tensor) else given
        grams = [tuple(ids[start : start + ngram]) for start in range(len(ids) - ngram + 1)]
        found.append((1.0 - len(set(grams)) / len(grams)) * max_penalty if grams else 0.0)
    return torch.tensor(found, dtype=torch.float32)


def combine_rewards(rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sums several rewards of each sequence; a NaN is left out, and a sequence of NaN only stays NaN.

    Args:
        rewards: `[N, F]`.
        weights: `[F]`; None is 1 for each.

    Returns:
        `[N]`.

    Raises:
        BatchError: Shapes do not fit.
    """
    if rewards.ndim != 2 or (weights is not None and tuple(weights.shape) != (rewards.shape[1],)):
        raise BatchError(f"rewards {list(rewards.shape)}: expected [N, F], and weights [F].")
    # In the type of integer rewards a weight of 0.5 would be 0.
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    scaled = rewards if weights is None else rewards * weights.to(rewards)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, scaled.nansum(dim=1))
