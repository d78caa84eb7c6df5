"""Statistics of groups of sequences, the responses to one prompt."""

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from rlloss.errors import BatchError, require_known

Singleton = Literal["zero", "raw"]
NanRewards = Literal["raise", "exclude"]


class Groups:
    """Rewards of sequences by group; ids are any integers in any order, and only those that occur are groups.

    Args:
        rewards: `[N]`, one for each sequence.
        group_ids: `[N]` integers.
        nan: "raise", or "exclude": a NaN reward takes no part in any statistic.

    Attributes:
        values: `[N]` float32 or wider, without a graph; 0 where a reward is excluded.
        valid: `[N]` bool, rewards that take part.
        count: `[N]`, number of rewards of each sequence's group that do.

    Raises:
        BatchError: Shapes differ, ids are no integers, or a reward is infinite (or NaN, when that raises).
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor, nan: NanRewards = "raise") -> None:
        check_rewards(rewards, group_ids, nan)
        values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
        self.valid = ~values.isnan()
        self.values = torch.where(self.valid, values, 0.0)
        self._dense = torch.unique(group_ids, return_inverse=True)[1]
        self._groups = int(self._dense.max()) + 1 if self._dense.numel() else 0
        self.count = self.sum(torch.ones_like(self.values))

    def sum(self, numbers: Tensor) -> Tensor:
        """Returns, for each sequence, the sum over the sequences of its group that take part, `[N]`."""
        taken = torch.where(self.valid, numbers, 0.0)
        return taken.new_zeros(self._groups).index_add(0, self._dense, taken)[self._dense]

    def extreme(self, numbers: Tensor, kind: Literal["amax", "amin"]) -> Tensor:
        """Returns, for each sequence, the largest or smallest number of its group, `[N]`."""
        start = -torch.inf if kind == "amax" else torch.inf
        taken = torch.where(self.valid, numbers, start)
        return taken.new_full((self._groups,), start).scatter_reduce(0, self._dense, taken, kind)[self._dense]

    def centred(self) -> Tensor:
        """Returns the rewards minus their group's mean; exactly 0 in a group of equal rewards, `[N]`."""
        found = self.values - self.sum(self.values) / self.count.clamp(min=1)
        equal = self.extreme(self.values, "amax") == self.extreme(self.values, "amin")
        return torch.where(self.valid & ~equal, found, 0.0)

    def std(self, biased: bool = False) -> Tensor:
        """Returns the standard deviation of each sequence's group, 0 for fewer than two rewards, `[N]`."""
        degrees = self.count if biased else self.count - 1
        return (self.sum(self.centred().square()) / degrees.clamp(min=1)).sqrt()

    def finish(self, advantages: Tensor, singleton: Singleton) -> Tensor:
        """Replaces the advantage of a group of one by 0 (with a warning) or its reward; 0 where excluded."""
        alone = self.valid & (self.count == 1)
        require_known("singleton", singleton, get_args(Singleton))
        advantages = torch.where(alone, self.values if singleton == "raw" else 0.0, advantages)
        if singleton == "zero" and bool(alone.any()):
            warnings.warn(
                f"{int(alone.sum())} of {self._groups} groups have one sequence: their advantage is 0. "
                f'Sample more responses to each prompt, or use singleton="raw".',
                stacklevel=3,
            )
        return torch.where(self.valid, advantages, 0.0)


def check_rewards(rewards: Tensor, group_ids: Tensor, nan: NanRewards = "raise") -> None:
    """Refuses rewards and ids that do not fit together.

    Raises:
        BatchError: See `Groups`.
    """
    for name, given in (("rewards", rewards), ("group_ids", group_ids)):
        if not isinstance(given, Tensor):
            raise BatchError(f"{name} is a {type(given).__name__}, expected a tensor [N].")
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise BatchError(
            f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} must both be [N], "
            "one entry for each sequence."
        )
    if group_ids.is_floating_point() or group_ids.is_complex() or group_ids.dtype == torch.bool:
        raise BatchError(f"group_ids are {group_ids.dtype}, expected integers.")
    require_known("nan", nan, get_args(NanRewards))
    bad = rewards.isinf() if nan == "exclude" else ~rewards.isfinite()
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise BatchError(
            f"rewards[{row}] is {float(rewards[row])}. A reward must be a finite number; a NaN can be left out of its "
            f'group with nan="exclude" where the estimator has it.'
        )
