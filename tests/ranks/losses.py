"""The losses that are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batches import PER_TOKEN, Step, random_step
from rlloss import ActorCriticLossConfig, CELossConfig, GRPOLossConfig, OrealLossConfig, register_policy_loss
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
ROLLOUT = {
    "rollout_is_level": "sequence",
    "rollout_is_mode": "both",
    "rollout_is_threshold": (0.5, 2.0),
    "rollout_is_mask_threshold": (0.3, 4.0),
    "rollout_is_veto_threshold": (0.05, 20.0),
}
GEOMETRIC = {"rollout_is_level": "geometric", "normalize_weights": True}


def step_of_all() -> Step:
    """A step with every tensor that a loss here reads."""
    step, generator = random_step(3, [5, 9, 1, 7, 12, 3, 8, 6]), torch.Generator().manual_seed(7)
    for sequence in step.sequences:
        noise = torch.randn(3, len(sequence["hidden"]), generator=generator, dtype=torch.float64)
        sequence["rollout_logprobs"] = sequence["old_logprobs"] + 0.3 * noise[0]
        sequence["returns"], sequence["values"] = noise[1], noise[2]
        sequence["selection_entropy"] = noise[0].abs()
    return step


LOSSES = {
    "vanilla": Loss(GRPOLossConfig, {"policy_loss_cfg": CLIP}),
    "vanilla-kl-entropy": Loss(GRPOLossConfig, {"policy_loss_cfg": CLIP, "entropy_coef": 0.05, **KL}),
    "vanilla-sample-kl": Loss(GRPOLossConfig, {"policy_loss_cfg": CLIP, "loss_reduction": "sample", **KL}),
    "sequence": Loss(GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "ranks_sequence"}, "loss_reduction": "sample"}),
    "gspo": Loss(GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "gspo"}}),
    "gmpo": Loss(GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "gmpo"}, **KL}),
    "cispo": Loss(GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "cispo"}, "entropy_coef": 0.05}),
    "vespo": Loss(GRPOLossConfig, {"policy_loss_cfg": {"loss_type": "vespo"}, "logit_softcap": 3.0}),
    "off-policy": Loss(
        GRPOLossConfig,
        {"policy_loss_cfg": CLIP, "off_policy_limit": 0.1, "kl_importance": "sequence_mean", **KL},
        (*PER_TOKEN, "rollout_logprobs"),
    ),
    "oreal": Loss(OrealLossConfig, {"policy_loss_cfg": CLIP, **KL}),
    "oreal-sample": Loss(OrealLossConfig, {"policy_loss_cfg": CLIP, "loss_reduction": "sample", "logit_scale": 0.5}),
    "rollout": Loss(
        GRPOLossConfig, {"rollout_is": ROLLOUT, "loss_reduction": "sample"}, (*PER_TOKEN, "rollout_logprobs")
    ),
    "rollout-mean": Loss(
        GRPOLossConfig, {"rollout_is": {**ROLLOUT, **GEOMETRIC}, **KL}, (*PER_TOKEN, "rollout_logprobs")
    ),
    "clip-cov": Loss(
        GRPOLossConfig,
        {
            "policy_loss_cfg": {
                "loss_type": "clip_cov",
                "clip_cov_ratio": 0.3,
                "clip_cov_lb": -9.0,
                "clip_cov_ub": 9.0,
            },
            "top_entropy_quantile": 0.6,
            "entropy_coef": 0.01,
        },
        (*PER_TOKEN, "selection_entropy"),
    ),
    "actor-critic": Loss(ActorCriticLossConfig, {"loss_reduction": "sample", **KL}, (*PER_TOKEN, "returns", "values")),
    "ce-token": Loss(CELossConfig, {}),
    "ce-sample": Loss(CELossConfig, {"loss_reduction": "sample"}),
    "ce-square": Loss(CELossConfig, {"loss_reduction": "square"}),
}


def make(name: str, **fields: Any) -> Any:
    """Makes the config of a loss."""
    loss = LOSSES[name]
    return loss.config(**{**loss.fields, **fields})
