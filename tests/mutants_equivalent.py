"""Mutants that no test can find, because they change no number, each with the reason.

A key is (function, "before -> after") as `tests/mutants.py` writes it.
"""

NO_ADVANTAGE = "differs where A = 0 only, and there the loss and its gradient are 0 either way"
NO_GRADIENT = "a comparison has no gradient, so detaching what it compares changes nothing"
TIE = "differs where a computed divergence, covariance or mean equals its bound to the last bit only"
SAME_P = "differs at p = p_old only, where the divergence is 0 and so within any bound"
COUNTS = "differs at an advantage of 0 only, where neither branch of the clip is larger"

MASKED = "matters for tokens outside of the term's mask only, whose weight is 0 anyway"
EMPTY = "matters for a sequence or a step without tokens only, whose number reaches no token"
OVERWRITTEN = "chooses a branch where A = 0, which the next line sets to 0"
REFUSED = "stands for a config without loss_length, which is refused when it is made"

NO_METRIC_GRADIENT = "a metric has no graph, so detaching what it is made of changes nothing"
UNUSED_BRANCH = "fills what the next line replaces"
SAME_AT_DELTA = "at an error of delta both branches of Huber's loss have one value and one slope"
SUMS_HAVE_NO_GRAPH = "a sum over ranks has no graph, so detaching its summands changes nothing"
TELLS_APART = "any power of the mark of a batch differs where the mark does; its size is nowhere used"
ANY_RANK = "any one rank of a sequence-parallel group may be the one that the others are compared with"
ONE_NUMBER = "matters for fewer than two numbers only, whose spread is 0 whatever it is divided by"
EQUAL_GROUP = "matters for groups of one reward or none only, whose centred rewards are 0 anyway"
STACKLEVEL = "says which line a warning names"
SHORTCUT = "a case of its own for speed: the general way gives the same numbers there"
TWO_AXES = "the tensor has two axes, so that 1 and -1 are the same one"
ONLY_FINITE = "these numbers are looked at for NaN and inf only"
EMPTY_GROUP = "makes room for one more group, which no response is in"
MASKED_LATER = "what the caller leaves out by the same mask"
ALL_DRAWN = "with all n answers drawn a right one is among them, and no wrong one loses anything"
NO_TOKENS = "matters for a step without tokens only, which has no weights"
NEITHER_NUMBER = "both are NaN where a bound is; where only one is, the next two conditions refuse the bounds too"
ANY_AT_ALL = "only whether it is above 0 is used"
SAME_ENTROPY = "at q = 0 both branches of the entropy are one formula; of `log s` they are not, and that is found"
BOTH_HOLD = "at the smallest normal number both branches have all their digits"
SCALE_FREE = "changes the scale of weights whose sum divides them again"

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
    ("_inverse_denominator", "counts.prompt_tokens.clamp(min=1) -> counts.prompt_tokens"): MASKED,
    ("_inverse_denominator", "1 -> 0"): MASKED,
    ("_inverse_denominator", "segments.broadcast(part.sizes).clamp(min=1) -> segments.broadcast(part.sizes)"): MASKED,
    ("_inverse", "0.0 -> 1.0"): EMPTY,
    ("_inverse", "count.clamp(min=1e-300) -> count"): EMPTY,
    ("_inverse", "1e-300 -> 0.0"): EMPTY,
    ("_inverse", "count > 0 -> count >= 0"): EMPTY,
    ("geometric_surrogate", "advantages > 0 -> advantages >= 0"): OVERWRITTEN,
    ("quadratic_loss", "segments.sizes.clamp(min=1) -> segments.sizes"): EMPTY,
    ("quadratic_loss", "1 -> 0"): EMPTY,
    ("on_policy_sequences", "(behaviour - log_prob).detach() -> behaviour - log_prob"): NO_GRADIENT,
    ("_inverse_denominator", "0 -> 1"): REFUSED,
    ("within_divergence", "p >= p_old -> p > p_old"): SAME_P,
    ("within_divergence", "p <= p_old -> p < p_old"): SAME_P,
    ("within_divergence", "divergence <= low -> divergence < low"): TIE,
    ("within_divergence", "divergence <= high -> divergence < high"): TIE,
    ("value_loss", "loss.detach() -> loss"): NO_GRADIENT,
    ("value_loss", "clipped.detach() -> clipped"): NO_GRADIENT,
    ("value_loss", "error.detach() -> error"): NO_METRIC_GRADIENT,
    ("_penalty", "0.0 -> 1.0"): UNUSED_BRANCH,
    ("_penalty", "size > huber_delta -> size >= huber_delta"): SAME_AT_DELTA,
    ("RunningMoments.update", "numbers.detach() -> numbers"): SUMS_HAVE_NO_GRAPH,
    ("facts_of", "2 -> 3"): TELLS_APART,
    ("facts_of", "0 -> 1"): ANY_RANK,
    ("masked_sum", "0.0 -> 1.0"): UNUSED_BRANCH,
    ("masked_mean", "1.0 -> 2.0"): EMPTY,
    ("_moments", "0.0 -> 1.0"): ONE_NUMBER,
    ("_moments", "degrees.clamp(min=1.0) -> degrees"): ONE_NUMBER,
    ("_moments", "1.0 -> 0.0"): ONE_NUMBER,
    ("_moments", "count > 1 -> count >= 1"): ONE_NUMBER,
    ("_moments", "1 -> 0"): ONE_NUMBER,
    ("_moments", "count.clamp(min=1.0) -> count"): EMPTY,
    ("_moments", "values.detach() -> values"): SUMS_HAVE_NO_GRAPH,
    ("Groups.__init__", "0 -> 1"): EMPTY,
    ("Groups.centred", "self.count.clamp(min=1) -> self.count"): EQUAL_GROUP,
    ("Groups.centred", "1 -> 2"): EQUAL_GROUP,
    ("Groups.centred", "1 -> 0"): EQUAL_GROUP,
    ("Groups.finish", "3 -> 4"): STACKLEVEL,
    ("Groups.finish", "3 -> 0"): STACKLEVEL,
    ("rloo_advantages", "(groups.count - 1).clamp(min=1) -> groups.count - 1"): EQUAL_GROUP,
    ("rloo_advantages", "1 -> 0"): EQUAL_GROUP,
    (
        "opo_advantages",
        "groups.sum(weights).clamp(min=torch.finfo(weights.dtype).tiny) -> groups.sum(weights)",
    ): EMPTY,
    ("opo_advantages", "1.0 -> 2.0"): SCALE_FREE,
    ("WordPlaces.__init__", "1 -> 0"): SHORTCUT,
    ("RowGradients.nonzero", "-1 -> 1"): TWO_AXES,
    ("RowGradients.unit", "-1 -> 1"): TWO_AXES,
    ("forward_kl_topk", "-1 -> 1"): TWO_AXES,
    ("forward_kl_topk", "0.0 -> 1.0"): UNUSED_BRANCH,
    ("optimal_token_baseline_advantages", "returns.sum(1) -> returns.mean(1)"): ONLY_FINITE,
    ("_counted", "0.0 -> 1.0"): MASKED_LATER,
    ("_passk_of", "n < k -> n <= k"): ALL_DRAWN,
    ("normalize_step", "total[1].clamp(min=1.0) -> total[1]"): NO_TOKENS,
    ("normalize_step", "1.0 -> 0.0"): NO_TOKENS,
    ("normalize_step", "mean.clamp(min=1e-300) -> mean"): UNUSED_BRANCH,
    ("normalize_step", "1e-300 -> 0.0"): UNUSED_BRANCH,
    ("normalize_step", "mean > 1e-08 -> mean >= 1e-08"): TIE,
    ("_dense", "0 -> 1"): EMPTY_GROUP,
    ("correct_rollout", "segments.sum(outside.double()) -> segments.mean(outside.double())"): ANY_AT_ALL,
    ("_rejection_metrics", "segments.sum(vetoed.double()) -> segments.mean(vetoed.double())"): ANY_AT_ALL,
    ("_rejection_metrics", "segments.sum((~numerator).double()) -> segments.mean((~numerator).double())"): ANY_AT_ALL,
    ("mismatch_metrics", "train_log_prob.detach() -> train_log_prob"): NO_METRIC_GRADIENT,
    ("mismatch_metrics", "rollout_log_prob.detach() -> rollout_log_prob"): NO_METRIC_GRADIENT,
    ("RowGradients.split_extra", "-1 -> 1"): TWO_AXES,
    ("label_gradient", "-1 -> 1"): TWO_AXES,
    ("off_label_gradient_", "-1 -> 1"): TWO_AXES,
    ("Transform.apply_", "1.0 -> 0.0"): SHORTCUT,
    ("row_stats", "q_label >= 0 -> q_label > 0"): SAME_ENTROPY,
    (
        "row_stats",
        "label_part < torch.finfo(total.dtype).tiny -> label_part <= torch.finfo(total.dtype).tiny",
    ): BOTH_HOLD,
    ("RolloutImportanceSampling._sort", "low + high -> low - high"): NEITHER_NUMBER,
    ("RolloutImportanceSampling._check", "2 -> 3"): STACKLEVEL,
    ("RolloutImportanceSampling._check", "2 -> 0"): STACKLEVEL,
    ("_dense", "1 -> 2"): EMPTY_GROUP,
}
