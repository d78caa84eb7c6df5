"""The losses that are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batches import PER_TOKEN
from rlloss import CELossConfig, GRPOLossConfig, register_policy_loss
from rlloss.layout import Segments


@register_policy_loss("ranks_sequence")
def sequence(log_prob, old_log_prob, advantages, segments: Segments):
    """A ratio of the whole sequence."""
    return -advantages * segments.broadcast(segments.mean(log_prob - old_log_prob)).exp()


@dataclass
class Loss:
    """A config class, its fields, and the per-token tensors of its batches."""

    config: type
    fields: dict[str, Any]
    keys: tuple[str, ...] = PER_TOKEN


KL = {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}
CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.28}
LOSSES = {
    "vanilla": Loss(GRPOLossConfig, {"policy_loss_cfg": CLIP}),
    "vanilla-kl-entropy": Loss(GRPOLossConfig, {"policy_loss_cfg": CLIP, "entropy_coef": 0.05, **KL}),
    "vanilla-sample-kl": Loss(GRPOLossConfig, {"policy_loss_cfg": CLIP, "loss_reduction": "sample", **KL}),
    "sequence": Loss(GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "ranks_sequence"}, "loss_reduction": "sample"}),
    "ce-token": Loss(CELossConfig, {}),
    "ce-sample": Loss(CELossConfig, {"loss_reduction": "sample"}),
    "ce-square": Loss(CELossConfig, {"loss_reduction": "square"}),
}


def make(name: str, **fields: Any) -> Any:
    """Makes the config of a loss."""
    loss = LOSSES[name]
    return loss.config(**{**loss.fields, **fields})
