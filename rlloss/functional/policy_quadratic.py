"""Losses with a squared log-ratio in the place of a clip."""

from torch import Tensor

from rlloss.layout import Segments


def quadratic_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, coef: float, segments: Segments | None = None
) -> Tensor:
    """`-A log_prob + coef/2 d^2`, `d = log_prob - old_log_prob` of the token, or of its sequence.

    Over a sequence of n tokens the square is `(sum_t d_t)^2`, of which each token carries 1/n, so that the token losses
    of a sequence add up to `-A log pi(y) + coef/2 (log pi(y) / pi_old(y))^2`.

    Args:
        log_prob: `[N]`, nats.
        old_log_prob: `[N]`, nats; no gradient flows into it.
        advantages: `[N]`.
        coef: Weight of the square, above 0.
        segments: Given, the square is of the sequence; None, of the token.

    Returns:
        `[N]`.

    Source:
        DRO arXiv:2405.19107, its policy loss; OPMD (Kimi k1.5) arXiv:2501.12599, the policy optimisation.
    """
    difference = log_prob - old_log_prob.detach()
    if segments is None:
        square = difference.square()
    else:
        square = segments.broadcast(segments.sum(difference).square() / segments.sizes.clamp(min=1).to(log_prob.dtype))
    return -advantages * log_prob + 0.5 * coef * square
