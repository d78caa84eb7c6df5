"""XTuner's advantage estimators: rewards of one prompt's responses -> advantages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlloss.errors import BatchError
from rlloss.functional.advantage_registry import compute_advantages
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


class _OfOneGroup(AdvantageEstimator):
    """An estimator of rlloss on the rewards of one group."""

    name: ClassVar[str]
    needs_lengths: ClassVar[bool] = False

    def compute(self, rewards: Tensor, group: Sequence[Any] = ()) -> Tensor:
        """Computes the advantages of one group, `[K]`; see `AdvantageEstimator`."""
        given = {**vars(self), "rewards": rewards, "group_ids": torch.zeros_like(rewards, dtype=torch.int64)}
        if self.needs_lengths:
            given["lengths"] = response_lengths(rewards, group)
        return compute_advantages(self.name, **given)


class GRPOEstimator(_OfOneGroup):
    """`(r - mean) / (std + eps)`; 0 for a group of one, where XTuner's is NaN (arXiv:2402.03300)."""

    name = "grpo"

    def __init__(self, eps: float = 1e-8) -> None:
        self.eps = eps


class DrGRPOEstimator(_OfOneGroup):
    """`(r - mean) / (std + eps) * length / max_length`: what XTuner calls Dr.GRPO.

    The paper's advantage (arXiv:2503.20783) is `r - mean`, with a loss divided by a constant length: rlloss's "dr_grpo"
    and `loss_reduction="constant"`.
    """

    name, needs_lengths = "length_scaled_grpo", True

    def __init__(self, max_length: float, eps: float = 1e-8) -> None:
        self.max_length, self.eps = max_length, eps


class RLOOEstimator(_OfOneGroup):
    """Reward minus the mean of the other rewards; the reward itself in a group of one (arXiv:2402.14740)."""

    name = "rloo"

    def compute(self, rewards: Tensor, group: Sequence[Any] = ()) -> Tensor:
        """Computes the advantages of one group, `[K]`; see `AdvantageEstimator`."""
        return rewards if rewards.shape[0] == 1 else super().compute(rewards, group)


class OPOEstimator(_OfOneGroup):
    """Reward minus the mean of the rewards weighted by length (arXiv:2505.23585).

    A group of one has advantage 0, one without any token the plain mean as its baseline; `eps` is accepted and not
    needed, since nothing is divided by 0.
    """

    name, needs_lengths = "opo", True

    def __init__(self, eps: float = 1e-8) -> None:
        del eps


class PassKEstimator(_OfOneGroup):
    """Pass@k of rewards that are right (above 0) or wrong (arXiv:2508.10751).

    A group of equal answers has advantage 0, where XTuner's is -1 / eps if none is right.
    """

    name = "passk_analytic"

    def __init__(self, k: int = 4, eps: float = 1e-6) -> None:
        self.k, self.eps = k, eps


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
