"""Distances between a policy and its teacher, from log-probs."""

import torch
from torch import Tensor

from rlloss.functional.bounds import bound


def forward_kl_topk(log_prob: Tensor, teacher_log_prob: Tensor, log_prob_min: float | None = None) -> Tensor:
    """The part of KL(teacher || policy) that lies in the teacher's K most likely words, token by token.

    `sum_k exp(q_k) (q_k - s_k)`, not renormalised over the K words; it may be negative when they hold little mass.

    Args:
        log_prob: `[N, K]`, the policy's log-probs s of the teacher's words, nats.
        teacher_log_prob: `[N, K]`, q, nats; no gradient flows into it. A word of probability 0 (-inf) adds nothing.
        log_prob_min: Lower bound of both, nats; the gradient below is 0. `None`: none.

    Returns:
        `[N]`, nats.

    Source:
        arXiv:1503.02531 (distillation); the truncation to K words as in verl.
    """
    teacher = teacher_log_prob.detach().to(log_prob.dtype)
    if log_prob_min is not None:
        log_prob, teacher = bound(log_prob, log_prob_min, torch.inf), teacher.clamp(min=log_prob_min)
    absent = teacher == -torch.inf
    teacher = teacher.masked_fill(absent, 0.0)
    return torch.where(absent, 0.0, teacher.exp() * (teacher - log_prob)).sum(dim=-1)


def reverse_kl_advantages(
    old_log_prob: Tensor, teacher_log_prob: Tensor, coef: float = 1.0, max_abs: float | None = None
) -> Tensor:
    """Advantages that pull the policy to a teacher: `-coef (log pi_old - log pi_teacher)` of each sampled token.

    With them the policy gradient is that of KL(policy || teacher), estimated on the policy's own tokens (on-policy
    distillation). Add them to advantages from rewards, or take them alone.

    Args:
        old_log_prob: Log-probs of the sampled tokens under the policy that sampled them, nats.
        teacher_log_prob: The same shape, nats.
        coef: Factor.
        max_abs: Bound of the difference on both sides, nats; `None`: none.

    Returns:
        The shape of `old_log_prob`, without a graph.

    Source:
        arXiv:2306.13649, section 3 (on-policy distillation).
    """
    difference = (old_log_prob - teacher_log_prob).detach()
    return -coef * (difference if max_abs is None else difference.clamp(-max_abs, max_abs))
