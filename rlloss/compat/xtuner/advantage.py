"""XTuner's advantage estimators: rewards of one prompt's responses -> advantages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import comb
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.functional.advantages import grpo_advantages
from rlloss.losses.config import StrictModel


class AdvantageEstimator(ABC):
    """Base of estimators of one's own: override `compute`."""

    @abstractmethod
    def compute(self, rewards: Tensor, group: Sequence[Any]) -> Tensor:
        """Computes the advantages of one group.

        Args:
            rewards: `[K]`, one for each response to one prompt.
            group: The K responses, objects with `response_ids` (or `env.rollout.response_ids`).

        Returns:
            `[K]`.
        """

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


def response_lengths(rewards: Tensor, group: Sequence[Any]) -> Tensor:
    """Returns the number of tokens of each response, `[K]` in the type of the rewards.

    Raises:
        BatchError: There are not as many responses as rewards.
    """
    if len(group) != rewards.shape[0]:
        raise BatchError(f"the group has {len(group)} responses for {rewards.shape[0]} rewards.")
    holders = [item if hasattr(item, "response_ids") else item.env.rollout for item in group]
    return torch.tensor([len(holder.response_ids or ()) for holder in holders], device=rewards.device).to(rewards)


class GRPOEstimator(AdvantageEstimator):
    """`(r - mean) / (std + eps)`; 0 for a group of one, where XTuner's is NaN (arXiv:2402.03300)."""

    def __init__(self, eps: float = 1e-8) -> None:
        self.eps = eps

    def compute(self, rewards: Tensor, group: Sequence[Any] = ()) -> Tensor:
        """Computes the advantages of one group, `[K]`; see `AdvantageEstimator`."""
        return grpo_advantages(rewards, torch.zeros_like(rewards, dtype=torch.int64), eps=self.eps)


class DrGRPOEstimator(GRPOEstimator):
    """`(r - mean) / (std + eps) * length / max_length`: what XTuner calls Dr.GRPO.

    The paper's advantage (arXiv:2503.20783) is `r - mean`, with a loss divided by a constant length: here
    `grpo_advantages(normalize_std=False)` and `loss_reduction="constant"`.
    """

    def __init__(self, max_length: float, eps: float = 1e-8) -> None:
        self.max_length, self.eps = max_length, eps

    def compute(self, rewards: Tensor, group: Sequence[Any] = ()) -> Tensor:
        """Computes the advantages of one group, `[K]`; see `AdvantageEstimator`."""
        return super().compute(rewards, group) * response_lengths(rewards, group) / self.max_length


class RLOOEstimator(AdvantageEstimator):
    """Reward minus the mean of the other rewards; the reward itself in a group of one (arXiv:2402.14740)."""

    def compute(self, rewards: Tensor, group: Sequence[Any] = ()) -> Tensor:
        """Computes the advantages of one group, `[K]`; see `AdvantageEstimator`."""
        others = rewards.shape[0] - 1
        return rewards - (rewards.sum() - rewards) / others if others else rewards


class OPOEstimator(AdvantageEstimator):
    """Reward minus the mean of the rewards weighted by length (arXiv:2505.23585)."""

    def __init__(self, eps: float = 1e-8) -> None:
        self.eps = eps

    def compute(self, rewards: Tensor, group: Sequence[Any] = ()) -> Tensor:
        """Computes the advantages of one group, `[K]`; see `AdvantageEstimator`."""
        lengths = response_lengths(rewards, group)
        return rewards - (rewards * lengths).sum() / (lengths.sum() + self.eps)


class PassKEstimator(AdvantageEstimator):
    """Pass@k advantages of rewards that are right (above 0) or wrong (arXiv:2508.10751, section 2.4).

    With c of n responses right, `rho = 1 - C(n-c, k) / C(n, k)` and `sigma = sqrt(rho (1 - rho)) + eps`: right ones get
    `(1 - rho) / sigma`, wrong ones `(1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma`. As in XTuner, `rho = c / n` where
    n < k, and wrong ones get `-1 / sigma` where none is right.
    """

    def __init__(self, k: int = 4, eps: float = 1e-6) -> None:
        self.k, self.eps = k, eps

    def compute(self, rewards: Tensor, group: Sequence[Any] = ()) -> Tensor:
        """Computes the advantages of one group, `[K]`; see `AdvantageEstimator`."""
        right, n, k = rewards > 0, int(rewards.shape[0]), self.k
        wrong = n - int(right.sum())
        rho = 1.0 - comb(wrong, k) / comb(n, k) if n >= k else (n - wrong) / max(n, 1)
        sigma = (rho * (1.0 - rho)) ** 0.5 + self.eps
        missed = -1.0
        if 0 < wrong < n:
            missed = 1.0 - rho - (comb(wrong - 1, k - 1) / comb(n - 1, k - 1) if n >= k else 0.0)
        return torch.where(right, (1.0 - rho) / sigma, missed / sigma).to(rewards.dtype)


class BaseAdvantageConfig(StrictModel):
    """Base of the configs of estimators."""

    def build(self) -> AdvantageEstimator:
        """Returns the estimator."""
        raise NotImplementedError(f"{type(self).__name__} must return its estimator from build")


class GRPOAdvantageConfig(BaseAdvantageConfig):
    """Config of `GRPOEstimator`."""

    eps: float = Field(default=1e-8, ge=0.0)
    """Added to the standard deviation."""

    def build(self) -> AdvantageEstimator:
        """Returns the estimator."""
        return GRPOEstimator(self.eps)


class DrGRPOAdvantageConfig(BaseAdvantageConfig):
    """Config of `DrGRPOEstimator`."""

    max_length: float = Field(default=32768, gt=0.0)
    """Length that advantages are scaled by, tokens."""
    eps: float = Field(default=1e-8, ge=0.0)
    """Added to the standard deviation."""

    def build(self) -> AdvantageEstimator:
        """Returns the estimator."""
        return DrGRPOEstimator(self.max_length, self.eps)


class RLOOAdvantageConfig(BaseAdvantageConfig):
    """Config of `RLOOEstimator`."""

    def build(self) -> AdvantageEstimator:
        """Returns the estimator."""
        return RLOOEstimator()


class OPOAdvantageConfig(BaseAdvantageConfig):
    """Config of `OPOEstimator`."""

    eps: float = Field(default=1e-8, ge=0.0)
    """Added to the number of tokens."""

    def build(self) -> AdvantageEstimator:
        """Returns the estimator."""
        return OPOEstimator(self.eps)


class PassKAdvantageConfig(BaseAdvantageConfig):
    """Config of `PassKEstimator`."""

    k: int = Field(default=4, ge=1)
    """Of pass@k."""
    eps: float = Field(default=1e-6, ge=0.0)
    """Added to sigma."""

    def build(self) -> AdvantageEstimator:
        """Returns the estimator."""
        return PassKEstimator(self.k, self.eps)
