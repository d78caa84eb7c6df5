"""Running mean and deviation of rewards, to scale them without knowing their range."""

import math

import torch
from torch import Tensor

from rlloss.distributed import Group, all_reduce_sum


class RunningMoments:
    """Mean and variance of all numbers seen so far, merged exactly batch by batch.

    Until anything was seen the mean is 0 and the deviation 1.

    Source:
        T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
        (1979).
    """

    def __init__(self) -> None:
        self.count, self.mean, self.spread = 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 for fewer than two numbers, which have none to scale by."""
        return math.sqrt(self.spread / (self.count - 1.0)) if self.count > 1 else 1.0

    @property
    def var(self) -> float:
        """Biased variance; 1 before anything was seen."""
        return self.spread / self.count if self.count else 1.0

    def update(self, numbers: Tensor, group: Group = None) -> tuple[float, float]:
        """Takes in a batch.

        Args:
            numbers: `[B]`; NaN and infinities are left out.
            group: Ranks that hold parts of the batch; None is every rank. Two collectives.

        Returns:
            Mean and unbiased standard deviation of the batch alone (0 for fewer than two numbers).
        """
        finite = numbers.detach().double()
        finite = finite[finite.isfinite()]
        count, total = all_reduce_sum(torch.stack([finite.new_tensor(finite.numel()), finite.sum()]), group).tolist()
        if count == 0:
            return 0.0, 0.0
        mean = total / count
        spread = float(all_reduce_sum((finite - mean).square().sum(), group))
        shift = mean - self.mean
        merged = self.count + count
        self.spread += spread + shift * shift * self.count * count / merged
        self.mean += shift * count / merged
        self.count = merged
        return mean, math.sqrt(spread / (count - 1.0)) if count > 1 else 0.0

    def scale(self, scores: Tensor, center: bool = False) -> Tensor:
        """Divides scores by the running deviation, after subtracting the running mean where `center`.

        Args:
            scores: Any shape.
            center: Whether the running mean becomes 0 (TRL's use_score_norm).
        """
        shifted = (scores if scores.is_floating_point() else scores.float()) - (self.mean if center else 0.0)
        return shifted / (self.std + torch.finfo(shifted.dtype).eps)

    def state_dict(self) -> dict[str, float]:
        """Returns what a checkpoint must keep."""
        return {"count": self.count, "mean": self.mean, "spread": self.spread}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what `state_dict` returned."""
        self.count, self.mean, self.spread = (float(state[name]) for name in ("count", "mean", "spread"))


def clip_scores(scores: Tensor, limit: float | None) -> Tensor:
    """Clamps scores to +-limit; None leaves them as they are."""
    return scores if limit is None else scores.clamp(-limit, limit)
