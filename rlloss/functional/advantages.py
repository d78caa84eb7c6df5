"""Advantages from rewards."""

from torch import Tensor

from rlloss.functional.advantage_registry import register_advantage
from rlloss.functional.groups import Groups, Singleton


@register_advantage("grpo", aliases=("grpo_vectorized",))
def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    normalize_std: bool = True,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Tensor:
    """Computes group-relative advantages, `A_i = (r_i - mean_g) / (std_g + eps)`.

    Mean and standard deviation (unbiased) are those of the group that `i` belongs to. A group of one has no spread to
    compare with: its advantage is 0, with a warning, or its reward where `singleton="raw"`.

    Args:
        rewards: `[N]`, one for each sequence.
        group_ids: `[N]`, any integers; sequences of one prompt share one.
        normalize_std: Divide by the standard deviation; False is Dr.GRPO's advantage (arXiv:2503.20783).
        eps: Added to the standard deviation.
        singleton: What a group of one gets.

    Returns:
        Advantages `[N]`, float32 or the wider type of the rewards, without a graph.

    Raises:
        BatchError: Shapes differ, ids are no integers, or a reward is NaN or infinite.

    Source:
        arXiv:2402.03300, section 4.1.2.
    """
    groups = Groups(rewards, group_ids)
    centred = groups.centred()
    return groups.finish(centred / (groups.std() + eps) if normalize_std else centred, singleton)
