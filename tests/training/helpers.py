"""A run that is tiny enough for tests."""

from __future__ import annotations

from pathlib import Path

from rlloss.training.config import (
    CheckpointConfig,
    GRPOConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SupervisedConfig,
    TaskConfig,
    TrainConfig,
)

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def tiny_config(**changes: object) -> TrainConfig:
    """One layer, few questions; `changes` replace sections."""
    sections: dict[str, object] = {
        "threads": 1,
        "task": TaskConfig(
            options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            pool=600,
            heldout=8,
            prompt="{expression}=",
            replace={" ": ""},
            reward="score",
        ),
        "model": ModelConfig(layers=1, hidden=16, heads=2, kv_heads=1, mlp=16),
        "supervised": SupervisedConfig(steps=3, batch_size=8, micro_batch_size=5, optimizer=OptimizerConfig(lr=1e-2)),
        "grpo": GRPOConfig(
            steps=3,
            rollout=RolloutConfig(prompts=6, group_size=4, max_new_tokens=4),
            updates_per_epoch=2,
            micro_batch_size=5,
            optimizer=OptimizerConfig(lr=1e-2),
        ),
        "checkpoint": CheckpointConfig(every=2),
        "logging": LoggingConfig(histograms_every=1),
    }
    return TrainConfig(**{**sections, **changes})
