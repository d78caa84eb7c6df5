"""Correction for a sampling engine whose log-probs differ from the trainer's: importance weights and rejection.

With `x = log pi_train - log pi_rollout` of a token, a rule looks at one statistic of it, on one level, and clamps,
masks or vetoes by bounds. Every published correction is a short list of such rules (`rlloss.losses.rollout_is`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlloss.errors import ConfigError, as_number, named_arguments, require_known
from rlloss.functional.policy import LOG_RATIO_BOUND, bounded_ratio
from rlloss.layout import Segments
from rlloss.metrics import EffectiveSampleSize, Mean, Metric, max_of, mean_of, min_of, moments_of

Level = Literal["token", "sequence", "geometric", "max"]
Statistic = Literal["ratio", "k1", "k2", "k3"]
Action = Literal["clamp", "mask", "veto"]
Denominator = Literal["kept", "all"]


@named_arguments
@dataclass(frozen=True)
class RolloutRule:
    """One step of a correction.

    Attributes:
        level: The statistic of a token; its sum over the sequence ("sequence": a ratio is then the product), its mean
            ("geometric") or its maximum ("max").
        statistic: "ratio" is `exp(x)`, "k1" is `-x`, "k2" is `x^2 / 2`, "k3" is `exp(x) - 1 - x`; the k's estimate
            KL(rollout || train) in nats. Note that k1 grows with the inverse of the ratio.
        action: "clamp": the ratio, clamped to the bounds, is the importance weight. "mask": what lies outside is
            rejected. "veto": a sequence with one token outside is rejected as a whole.
        low: Lower bound, `None`: none.
        high: Upper bound, `None`: none.
        denominator: What a rejected token leaves: "kept" every term and every count, "all" the numerator of the policy
            term only (its importance weight is 0).
    """

    level: Level = "token"
    statistic: Statistic = "ratio"
    action: Action = "clamp"
    low: float | None = None
    high: float | None = None
    denominator: Denominator = "kept"

    def __post_init__(self) -> None:
        require_known("rule level", self.level, get_args(Level))
        require_known("rule statistic", self.statistic, get_args(Statistic))
        require_known("rule action", self.action, get_args(Action))
        require_known("rule denominator", self.denominator, get_args(Denominator))
        if self.action == "clamp" and (self.statistic != "ratio" or self.level == "max"):
            raise ConfigError(
                f"a clamp rule makes importance weights out of ratios, but got statistic={self.statistic!r} at "
                f"level={self.level!r}. Use statistic='ratio' at level token, sequence or geometric, or action='mask'."
            )
        if self.action == "veto" and self.level != "token":
            raise ConfigError(f"a veto rule looks at single tokens, but got level={self.level!r}. Use action='mask'.")
        if self.action != "clamp" and self.low is None and self.high is None:
            raise ConfigError(f"a {self.action} rule needs a bound: give low, high, or both.")
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and math.isnan(as_number(bound)):
                raise ConfigError(f"RolloutRule({name}={bound!r}): expected a number, or None for no bound.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(f"low={self.low} lies above high={self.high}.")

    def outside(self, values: Tensor) -> Tensor:
        """Returns which numbers lie outside the bounds; a NaN does not."""
        below = values < (-torch.inf if self.low is None else self.low)
        return below | (values > (torch.inf if self.high is None else self.high))


@dataclass(frozen=True)
class RolloutCorrection:
    """What the rules say about N tokens.

    Attributes:
        weights: `[N]` float64, importance weights; 1 without a clamp rule, 0 where the policy term is left.
        keep: `[N]` bool, tokens that stay in the step.
        metrics: Of weights and rejection.
        normalizer: Sum and number of the weights, for the mean over a step (`[2]` float64); sequences count once.
    """

    weights: Tensor
    keep: Tensor
    metrics: dict[str, Metric]
    normalizer: Tensor


def rollout_statistic(log_ratio: Tensor, segments: Segments, level: Level, statistic: Statistic) -> Tensor:
    """Computes the statistic that a rule looks at, on the rule's level, for each token.

    Log-ratios are bounded to +-20, those of the ratio after the sum or mean over the sequence, those of the k's before.

    Args:
        log_ratio: `[N]`, `log pi_train - log pi_rollout`, nats.
        segments: The sequence of each token.
        level: See `RolloutRule`.
        statistic: See `RolloutRule`.

    Returns:
        `[N]`; the number of a sequence at each of its tokens.
    """
    if statistic == "ratio":
        return bounded_ratio(_spread(log_ratio, segments, level))
    x = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = {"k1": -x, "k2": 0.5 * x.square(), "k3": torch.expm1(x) - x}[statistic]
    return _spread(values, segments, level)


def _spread(values: Tensor, segments: Segments, level: Level) -> Tensor:
    if level == "token":
        return values
    over = {"sequence": segments.sum, "geometric": segments.mean, "max": segments.max}[level]
    return segments.broadcast(over(values))


def correct_rollout(log_ratio: Tensor, segments: Segments, rules: Sequence[RolloutRule]) -> RolloutCorrection:
    """Applies rules: importance weights by the clamp rule, rejection by all others, each on the given log-ratios.

    A NaN log-ratio rejects nothing; it makes the weight NaN, so that it stays visible.

    Args:
        log_ratio: `[N]`, `log pi_train - log pi_rollout`, nats; no gradient flows through the result.
        segments: The sequence of each token.
        rules: At most one of them clamps.

    Returns:
        Weights, the tokens that stay, and metrics; see `RolloutCorrection`.

    Source:
        Truncated importance sampling: fengyao.notion.site/off-policy-rl. Masked: arXiv:2510.26788 (IcePop). Rejection
        by level: "When Speed Kills Stability", yingru.notion.site.
    """
    log_ratio = log_ratio.detach().double()
    ratio = weights = torch.ones_like(log_ratio)
    keep = torch.ones_like(log_ratio, dtype=torch.bool)
    numerator, vetoed = keep, ~keep
    metrics: dict[str, Metric] = {}
    level: Level = "token"
    for rule in rules:
        values = rollout_statistic(log_ratio, segments, rule.level, rule.statistic)
        outside = rule.outside(values)
        if rule.action == "clamp":
            level, ratio = rule.level, values
            weights = values.clamp(rule.low, rule.high) if (rule.low, rule.high) != (None, None) else values
            metrics["is_clamped_low"] = mean_of(values < (0.0 if rule.low is None else rule.low))
            metrics["is_clamped_high"] = mean_of(values > (torch.inf if rule.high is None else rule.high))
            continue
        if rule.action == "veto":
            outside = segments.broadcast(segments.sum(outside.double())) > 0
            vetoed = vetoed | outside
        numerator = numerator & ~outside
        keep = keep & ~outside if rule.denominator == "kept" else keep
    weights = torch.where(keep & ~numerator, 0.0, weights)
    weights = torch.where(log_ratio.isnan(), torch.nan, weights)
    metrics |= _weight_metrics(ratio, weights) | _rejection_metrics(numerator, vetoed, segments)
    return RolloutCorrection(weights, keep, metrics, _normalizer(weights, segments, level))


def _weight_metrics(ratio: Tensor, weights: Tensor) -> dict[str, Metric]:
    return {
        "is_ratio_max": max_of(ratio),
        "is_ratio_min": min_of(ratio),
        "is_weight_mean": mean_of(weights),
        "is_weight_max": max_of(weights),
        "is_weight_min": min_of(weights),
        "is_weight_std": moments_of(weights),
        "is_weight_ess": moments_of(weights, EffectiveSampleSize),
    }


def _rejection_metrics(numerator: Tensor, vetoed: Tensor, segments: Segments) -> dict[str, Metric]:
    present = segments.sizes > 0
    count = present.double().sum()
    touched = (segments.sum((~numerator).double()) > 0).double().sum()
    gone = (segments.sum(vetoed.double()) > 0).double().sum()
    return {
        "rollout_rejected_tokens": mean_of(~numerator),
        "rollout_rejected_sequences": Mean(touched, count),
        "rollout_vetoed_sequences": Mean(gone, count),
    }


def _normalizer(weights: Tensor, segments: Segments, level: Level) -> Tensor:
    if level == "token":
        return torch.stack([weights.sum(), weights.new_tensor(float(weights.numel()))])
    present = segments.sizes > 0
    return torch.stack([segments.mean(weights).sum(), present.double().sum()])


def mismatch_metrics(train_log_prob: Tensor, rollout_log_prob: Tensor, segments: Segments) -> dict[str, Metric]:
    """Measures how far the sampling engine's log-probs are from the trainer's.

    Token means of k1 and k3 (KL(rollout || train), nats), of |x| and of `exp(2x) - 1` (chi-square); sequence means of
    both perplexities, of their ratio and of the difference of log-perplexities.

    Args:
        train_log_prob: `[N]`, nats.
        rollout_log_prob: `[N]`, nats.
        segments: The sequence of each token.
    """
    train, rollout = train_log_prob.detach().double(), rollout_log_prob.detach().double()
    x = train - rollout
    bounded = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    present = segments.sizes > 0
    mean_train, mean_rollout = segments.mean(train)[present], segments.mean(rollout)[present]
    difference = mean_rollout - mean_train
    return {
        "mismatch_k1": mean_of(-x),
        "mismatch_k3": mean_of(torch.expm1(bounded) - bounded),
        "mismatch_abs": mean_of(x.abs()),
        "mismatch_abs_max": max_of(x.abs()),
        "mismatch_chi2": mean_of(torch.expm1(2.0 * bounded)),
        "train_ppl": mean_of((-mean_train).exp()),
        "train_log_ppl": mean_of(-mean_train),
        "rollout_ppl": mean_of((-mean_rollout).exp()),
        "rollout_log_ppl": mean_of(-mean_rollout),
        "ppl_ratio": mean_of(difference.exp()),
        "log_ppl_diff": mean_of(difference),
        "log_ppl_abs_diff": mean_of(difference.abs()),
        "log_ppl_diff_max": max_of(difference),
        "log_ppl_diff_min": min_of(difference),
    }
