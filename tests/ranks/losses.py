"""The losses that are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from batches import PER_TOKEN, Step, random_step
from rlloss import (
    ActorCriticLossConfig,
    CELossConfig,
    DistillLossConfig,
    GRPOLossConfig,
    MixedLossConfig,
    OrealLossConfig,
    ValueLossConfig,
    register_policy_loss,
)
from rlloss.layout import Segments


@register_policy_loss("ranks_sequence")
def sequence(log_prob, old_log_prob, advantages, segments: Segments):
    """A ratio of the whole sequence."""
    return -advantages * segments.broadcast(segments.mean(log_prob - old_log_prob)).exp()


@dataclass
class Loss:
    """A config class, its fields, and what its batches hold: per-token tensors, numbers of sequences, numbers."""

    config: type
    fields: dict[str, Any]
    keys: tuple[str, ...] = PER_TOKEN
    per_sequence: tuple[str, ...] = ()
    constants: dict[str, int] = field(default_factory=dict)


KL = {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}
CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.28}
ROLLOUT = {
    "rollout_is_level": "sequence",
    "rollout_is_mode": "both",
    "rollout_is_threshold": (0.5, 2.0),
    "rollout_is_mask_threshold": (0.3, 4.0),
    "rollout_is_veto_threshold": (0.05, 20.0),
}
TOPK = 3
PROMPTS, PART_OF = (2, 0, 1, 2, 0, 3, 1, 2), (0, 1, 2, 0, -1, 1, 0, 2)
"""Of each sequence of the step: its prompt, which other ranks have answers to as well, and its part of a mixture."""
TEACHER = ("teacher_topk_ids", "teacher_topk_logprobs")
GEOMETRIC = {"rollout_is_level": "geometric", "normalize_weights": True}


def step_of_all() -> Step:
    """A step with every tensor that a loss here reads."""
    step, generator = random_step(3, [5, 9, 1, 7, 12, 3, 8, 6]), torch.Generator().manual_seed(7)
    for sequence in step.sequences:
        noise = torch.randn(3, len(sequence["hidden"]), generator=generator, dtype=torch.float64)
        sequence["rollout_logprobs"] = sequence["old_logprobs"] + 0.3 * noise[0]
        sequence["returns"], sequence["values"] = noise[1], noise[2]
        sequence["selection_entropy"] = noise[0].abs()
        sequence["selection_logprobs"] = sequence["old_logprobs"] + 0.2 * noise[1]
        sequence["teacher_topk_ids"] = torch.stack([torch.randperm(13, generator=generator)[:TOPK] for _ in noise[0]])
        sequence["teacher_topk_logprobs"] = -0.3 - noise[:TOPK].T.abs()
    for number, (prompt, part) in enumerate(zip(PROMPTS, PART_OF, strict=True)):
        sequence = step.sequences[number]
        sequence["group_ids"] = torch.tensor(prompt)
        sequence["part_ids"] = torch.full(sequence["shifted_labels"].shape, part)
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
    "kl-cov": Loss(
        GRPOLossConfig,
        {"policy_loss_cfg": {"loss_type": "kl_cov", "kl_cov_ratio": 0.2}, "loss_reduction": "sample"},
        (*PER_TOKEN, "selection_logprobs"),
    ),
    "top-entropy": Loss(
        GRPOLossConfig, {"policy_loss_cfg": CLIP, "top_entropy_quantile": 0.3}, (*PER_TOKEN, "selection_entropy")
    ),
    "vanilla-sum": Loss(GRPOLossConfig, {"policy_loss_cfg": CLIP, "loss_reduction": "sum", **KL}),
    "vanilla-sequence-sum": Loss(
        GRPOLossConfig, {"policy_loss_cfg": CLIP, "loss_reduction": "sequence_sum", "grad_reduction": "sum"}
    ),
    "vanilla-constant": Loss(
        GRPOLossConfig,
        {"policy_loss_cfg": CLIP, "loss_reduction": "constant", "loss_length": 16.0, "entropy_coef": 0.05},
    ),
    "vanilla-prompt": Loss(
        GRPOLossConfig,
        {"policy_loss_cfg": CLIP, "loss_reduction": "prompt", "entropy_coef": 0.05, "entropy_reduction": "token"},
        per_sequence=("group_ids",),
        constants={"num_prompts": 6},
    ),
    "gspo-prompt": Loss(
        GRPOLossConfig,
        {"policy_loss_cfg": {"loss_type": "gspo"}, "loss_reduction": "prompt", **KL},
        per_sequence=("group_ids",),
        constants={"num_prompts": 6},
    ),
    "oreal-sequence-sum": Loss(OrealLossConfig, {"policy_loss_cfg": CLIP, "loss_reduction": "sequence_sum", **KL}),
    "value": Loss(ValueLossConfig, {"loss_reduction": "sample"}, ("returns", "values")),
    "distill": Loss(DistillLossConfig, {"loss_reduction": "sample"}, ("temperature", *TEACHER)),
    "mixed": Loss(
        MixedLossConfig,
        {
            "parts": {
                "rl": GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, loss_reduction="sample", **KL),
                "sft": CELossConfig(loss_reduction="square"),
                "teacher": DistillLossConfig(),
            },
            "coefs": {"sft": 0.5},
        },
        (*PER_TOKEN, *TEACHER, "part_ids"),
    ),
    "mixed-on-tokens": Loss(
        MixedLossConfig,
        {
            "parts": {
                "rl": GRPOLossConfig(
                    policy_loss_cfg=CLIP, rollout_is=ROLLOUT, loss_reduction="constant", loss_length=16.0
                ),
                "sft": CELossConfig(),
                "more": GRPOLossConfig(policy_loss_cfg=CLIP, loss_reduction="prompt", entropy_coef=0.05),
            }
        },
        (*PER_TOKEN, "rollout_logprobs", "part_ids"),
        per_sequence=("group_ids",),
        constants={"num_prompts": 6},
    ),
    "actor-critic": Loss(ActorCriticLossConfig, {"loss_reduction": "sample", **KL}, (*PER_TOKEN, "returns", "values")),
    "ce-token": Loss(CELossConfig, {}),
    "ce-sample": Loss(CELossConfig, {"loss_reduction": "sample"}),
    "ce-sequence-sum": Loss(CELossConfig, {"loss_reduction": "sequence_sum"}),
    "ce-sum": Loss(CELossConfig, {"loss_reduction": "sum"}),
    "ce-prompt": Loss(
        CELossConfig, {"loss_reduction": "prompt"}, per_sequence=("group_ids",), constants={"num_prompts": 6}
    ),
    "ce-square": Loss(CELossConfig, {"loss_reduction": "square"}),
}


def make(name: str, **fields: Any) -> Any:
    """Makes the config of a loss."""
    loss = LOSSES[name]
    return loss.config(**{**loss.fields, **fields})
