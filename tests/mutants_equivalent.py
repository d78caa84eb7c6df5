"""Mutants that no test can find, because they change no number, each with the reason.

A key is (function, "before -> after") as `tests/mutants.py` writes it.
"""

NO_ADVANTAGE = "differs where A = 0 only, and there the loss and its gradient are 0 either way"
NO_GRADIENT = "a comparison has no gradient, so detaching what it compares changes nothing"
TIE = "differs where a computed divergence or covariance equals its bound to the last bit only"
SAME_P = "differs at p = p_old only, where the divergence is 0 and so within any bound"
COUNTS = "differs at an advantage of 0 only, where neither branch of the clip is larger"

EQUIVALENT: dict[tuple[str, str], str] = {
    ("clipped_surrogate", "advantages < 0 -> advantages <= 0"): NO_ADVANTAGE,
    ("clipped_surrogate", "advantages > 0 -> advantages >= 0"): COUNTS,
    ("clipped_surrogate", "loss.detach() -> loss"): NO_GRADIENT,
    ("clipped_surrogate", "clipped.detach() -> clipped"): NO_GRADIENT,
    ("clipped_surrogate", "unclipped.detach() -> unclipped"): NO_GRADIENT,
    ("soft_gate", "advantages > 0 -> advantages >= 0"): NO_ADVANTAGE,
    ("tapered_factor", "advantages >= 0 -> advantages > 0"): NO_ADVANTAGE,
    ("within_variation", "advantages > 0 -> advantages >= 0"): NO_ADVANTAGE,
    (
        "within_variation",
        "(log_prob.exp() - old_log_prob.exp()).detach() -> log_prob.exp() - old_log_prob.exp()",
    ): NO_GRADIENT,
    ("choose_clip_cov", "covariance < cfg.clip_cov_ub -> covariance <= cfg.clip_cov_ub"): TIE,
    ("choose_clip_cov", "covariance > cfg.clip_cov_lb -> covariance >= cfg.clip_cov_lb"): TIE,
    ("within_divergence", "advantages > 0 -> advantages >= 0"): NO_ADVANTAGE,
    ("within_divergence", "log_prob.detach() -> log_prob"): NO_GRADIENT,
    ("within_divergence", "old_log_prob.detach() -> old_log_prob"): NO_GRADIENT,
    ("within_divergence", "p >= p_old -> p > p_old"): SAME_P,
    ("within_divergence", "p <= p_old -> p < p_old"): SAME_P,
    ("within_divergence", "divergence <= low -> divergence < low"): TIE,
    ("within_divergence", "divergence <= high -> divergence < high"): TIE,
}
