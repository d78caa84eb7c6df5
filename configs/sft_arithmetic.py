"""Supervised training alone: cross-entropy on arithmetic, by the same head and calibration as the RL losses."""

from rlloss import CELossConfig
from rlloss.training.config import (
    EvaluationConfig,
    GRPOConfig,
    OptimizerConfig,
    RolloutConfig,
    SupervisedConfig,
    TaskConfig,
    TrainConfig,
)

config = TrainConfig(
    task=TaskConfig(
        name="chain_sum",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        pool=30_000,
        heldout=600,
        prompt="{expression}=",
        replace={" ": ""},
    ),
    supervised=SupervisedConfig(
        steps=600,
        batch_size=128,
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=30),
        loss=CELossConfig(mode="chunk", loss_reduction="token"),
    ),
    grpo=GRPOConfig(steps=0, rollout=RolloutConfig(max_new_tokens=5)),
    evaluation=EvaluationConfig(every=100),
)
