"""Correction for a sampling engine whose log-probs differ from the trainer's."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import field_validator, model_validator

from rlloss.errors import ConfigError
from rlloss.functional.rollout import Denominator, RolloutRule
from rlloss.losses.config import StrictModel
from rlloss.losses.verl_rollout import rejection_rules, weight_rules

Bounds = tuple[float, float]


class RolloutImportanceSampling(StrictModel):
    """Importance weights and rejection by the ratio of the trainer's policy to the sampling engine's.

    The first five fields are XTuner's, and compile to rules; `rules` adds more, and the class methods write the
    published corrections. Without thresholds and rules nothing is corrected. Bounds are accepted in either order.

    Deliberate differences from XTuner: labels are never written; a veto works without `rollout_is_threshold`.

    Example:
        >>> from rlloss import RolloutImportanceSampling
        >>> RolloutImportanceSampling(rollout_is_threshold=(2.0, 0.5)).compiled()
        (RolloutRule(level='token', statistic='ratio', action='clamp', low=0.5, high=2.0, denominator='kept'),)
    """

    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, product over a sequence, or geometric mean over a sequence."""
    rollout_is_mode: Literal["truncate", "mask", "both"] = "truncate"
    """Clamp the weights to the threshold, reject what lies outside the mask threshold, or both."""
    rollout_is_threshold: Bounds | None = None
    """Bounds of the weights; None: no weights."""
    rollout_is_mask_threshold: Bounds | None = None
    """Bounds of what is kept in the modes mask and both; None takes rollout_is_threshold."""
    rollout_is_veto_threshold: Bounds | None = None
    """A sequence with one token whose ratio lies outside is rejected as a whole."""
    denominator: Denominator = "kept"
    """kept: a rejected token leaves every term and every count; all: it leaves the policy term's numerator only. A rule
    in `rules` has its own."""
    rules: tuple[RolloutRule, ...] = ()
    """More rules, applied with those of the fields above."""
    policy: Literal["old", "current"] = "old"
    """Whose ratio to the sampling engine is looked at: that of old_logprobs, or of selection_logprobs (the current
    policy before the step, which must be given; verl's bypass mode). With "current" rollout_logprobs are read in place
    of old_logprobs that are missing."""
    normalize_weights: bool = False
    """Divide the weights by their mean over the whole step (one more collective); over sequences where the level is not
    token. A mean of at most 1e-8 is left alone."""

    @field_validator("rollout_is_threshold", "rollout_is_mask_threshold", "rollout_is_veto_threshold")
    @classmethod
    def _sort(cls, bounds: Bounds | None) -> Bounds | None:
        if bounds is None:
            return None
        low, high = sorted(bounds)
        if math.isnan(low + high) or low < 0 or low == high:
            raise ConfigError(f"bounds {bounds} of a ratio must be two different numbers that are not negative.")
        return low, high

    @model_validator(mode="after")
    def _check(self) -> "RolloutImportanceSampling":
        if self.rollout_is_mask_threshold is not None and self.rollout_is_mode == "truncate":
            warnings.warn(
                "rollout_is_mask_threshold does nothing in rollout_is_mode='truncate'. Use 'both' to clamp and reject.",
                stacklevel=2,
            )
        if sum(rule.action == "clamp" for rule in self.compiled()) > 1:
            raise ConfigError("more than one clamp rule: a token has one importance weight. Keep one of them.")
        return self

    def compiled(self) -> tuple[RolloutRule, ...]:
        """Returns the rules that the fields stand for, and `rules`."""
        level, mode, weights = self.rollout_is_level, self.rollout_is_mode, self.rollout_is_threshold
        found: list[RolloutRule] = []
        if weights is not None:
            low, high = weights if mode in ("truncate", "both") else (None, None)
            found.append(RolloutRule(level, "ratio", "clamp", low, high))
        kept = self.rollout_is_mask_threshold or weights
        if kept is not None and mode in ("mask", "both"):
            found.append(RolloutRule(level, "ratio", "mask", *kept, denominator=self.denominator))
        if self.rollout_is_veto_threshold is not None:
            veto = self.rollout_is_veto_threshold
            found.append(RolloutRule("token", "ratio", "veto", *veto, denominator=self.denominator))
        return (*found, *self.rules)

    @classmethod
    def tis(cls, high: float = 2.0, low: float = 0.0, level: Any = "token") -> "RolloutImportanceSampling":
        """Truncated importance sampling: weights clamped to `[low, high]` (fengyao.notion.site/off-policy-rl)."""
        return cls(rollout_is_level=level, rollout_is_threshold=(low, high))

    @classmethod
    def mis(cls, low: float = 0.5, high: float = 2.0, level: Any = "token") -> "RolloutImportanceSampling":
        """Masked importance sampling: raw weights inside of the bounds, rejection outside, in numerator and count."""
        return cls(rollout_is_level=level, rollout_is_mode="mask", rollout_is_threshold=(low, high))

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0, level: Any = "token") -> "RolloutImportanceSampling":
        """IcePop: raw weights inside of the bounds, weight 0 outside; the counts stay (arXiv:2510.26788)."""
        bounds: Any = (low, high)
        return cls(rollout_is_level=level, rollout_is_mode="mask", rollout_is_threshold=bounds, denominator="all")

    @classmethod
    def veto(cls, low: float = 1e-4, high: float = 1e4) -> "RolloutImportanceSampling":
        """Rejects sequences with one token whose ratio lies outside of the bounds; no weights."""
        return cls(rollout_is_veto_threshold=(low, high))

    @classmethod
    def trl(
        cls, mode: str = "sequence_mask", clip_min: float | None = None, clip_max: float | None = 3.0
    ) -> "RolloutImportanceSampling":
        """TRL's `vllm_importance_sampling_mode`: {token,sequence}_{truncate,mask}, with the counts of all tokens.

        Raises:
            ConfigError: Another mode, or no bound at all.
        """
        level, _, action = str(mode).partition("_")
        if level not in ("token", "sequence") or action not in ("truncate", "mask"):
            raise ConfigError(f"mode={mode!r}: expected token_truncate, token_mask, sequence_truncate, sequence_mask.")
        if clip_min is None and clip_max is None:
            raise ConfigError("clip_min and clip_max are both None: give at least one bound.")
        if action == "truncate":
            return cls(rules=(RolloutRule(level, "ratio", "clamp", clip_min, clip_max),))  # type: ignore[arg-type]
        weigh = RolloutRule(level, "ratio", "clamp")  # type: ignore[arg-type]
        return cls(rules=(weigh, RolloutRule(level, "ratio", "mask", clip_min, clip_max, "all")))  # type: ignore[arg-type]

    @classmethod
    def verl(
        cls,
        rollout_is: str | None = None,
        rollout_is_threshold: float | str = 2.0,
        rollout_rs: str | Sequence[str] | None = None,
        rollout_rs_threshold: float | str | None = None,
        rollout_is_batch_normalize: bool = False,
        bypass_mode: bool = False,
    ) -> "RolloutImportanceSampling":
        """Verl's `rollout_correction` in its own names and number formats.

        `rollout_is_threshold` is an upper bound, or "low_high" for IcePop; `rollout_rs` is a comma list out of
        token_{k1,k2,k3}, seq_{sum,mean}_{k1,k2,k3}, seq_max_{k2,k3}, with one threshold for all or one for each: an
        upper bound in nats for k2 and k3, and for k1 "low_high" (or one number b for 1/b and b), which bound
        rollout/train: the inverse of the importance ratio.

        Bypass mode looks at the current policy. There the loss "ppo_clip" is `vanilla` with `rollout_is=None` (its
        ratio is taken against the sampling engine, and holds the weights already); "reinforce" is `reinforce`.

        Raises:
            ConfigError: An unknown option, or a threshold that does not fit it.
        """
        rules = weight_rules(rollout_is, rollout_is_threshold) + rejection_rules(rollout_rs, rollout_rs_threshold)
        policy: Any = "current" if bypass_mode else "old"
        return cls(rules=rules, policy=policy, normalize_weights=rollout_is_batch_normalize)
