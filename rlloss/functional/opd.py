"""Token weights of on-policy distillation."""

import torch
from torch import Tensor


def iw_opd_weights(advantages: Tensor, mask: Tensor, gamma: float = 0.5, epsilon: float = 1e-8) -> Tensor:
    """Weights that favour the early disagreements of teacher and student, after which the rest of an answer follows.

    `w_t = 1 + gamma (1 - sum_{s<t} |a_s| / max(sum_s |a_s|, epsilon))` over the tokens of a row that count.

    Args:
        advantages: `[B, T]`, `a = teacher - student` log-prob of each token, one sequence in each row.
        mask: `[B, T]`, tokens that count; numbers elsewhere are not looked at.
        gamma: Largest extra weight.
        epsilon: Smallest sum of disagreements.

    Returns:
        `[B, T]`, 0 where the mask is 0; use `w * a` as the advantages of the policy loss "reinforce".

    Source:
        Importance-weighted on-policy distillation, as in TRL 1.16.
    """
    counts = mask != 0
    size = torch.where(counts, advantages.detach(), 0.0).abs()
    before = size.cumsum(1) - size
    share = before / size.sum(1, keepdim=True).clamp(min=epsilon)
    return torch.where(counts, 1.0 + gamma * (1.0 - share), 0.0)
