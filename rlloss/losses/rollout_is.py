"""Correction for a sampling engine whose log-probs differ from the trainer's."""

from typing import Literal

from pydantic import Field

from rlloss.losses.config import StrictModel

Bounds = tuple[float, float]


class RolloutImportanceSampling(StrictModel):
    """Importance weights and rejection by the ratio of the trainer's old policy to the sampling engine's.

    The fields are XTuner's. Without thresholds nothing is corrected. Bounds are accepted in either order.
    """

    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, product over a sequence, or geometric mean over a sequence."""
    rollout_is_mode: Literal["truncate", "mask", "both"] = "truncate"
    """Clamp the weights to the threshold, reject what lies outside the mask threshold, or both."""
    rollout_is_threshold: Bounds | None = None
    """Bounds of the weights; None switches the correction off."""
    rollout_is_mask_threshold: Bounds | None = None
    """Bounds of what is kept; None takes rollout_is_threshold."""
    rollout_is_veto_threshold: Bounds | None = None
    """A sequence with one token whose ratio lies outside is rejected as a whole."""
    denominator: Literal["kept", "all"] = Field(default="kept")
    """kept: a rejected token leaves every term and every count; all: it leaves the policy term's numerator only."""
